"""`Monitor`: a lock that gets along with objects that die while it is held."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque

__all__ = ["Monitor"]


class Monitor(ABC):
    """A lock, entered with `with`, that also protects what must be done when something dies.

    `__del__` runs wherever the last reference goes, or where the garbage collector happens to start: in
    any thread, also in one that holds this very lock. So it may not wait for a lock. It calls `bury`,
    which leaves the work to whoever holds the lock now.
    """

    def __init__(self):
        self._condition = threading.Condition(threading.Lock())
        self._dead: deque[object] = deque()

    @abstractmethod
    def _undo(self, dead: object) -> None:
        """What must be done for something that was buried. Called with the lock."""

    def bury(self, dead: object) -> None:
        """Has `_undo(dead)` called soon, at once if the lock is free. Never waits."""
        self._dead.append(dead)
        self._undo_if_free()

    def __enter__(self) -> None:
        self._condition.acquire()
        self._undo_all()

    def __exit__(self, *_) -> None:
        self._undo_all()
        self._condition.release()
        self._undo_if_free()  # what died between the last two lines

    def _wait(self) -> None:
        """Gives the lock up until `_notify`."""
        self._condition.wait()
        self._undo_all()

    def _notify(self) -> None:
        self._condition.notify_all()

    def _undo_all(self) -> None:
        while self._dead:
            self._undo(self._dead.popleft())

    def _undo_if_free(self) -> None:
        while self._dead and self._condition.acquire(blocking=False):
            try:
                self._undo_all()
            finally:
                self._condition.release()
