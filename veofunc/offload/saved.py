"""What autograd saves, and the handle it holds in its place."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from veofunc.offload.ledger import Ledger
from veofunc.offload.stores import Slot, Store

__all__ = ["Fate", "Handle", "Moved", "SavedTensor"]


class Fate(enum.Enum):
    """What becomes of a saved tensor."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SavedTensor:
    """A description of a tensor that autograd saves: what a policy decides by.

    Attributes:
        path: path of the innermost module whose forward saves it, as in `model.named_modules()`; `""`
            outside of the model's modules.
        op: name of the autograd node that made it (`"MmBackward0"`), or `""` if none did.
        shape: its shape.
        dtype: its dtype.
        device: its device.
        nbytes: bytes of its elements, repetition by `expand` not counted.
        index: how many tensors this call of the wrapped function saved before it.
    """

    path: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    index: int


class Moved:
    """Owns the copy of one tensor in a store. Handles of tensors that are the same tensor share it."""

    __slots__ = ("__weakref__", "_kind", "_ledger", "_slot", "nbytes")

    def __init__(self, store: Store, tensor: Tensor, nbytes: int, ledger: Ledger):
        self._slot: Slot = store.put(tensor)
        if not isinstance(self._slot, Slot):
            raise TypeError(f"put of {store!r} must return a slot with a method get, got {self._slot!r}")
        self._kind = _kind(tensor)
        self.nbytes, self._ledger = nbytes, ledger
        ledger.add("live", nbytes)

    def get(self) -> Tensor:
        start = time.perf_counter()
        tensor = self._slot.get()
        self._ledger.waited(time.perf_counter() - start)
        if not isinstance(tensor, Tensor) or _kind(tensor) != self._kind:
            got = _kind(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"the store put away a tensor of {self._kind}, and gave back {got}")
        return tensor

    def __del__(self):
        if hasattr(self, "_ledger"):  # else the store failed
            self._ledger.add("live", -self.nbytes, count=-1)


def _kind(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype, tensor.device


class Handle:
    """What autograd holds for a saved tensor. It owns the tensor or its copy, and dies with the graph.

    It also does what autograd leaves out as soon as a hook packs a tensor: it refuses to give back a
    tensor that was changed in place after it was saved.
    """

    __slots__ = ("__weakref__", "_ledger", "_moved", "_restored", "_version", "nbytes", "tensor")

    def __init__(self, tensor: Tensor, nbytes: int, ledger: Ledger):
        # A detached alias, because the tensor itself may hold, through its grad_fn, this very handle.
        # After `move` it is empty and shares only the version counter.
        self.tensor = tensor.detach()
        self.nbytes = nbytes
        self._version = tensor._version
        self._ledger = ledger
        self._moved: Moved | None = None
        self._restored = False

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since it was saved."""
        return self.tensor._version != self._version

    def move(self, moved: Moved) -> None:
        """Gives the tensor up for its copy, but goes on watching its version counter."""
        self._moved = moved
        self.tensor.data = self.tensor.new_empty(0)

    def restore(self) -> Tensor:
        """The saved tensor, for backward.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if self.changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a saved tensor is at version {self.tensor._version}; expected version "
                f"{self._version}. Clone it before changing it, or use an out-of-place operation"
            )
        if self._moved is None:
            return self.tensor
        tensor = self._moved.get()
        self._ledger.add("restored_again" if self._restored else "restored", self.nbytes)
        self._restored = True
        return tensor

    def __del__(self):
        if getattr(self, "_moved", None) is not None and not self._restored:
            self._ledger.add("dropped", self.nbytes)
