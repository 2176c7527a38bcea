"""What backward needs next is brought back ahead of it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from veofunc.offload.saved import Moved

__all__ = ["ReadAhead"]


class ReadAhead:
    """Asks for the moved tensors of one call in reverse order, at most `limit` bytes ahead of backward.

    Backward may run on other threads than forward, and several times.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._order: list[weakref.ref[Moved]] = []  # as they were moved
        self._next = 0  # those before it were not looked at yet
        self._last = 0
        self._ahead = 0  # bytes asked for and not taken yet
        self._lock = threading.RLock()  # reentrant: a tensor may die, and say so, while its thread is here

    @property
    def position(self) -> int:
        """Place in the order, of what is moved next."""
        return len(self._order)

    def add(self, moved: Moved) -> None:
        self._order.append(weakref.ref(moved))

    def reached(self, position: int, times: int) -> None:
        """Backward is at `position`, and has been there `times` before: asks for what comes before it."""
        if not self._order or self.limit == 0:
            return
        with self._lock:
            if position > self._last:  # another pass, or a step back within this one
                self._next = position
            self._last = position
            self._next = min(self._next, position)
            while self._next > 0 and self._ahead < self.limit:
                self._next -= 1
                moved = self._order[self._next]()
                if moved is not None and moved.gets <= times:
                    self._ahead += moved.prefetch()

    def arrived(self, nbytes: int) -> None:
        with self._lock:
            self._ahead -= nbytes
