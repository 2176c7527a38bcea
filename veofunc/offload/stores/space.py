"""`Space`: which parts of a file, or of a stretch of memory, are in use."""

from __future__ import annotations

from bisect import bisect

__all__ = ["PAGE", "Space", "whole_pages"]

PAGE = 4096  # bytes: direct I/O wants offsets, lengths and addresses that are multiples of it


def whole_pages(nbytes: int) -> int:
    """Bytes of the pages that hold `nbytes` bytes: at least one."""
    return max(nbytes + -nbytes % PAGE, PAGE)


class Space:
    """Gives out parts in whole pages, the lowest that fits first, and joins neighbours that come back.

    So the space that is touched stays small, and sizes that never come again take nothing for ever.

    Args:
        capacity: bytes there are; None for no limit.

    Attributes:
        end: of the last part in use, in bytes.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity, self.end = capacity, 0
        self._holes: list[tuple[int, int]] = []  # (start, end), sorted; none touches another or `end`

    def take(self, nbytes: int) -> int | None:
        """Where a free part of `whole_pages(nbytes)` bytes starts; None if there is none."""
        size = whole_pages(nbytes)
        for i, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[i : i + 1] = [(start + size, end)] if start + size < end else []
                return start
        if self.capacity is not None and self.end + size > self.capacity:
            return None
        self.end += size
        return self.end - size

    def give(self, start: int, nbytes: int) -> None:
        """Takes back what `take(nbytes)` gave."""
        end = start + whole_pages(nbytes)
        i = bisect(self._holes, (start, end))
        if i < len(self._holes) and self._holes[i][0] == end:
            end = self._holes.pop(i)[1]
        if i > 0 and self._holes[i - 1][1] == start:
            start = self._holes.pop(i := i - 1)[0]
        if end == self.end:
            self.end = start
        else:
            self._holes.insert(i, (start, end))
