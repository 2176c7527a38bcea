"""Values that are no tensors of the state: JSON as it is, and what is nearly JSON, encoded as JSON.

Schedulers, groups of parameters and data loaders hold more than JSON. The rest is tagged, so that it
needs no template to come back exactly. A key with a colon is always a tag:

    {3: "a", None: "b"}             {"int:3": "a", "NoneType:null": "b"}
    {"a:b": 1}                      {"str:a:b": 1}
    (1, 2)                          {"tuple:": [1, 2]}
    {2, 1}                          {"set:": [1, 2]}
    Counter({2: 1})                 {"Counter:": {"int:2": 1}}
    b"ab"                           {"bytes:": "YWI="}
    1 + 2j                          {"complex:": [1.0, 2.0]}
    torch.int8                      {"dtype:": "int8"}
    torch.device("cuda:1")          {"device:": "cuda:1"}
    np.float32(0.5)                 {"numpy:": ["float32", 0.5]}
    torch.tensor(0.5)               {"tensor:": ["float32", 0.5]}

Where tensors can be kept beside the JSON, they stay tensors, and their names stand for them:

    {"a": [torch.ones(2)]}          {"a": [{"tensor:": "a.0"}]} and {"a.0": torch.ones(2)}
    np.ones(2)                      {"array:": {"tensor:": ""}} and {"": torch.ones(2, dtype=torch.float64)}
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veofunc.checkpoint.manifest import Json

__all__ = ["decode", "encode", "to_json"]

PLAIN = (type(None), bool, int, float, str)
SEQUENCES = (tuple, torch.Size)
SETS = (set, frozenset)
MAPPINGS = (Counter, OrderedDict)
NUMBERS = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))  # of those of numpy, in the byte order of the machine
TAGS: dict[str, Callable[[Any], Any]] = {
    **{f"{kind.__name__}:": kind for kind in (*SEQUENCES, *SETS, *MAPPINGS)},
    "bytes:": base64.b64decode,
    "complex:": lambda parts: complex(*parts),
    "dtype:": lambda name: getattr(torch, name),
    "device:": torch.device,
    "numpy:": lambda pair: np.dtype(pair[0]).type(pair[1]),
    "array:": lambda tensor: tensor.cpu().numpy(),
}


def to_json(value: Any, where: str) -> Json:
    """A copy of `value`, which must be JSON.

    Raises:
        TypeError: some value in it is not; names it, as in "config.sizes.0".
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, list):
        return [to_json(item, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: to_json(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, Tensor):
        raise TypeError(f"{where} is a tensor inside a list or dict; put it into a TensorDict")
    raise TypeError(
        f"{where} must be a tensor, a TensorDict or JSON (None, bool, int, float, str, list, dict "
        f"with str keys), got {type(value).__name__}: {value!r:.80}"
    )


def encode(value: Any, where: str, tensors: dict[str, Tensor] | None = None) -> Json:
    """A copy of `value` as JSON, from which `decode` makes it again.

    Args:
        value: JSON, or what the table above has, in it.
        where: its name, for errors.
        tensors: gets the tensors in `value` and the elements of its arrays, by names; the tensors
            are not copied. Without it only real tensors of no dimensions may be there.

    Raises:
        TypeError: something in it is nothing of these; names it, as in "scheduler.milestones.0".
    """

    def walk(value: Any, path: str) -> Json:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            return [walk(item, f"{path}.{index}") for index, item in enumerate(value)]
        if kind is dict:
            return {_encode_key(k, f"{where}{path}.{k}"): walk(v, f"{path}.{k}") for k, v in value.items()}
        if kind in MAPPINGS:
            return {f"{kind.__name__}:": walk(dict(value), path)}
        if kind in SEQUENCES:
            return {f"{kind.__name__}:": walk(list(value), path)}
        if kind in SETS:  # in an order that is the same in every process
            return {f"{kind.__name__}:": sorted((walk(item, path) for item in value), key=json.dumps)}
        if kind is bytes:
            return {"bytes:": base64.b64encode(value).decode()}
        if kind is complex:
            return {"complex:": [value.real, value.imag]}
        if kind is torch.dtype:
            return {"dtype:": _name(value)}
        if kind is torch.device:
            return {"device:": str(value)}
        if isinstance(value, np.generic) and value.dtype in NUMBERS:
            return {"numpy:": [value.dtype.name, walk(value.item(), path)]}
        if isinstance(value, Tensor) and tensors is not None:
            name = path.removeprefix(".")
            while name in tensors:  # {"a.b": x, "a": {"b": y}}
                name += "_"
            tensors[name] = value.detach() if value.requires_grad else value
            return {"tensor:": name}
        if isinstance(value, Tensor) and not (value.ndim or value.is_meta or value.is_complex()):
            return {"tensor:": [_name(value.dtype), value.item()]}
        if kind is np.ndarray and tensors is not None and value.dtype in NUMBERS:
            return {"array:": walk(torch.from_numpy(value.copy()), path)}
        raise TypeError(f"{where}{path} must be {_accepted(tensors)}, got {_described(value)}")

    return walk(value, "")


def decode(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The value that `encode` was given, as a copy.

    Its tensors are on the CPU, or, if `encode` kept them in `tensors`, where those are.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tensor:": [dtype, number]}:
            return torch.tensor(number, dtype=getattr(torch, dtype), device="cpu")
        case {"tensor:": name}:
            return (tensors or {})[name].clone()
    if len(value) == 1 and (tag := next(iter(value))) in TAGS:
        return TAGS[tag](decode(value[tag], tensors))
    return {_decode_key(key): decode(item, tensors) for key, item in value.items()}


def _encode_key(key: Any, where: str) -> str:
    if type(key) is str:
        return f"str:{key}" if ":" in key else key
    if type(key) not in PLAIN:
        raise TypeError(f"{where} must be a key that is str, int, float, bool or None, got {key!r:.80}")
    return f"{type(key).__name__}:{json.dumps(key)}"


def _decode_key(key: str) -> Any:
    kind, colon, text = key.partition(":")
    if not colon:
        return key
    return text if kind == "str" else json.loads(text)


def _accepted(tensors: dict[str, Tensor] | None) -> str:
    kept = "a real tensor of no dimensions with data" if tensors is None else "a tensor, an array of numbers"
    return (
        "None, bool, int, float, complex, str, bytes, a number of numpy, a dtype or device of torch, "
        f"{kept}, or a list, tuple, set, dict, Counter or OrderedDict of these"
    )


def _described(value: Any) -> str:
    shape = f"a tensor of shape {list(value.shape)} " if isinstance(value, Tensor) else ""
    return f"{shape or type(value).__name__}: {value!r:.80}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
