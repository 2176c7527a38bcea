"""How a strided tensor lies in memory, so that it can be taken apart and built again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout"]


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

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of the core's bytes: a uint8 vector in host memory, [nbytes]."""
        core = tensor.detach()[tuple(slice(size) for size in self.core_shape)]
        host = torch.empty(self.core_shape, dtype=self.dtype, device="cpu").copy_(core)
        return host.reshape(-1).view(torch.uint8)

    def rebuild(self, host: Tensor) -> Tensor:
        """The tensor again, from what `to_host` gave."""
        core = torch.empty_strided(self.core_shape, self.stride, dtype=self.dtype, device=self.device)
        core.copy_(host.view(self.dtype).view(self.core_shape))
        return core.as_strided(self.shape, self.stride)
