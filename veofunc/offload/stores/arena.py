"""`Arena`: host memory that is taken in pieces, given back, and used again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from veofunc.offload.stores.space import Space, whole_pages

__all__ = ["Arena", "Region"]

SMALLEST_SLAB, LARGEST_STEP = 1 << 20, 1 << 30  # bytes


class Arena:
    """Cuts regions of any size out of large slabs, and knits them together again as they are freed.

    Slabs, not a buffer for each size: PyTorch rounds page-locked memory up to powers of two, so that a
    buffer of its own would cost a tensor up to twice its size; and sizes that never come again, as with
    batches of varying length, would keep memory that no other size can use.

    Args:
        allocate: makes a uint8 vector of so many bytes, always a power of two.
        cache_bytes: bytes of wholly free slabs that are kept; what is above goes back to PyTorch.
    """

    def __init__(self, allocate: Callable[[int], Tensor], cache_bytes: int):
        self._allocate, self._cache_bytes = allocate, cache_bytes
        self._slabs: list[_Slab] = []
        self._returned: deque[tuple[_Slab, int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> Region:
        """A region of `nbytes` bytes, until it dies."""
        with self._lock:
            self._take_back()
            slab, start = self._place(nbytes)
            self._take_back()  # some may have died meanwhile
            self._trim()
        return Region(self, slab, start, nbytes)

    def give(self, slab: _Slab, start: int, nbytes: int) -> None:
        """Takes a region back. Called where objects die: in any thread, at any time, even inside `take`."""
        self._returned.append((slab, start, nbytes))
        if self._lock.acquire(blocking=False):  # else whoever has it, or comes next, will see to it
            try:
                self._take_back()
                self._trim()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            slab, start, nbytes = self._returned.popleft()
            slab.space.give(start, nbytes)

    def _place(self, nbytes: int) -> tuple[_Slab, int]:
        for slab in self._slabs:
            start = slab.space.take(nbytes)
            if start is not None:
                return slab, start
        slab = self._grow(nbytes)
        slab.space.take(nbytes)
        return slab, 0

    def _grow(self, nbytes: int) -> _Slab:
        # A quarter of what there is: few slabs, and little more than is needed.
        step = min(_power_of_two_below(self.nbytes // 4), LARGEST_STEP)
        size = max(_power_of_two_above(whole_pages(nbytes)), step, SMALLEST_SLAB)
        with torch.inference_mode(False):  # it outlives the call, whose mode must not stick to it
            slab = _Slab(self._allocate(size), Space(size))
        self._slabs.append(slab)
        return slab

    def _trim(self) -> None:
        free = [slab for slab in self._slabs if slab.space.end == 0]
        excess = sum(slab.nbytes for slab in free) - self._cache_bytes
        while excess > 0:
            slab = free.pop()  # the newest: the first ones are used first
            self._slabs.remove(slab)
            excess -= slab.nbytes


class Region:
    """A piece of host memory. It goes back to its arena when this object dies.

    Attributes:
        memory: uint8 vector.
    """

    __slots__ = ("_arena", "_slab", "_start", "memory")

    def __init__(self, arena: Arena, slab: _Slab, start: int, nbytes: int):
        self._arena, self._slab, self._start = arena, slab, start
        self.memory = slab.memory[start : start + nbytes]

    def __del__(self):
        self._arena.give(self._slab, self._start, self.memory.numel())


@dataclass(frozen=True, eq=False)
class _Slab:
    """One allocation, and which parts of it are in use."""

    memory: Tensor
    space: Space

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


def _power_of_two_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _power_of_two_below(n: int) -> int:
    return 1 << n.bit_length() >> 1
