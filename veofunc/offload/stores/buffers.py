"""`Buffers`: host memory that tensors pass through between their place and a file."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from veofunc.offload.stores.space import Space, whole_pages

__all__ = ["Buffer", "Buffers", "shown", "shown_until"]


class Buffer(NamedTuple):
    """Whole pages of memory, page-aligned.

    Attributes:
        pages: the memory.
        start: where it starts in its `Buffers`; None if it is an extra one.
    """

    pages: memoryview
    start: int | None


class Buffers:
    """Buffers of any size, cut out of one stretch of memory.

    The stretch is mapped once, and a page of it that was touched stays: using it again costs nothing,
    while each new page costs more than to fill it.

    Args:
        capacity: bytes of the stretch.

    Raises:
        ValueError: there is no stretch of that size.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._space = Space(capacity)
        try:
            self._stretch = _map(whole_pages(capacity))
        except (OSError, OverflowError) as error:
            raise ValueError(f"there is no stretch of {capacity} bytes of memory: {error}") from error

    def can_hold(self, nbytes: int) -> bool:
        """Whether a buffer of `nbytes` bytes fits when nothing else is in use."""
        return whole_pages(nbytes) <= self.capacity

    def take(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes` bytes; None if no free part is that large."""
        start = self._space.take(nbytes)
        return None if start is None else Buffer(self._stretch[start : start + whole_pages(nbytes)], start)

    def extra(self, nbytes: int) -> Buffer:
        """A buffer beside the stretch, whose memory is gone when nobody uses it."""
        return Buffer(_map(whole_pages(nbytes)), None)

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back."""
        if buffer.start is not None:
            self._space.give(buffer.start, len(buffer.pages))


def _map(nbytes: int) -> memoryview:
    # Private: after a fork, parent and child must not see each other's tensors.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, nbytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def shown(buffer: Buffer, nbytes: int) -> Tensor:
    """The first bytes of `buffer` as a tensor, uint8 [nbytes], that shares its memory."""
    return torch.frombuffer(buffer.pages, dtype=torch.uint8)[:nbytes]


def shown_until(buffer: Buffer, nbytes: int, ended: Callable[[], None]) -> Tensor:
    """The same, for a user to keep: `ended` is called when no tensor shares the memory any more.

    It may be called in any thread and anywhere.
    """
    watch = np.ndarray.__new__(_Watch, len(buffer.pages), np.uint8, buffer.pages)
    watch.ended = ended
    return torch.frombuffer(watch, dtype=torch.uint8)[:nbytes]


class _Watch(np.ndarray):
    """What the storage of a tensor holds on to, and by whose death one learns of its own."""

    ended: Callable[[], None]

    def __del__(self):
        self.ended()
