"""Where the labels and the channel ids of a call are, and which of them belongs to which token loss."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from veofunc.transform import bare_module, has_parameter, inside

__all__ = ["Batch", "Caller", "aligned", "per_token"]

REDUCTIONS = ("none", "mean", "sum")
NOT_IDS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Batch:
    """What one call says about its tokens.

    Attributes:
        labels: int [B, T] or any other shape; None if they were not found.
        channel: int, of the labels' shape or one per row.
        missing: what to say if labels are needed and there are none.
    """

    labels: Tensor | None
    channel: Tensor
    missing: str


class Caller:
    """Knows the parameters of `fn`, so as to read the arguments of its calls.

    Attributes:
        reduction: what its parameter `reduction` is if a call does not say; None without such a parameter.
    """

    def __init__(self, fn: Callable, channel_key: str, label_key: str):
        self._channel_key, self._label_key = channel_key, label_key
        self._signature = _signature_of(fn)
        self._foreign = [key for key in {"channel", channel_key} if not has_parameter(fn, key)]
        parameters = {} if self._signature is None else self._signature.parameters
        self.reduction = parameters["reduction"].default if "reduction" in parameters else None

    def read(self, args: tuple, kwargs: dict) -> tuple[dict[str, Any], Batch]:
        """`kwargs` without ids that `fn` has no parameter for, and the batch.

        Raises:
            ValueError: there are no ids, or several mappings with labels.
            TypeError: labels or ids are no tensors of integers.
        """
        named = self._named(args, kwargs)
        given = kwargs.get("channel")
        arguments = (*args, *kwargs.values())
        mappings = [value for value in arguments if isinstance(value, TensorDictBase | Mapping)] + [named]
        batch, labels, missing = self._labelled(mappings)
        if given is None:
            given = self._ids(mappings if batch is None else [batch], missing)
        _check_ids(given)
        if labels is not None and not isinstance(labels, Tensor):
            raise TypeError(f"the labels must be a tensor, got {type(labels).__name__}")
        kept = {key: value for key, value in kwargs.items() if key not in self._foreign}
        return kept, Batch(labels, given, missing)

    def unreduced(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, str]:
        """Arguments that ask for token losses, and the reduction that was asked for."""
        assert self._signature is not None, "only a signature tells that there is a reduction"
        bound = self._signature.bind(*args, **kwargs)
        asked = bound.arguments.get("reduction", self.reduction)
        if asked not in REDUCTIONS:
            raise ValueError(f"reduction= of the call must be one of {', '.join(REDUCTIONS)}, got {asked!r}")
        bound.arguments["reduction"] = "none"
        return bound.args, bound.kwargs, asked

    def _named(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The arguments by the names of their parameters, as far as these are known."""
        names = []
        if self._signature is not None:
            positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            names = [name for name, p in self._signature.parameters.items() if p.kind in positional]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _labelled(self, mappings: list) -> tuple[Any, Any, str]:
        """The one mapping with labels, they themselves, and what to say if there is none."""
        batches = [mapping for mapping in mappings if _get(mapping, self._label_key) is not None]
        if len(batches) == 1:
            return batches[0], batches[0][self._label_key], ""
        *_, named = mappings
        if not batches and _get(named, "target") is not None:  # as PyTorch's own losses call them
            return named, named["target"], ""
        missing = (
            f"exactly one argument must be a TensorDict or mapping with {self._label_key!r} (label_key=), or "
            f"{self._label_key} be an argument itself, found {len(batches)}. {_keys_of(mappings)}"
        )
        if batches:
            raise ValueError(missing)
        return None, None, missing

    def _ids(self, batches: list, missing: str) -> Any:
        key = self._channel_key
        holders = [batch for batch in batches if _get(batch, key) is not None]
        if len(holders) == 1:
            return holders[0][key]
        raise ValueError(
            missing
            or f"the batch has no {key!r} (channel_key=): put the channel ids there, one per token or row, "
            f"or pass channel=. It has {sorted(map(str, batches[0].keys()))}"
        )


def per_token(ids: Tensor, labels: Tensor) -> Tensor:
    """`ids` with one for each label, from one per label or one per row."""
    _check_ids(ids)
    if ids.shape == labels.shape:
        return ids
    if ids.dim() == 1 and labels.dim() > 1 and len(ids) == len(labels):
        return ids.view(-1, *[1] * (labels.dim() - 1)).expand(labels.shape)
    raise ValueError(
        f"channel must have shape {list(labels.shape)} or {list(labels.shape[:1])}, got "
        f"{list(ids.shape)}; ids are one per label or one per row"
    )


def aligned(values: Tensor, shape: torch.Size, *, following: bool = False) -> Tensor | None:
    """`values`, one per token, as token losses of `shape` have them; None if they do not fit.

    These may be flat, and there may be none for the last token of each row, which predicts nothing. Then
    they lack the last of `values`, or, if these are what `following` tokens are, the first.
    """
    if values.dim():
        shorter = values[..., 1:] if following else values[..., :-1]
        for candidate in (values, shorter):
            if candidate.shape == shape or (len(shape) == 1 and candidate.numel() == shape.numel()):
                return candidate.reshape(shape)
    return values if values.shape == shape else None


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, Tensor) or ids.dtype in NOT_IDS or ids.is_floating_point():
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"channel must be an integer tensor, got {kind}")


def _get(mapping: Any, key: str) -> Any:
    return mapping[key] if key in mapping.keys() else None


def _keys_of(mappings: list) -> str:
    keys = [str(sorted(map(str, mapping.keys()))) for mapping in mappings if mapping.keys()]
    return f"Keys of the mappings among the arguments, names of the arguments: {'; '.join(keys) or 'none'}"


def _signature_of(fn: Callable | None) -> inspect.Signature | None:
    """The first that names parameters, of `fn` or what it wraps."""
    while fn is not None:
        fn = bare_module(fn).forward if isinstance(fn, nn.Module) else fn
        try:
            signature = inspect.signature(fn)
        except ValueError:  # a builtin does not say
            return None
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(p.kind not in variadic for p in signature.parameters.values()):
            return signature
        fn = None if isinstance(fn, types.MethodType) else inside(fn)
    return None
