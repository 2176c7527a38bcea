"""One save on its way to disk."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path

from veofunc.checkpoint.manifest import CheckpointError
from veofunc.checkpoint.ranks import explain

__all__ = ["Gate", "Save"]


class Gate:
    """Lets a save begin to copy the state, unless whoever asked for it was interrupted before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = self._has_begun = False

    def begin(self) -> None:
        """Begin to copy.

        Raises:
            CheckpointError: it is closed.
        """
        with self._lock:
            if self._is_closed:
                raise CheckpointError("save was interrupted")
            self._has_begun = True

    def close(self) -> bool:
        """Let nothing begin any more; whether it has begun, so that the state may not change yet."""
        with self._lock:
            self._is_closed = True
            return self._has_begun


class Save:
    """One save on its way to disk, as `Checkpointer.save` returns it.

    Attributes:
        step: its number.
    """

    def __init__(self, step: int, total: int = 0, told: bool = False):
        self.step = step
        self._total = total
        self._written = 0
        self._lock = threading.Lock()
        self._told = told  # whether its failure was raised
        self._copies: list[Future[None]] = []
        self._future: Future[str] = Future()

    @property
    def done(self) -> bool:
        """Whether it is on disk, or failed."""
        return self._future.done()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has written, and those that it writes in all."""
        return self._written, self._total

    def wait_staged(self) -> None:
        """Return when the state may change.

        After `save` that is at once; after `save(..., block=False)` when the state is copied. With
        `copy=False` the state may not change before `result` has returned.

        Raises:
            CheckpointError: it could not be copied, or was changed meanwhile; the save fails.
        """
        for copy in self._copies:
            error = copy.exception()
            if error:
                raise CheckpointError(f"step {self.step} is not saved: {explain(error)}") from error

    def result(self, timeout: float | None = None) -> Path | str:
        """Wait until the step is on disk; its directory, or URL.

        Args:
            timeout: seconds to wait at most.

        Raises:
            CheckpointError: it could not be saved; names rank, file and cause.
            TimeoutError: it is still being written.
        """
        if not self._ended(timeout):
            raise TimeoutError(f"step {self.step} is still being written after {timeout:g} s")
        if self._future.cancelled():
            raise CheckpointError(f"step {self.step} was not saved: save was interrupted")
        if self._future.exception() is not None:
            self._told = True
        place = self._future.result()
        return place if "://" in place else Path(place)

    def __repr__(self) -> str:
        state = "being written" if not self.done else "complete" if self._is_good() else "failed"
        return f"Save(step {self.step}, {state}, {self._written} of {self._total} bytes)"

    def _is_good(self) -> bool:
        return not self._future.cancelled() and self._future.exception() is None

    def _wrote(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes

    def _ended(self, timeout: float | None = None) -> bool:
        """Whether it is over, one way or another, after so many seconds at most."""
        try:
            self._future.exception(timeout)
        except TimeoutError:
            return False
        except CancelledError:  # it was interrupted before it began
            pass
        return True

    def _wait(self) -> None:
        """Wait until it is over, and raise its failure if nobody was told yet."""
        self._ended()
        if not self._over:
            self.result()

    @property
    def _over(self) -> bool:
        """Whether it has ended, and if it failed somebody was told."""
        return self._ended(0) and (self._future.cancelled() or self._told or self._is_good())
