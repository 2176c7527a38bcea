"""How a tensor lies in memory, so that it can be taken apart and built again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Layout", "Parts", "View", "emptied", "is_plain", "is_strided"]

PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is strided, has elements of its own, and counts changes of them.

    Not so: subclasses, sparse, nested and quantised tensors, those of a running `vmap`, those made in
    inference mode, and zeros that PyTorch never writes to memory.
    """
    return type(tensor) in PLAIN_TYPES and tensor.device.type != "meta" and is_strided(tensor)


def is_strided(tensor: Tensor) -> bool:
    """The same for tensors that only stand for others: of whatever type and without elements."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.is_inference()
        and not tensor._is_zerotensor()
    )


@dataclass(frozen=True)
class Layout:
    """How a strided tensor lies in memory, without the repetition that `expand` makes.

    `core_shape` is `shape` with every dimension of stride 0 cut to one element: only the core is moved.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    core_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        core_shape = tuple(min(size, 1) if stride == 0 else size for size, stride in dims)
        return cls(tuple(tensor.shape), tensor.stride(), core_shape, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the core: what is moved."""
        return torch.Size(self.core_shape).numel() * self.dtype.itemsize

    def core(self, tensor: Tensor) -> Tensor:
        """The part of `tensor` to copy: `core_shape`, a view."""
        return tensor.detach()[tuple(slice(size) for size in self.core_shape)]

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of the core's bytes: a uint8 vector in host memory, [nbytes]."""
        host = torch.empty(self.core_shape, dtype=self.dtype, device="cpu").copy_(self.core(tensor))
        return host.reshape(-1).view(torch.uint8)

    def rebuild(self, host: Tensor) -> Tensor:
        """The tensor again, from what `to_host` gave."""
        core = torch.empty_strided(self.core_shape, self.stride, dtype=self.dtype, device=self.device)
        core.copy_(host.view(self.dtype).view(self.core_shape))
        return core.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class View:
    """How a plain tensor shows its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that shows `storage` like this."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)
        tensor = torch._conj(tensor) if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor

    @property
    def end(self) -> int:
        """Bytes of the storage up to the last that it shows."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def covers(self, nbytes: int) -> bool:
        """Whether it shows each of the `nbytes` bytes of a storage once, and as they are."""
        numel = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != numel:
                return False
            numel *= size
        return numel * self.dtype.itemsize == nbytes and not (self.is_conj or self.is_neg)


class Parts:
    """A tensor as plain ones: itself, or those inside a wrapper such as `DTensor`.

    Attributes:
        tensors: the plain tensors; empty if the tensor is of another kind and cannot be taken apart.
    """

    def __init__(self, tensors: list[Tensor], build=None):
        self.tensors = tensors
        self._build = build

    @classmethod
    def of(cls, tensor: Tensor, is_plain: Callable[[Tensor], bool] = is_plain) -> Parts:
        if is_plain(tensor):
            return cls([tensor])
        # A result that is still on its way (it has trigger_wait) must not be looked into.
        if not is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "trigger_wait"):
            return cls([])
        moving, staying, context = _taken_apart(tensor)
        moving = {name: cls.of(inner, is_plain) for name, inner in moving.items()}
        if not all(parts.tensors for parts in moving.values()):
            return cls([])
        counts = {name: len(parts.tensors) for name, parts in moving.items()}
        kind, size, stride = type(tensor), tensor.shape, tensor.stride()

        def build(tensors: list[Tensor]) -> Tensor:
            rest = iter(tensors)
            made = {
                name: parts.together([next(rest) for _ in range(counts[name])])
                for name, parts in moving.items()
            }
            return kind.__tensor_unflatten__(staying | made, context, size, stride)

        tensors = [part for parts in moving.values() for part in parts.tensors]
        for parts in moving.values():
            parts.tensors = []
        return cls(tensors, build)

    def together(self, tensors: list[Tensor]) -> Tensor:
        """The tensor again, made of `tensors`, which are like the parts that it had."""
        return tensors[0] if self._build is None else self._build(tensors)


def emptied(alias: Tensor) -> None:
    """Makes a detached alias give up its memory, so that only the version counter is shared."""
    if is_traceable_wrapper_subclass(alias):
        for name, inner in _taken_apart(alias)[0].items():
            setattr(alias, name, inner.new_empty(0))
    else:
        alias.data = alias.new_empty(0)


def _taken_apart(wrapper: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """What can be moved of a wrapper, what stays, and what else it is rebuilt with."""
    names, context = getattr(wrapper, "__tensor_flatten__")()  # noqa: B009
    inner = {name: getattr(wrapper, name) for name in names}
    # The offsets of a nested tensor are part of its shape, by their identity.
    offsets = inner.keys() - {"_values"} if wrapper.is_nested else set()
    moving = {name: t for name, t in inner.items() if isinstance(t, Tensor) and name not in offsets}
    return moving, {name: t for name, t in inner.items() if name not in moving}, context
