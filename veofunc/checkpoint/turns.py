"""Threads that save take turns."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["Turns"]


class Turns:
    """A lock that one thread holds at a time, and that tells a thread that would wait for itself."""

    def __init__(self):
        self._lock = threading.Lock()
        self._inside: set[int] = set()  # threads that hold the lock or wait for it

    @contextmanager
    def one(self) -> Generator[None]:
        """Hold the lock; other threads wait.

        Raises:
            RuntimeError: this thread holds it, or waits for it, already.
        """
        thread = threading.get_ident()
        if thread in self._inside:
            raise RuntimeError(
                "save was called inside a save of the same thread, as by a signal handler; "
                "let the handler set a flag, and save once the other save has returned"
            )
        self._inside.add(thread)  # before the lock and until after it: a signal comes at any time
        try:
            with self._lock:
                yield
        finally:
            self._inside.discard(thread)
