"""What a store is: where offloaded tensors wait for backward.

A store is any object with the two methods of `Store`. What `put` returns owns its copy: when that object
dies, the copy is freed, so a store needs no ids and no clean-up. Ours are in `host.py` and `disk.py`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Slot", "Store"]


@runtime_checkable
class Slot(Protocol):
    """One tensor in a store. It is freed when this object dies."""

    def get(self) -> Tensor:
        """The tensor again: same values, shape, strides, dtype, device. May be called many times."""
        ...

    # A slot may also have `prefetch(self) -> None`: `get` will come soon. It starts to bring the tensor
    # back, as far as the store has room for it, and never blocks. One that is never called or that does
    # nothing is right too.


@runtime_checkable
class Store(Protocol):
    """Where tensors can be moved to."""

    def accepts(self, tensor: Tensor) -> bool:
        """Whether moving `tensor` here frees memory where it is."""
        ...

    def put(self, tensor: Tensor) -> Slot:
        """Copies `tensor` and returns the slot that owns the copy."""
        ...
