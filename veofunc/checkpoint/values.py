"""Values that are no tensors of the state: JSON as it is, and what is nearly JSON, encoded as JSON.

Schedulers and groups of parameters hold more than JSON. The rest is tagged, so that it needs no
template to come back exactly. A key with a colon is always a tag:

    {3: "a", None: "b"}     {"int:3": "a", "NoneType:null": "b"}
    {"a:b": 1}              {"str:a:b": 1}
    (1, 2)                  {"tuple:": [1, 2]}
    Counter({2: 1})         {"Counter:": {"int:2": 1}}
    torch.tensor(0.5)       {"tensor:": ["float32", 0.5]}
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from veofunc.checkpoint.manifest import Json

__all__ = ["decode", "encode", "to_json"]

KEYS = (bool, int, float, type(None))  # besides str; written as JSON behind their type


def to_json(value: Any, where: str) -> Json:
    """A copy of `value`, which must be JSON.

    Raises:
        TypeError: some value in it is not; names it, as in "config.sizes.0".
    """
    if value is None or isinstance(value, bool | int | float | str):
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


def encode(value: Any, where: str) -> Json:
    """A copy of `value` as JSON, from which `decode` makes it again.

    Args:
        value: JSON, or tuples, Counters, dicts with other keys and tensors of no dimensions in it.
        where: its name, for errors.

    Raises:
        TypeError: something in it is nothing of these; names it, as in "scheduler.milestones.0".
    """
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if kind is list or kind is tuple:
        items: Json = [encode(item, f"{where}.{index}") for index, item in enumerate(value)]
        return items if kind is list else {"tuple:": items}
    if kind is dict or kind is Counter:
        entries: Json = {
            _encode_key(key, f"{where}.{key}"): encode(item, f"{where}.{key}") for key, item in value.items()
        }
        return entries if kind is dict else {"Counter:": entries}
    if isinstance(value, Tensor) and not (value.ndim or value.is_meta or value.is_complex()):
        return {"tensor:": [str(value.dtype).removeprefix("torch."), value.item()]}
    shape = f"a tensor of shape {list(value.shape)} " if isinstance(value, Tensor) else ""
    raise TypeError(
        f"{where} must be None, bool, int, float, str, a real tensor of no dimensions with data, or a "
        f"list, tuple, dict or Counter of these, got {shape or kind.__name__}: {value!r:.80}"
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given, as a copy; its tensors are on the CPU."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple:": items}:
            return tuple(decode(items))
        case {"Counter:": entries}:
            return Counter(decode(entries))
        case {"tensor:": [dtype, number]}:
            return torch.tensor(number, dtype=getattr(torch, dtype), device="cpu")
    return {_decode_key(key): decode(item) for key, item in value.items()}


def _encode_key(key: Any, where: str) -> str:
    if isinstance(key, str):
        return f"str:{key}" if ":" in key else key
    if type(key) not in KEYS:
        raise TypeError(f"{where} must be a key that is str, int, float, bool or None, got {key!r:.80}")
    return f"{type(key).__name__}:{json.dumps(key)}"


def _decode_key(key: str) -> Any:
    kind, colon, text = key.partition(":")
    if not colon:
        return key
    return text if kind == "str" else json.loads(text)
