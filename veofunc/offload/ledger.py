"""Counts what one `offload` did, over all its calls."""

from __future__ import annotations

import threading

import torch
from tensordict import TensorDict

__all__ = ["Ledger"]

EVENTS = (
    "packed",
    "kept",
    "deduplicated",
    "moved",
    "recomputed",
    "restored",
    "restored_again",
    "dropped",
    "live",
)


class Ledger:
    """Sums of tensors and bytes per event, and seconds waited for the store; safe from any thread."""

    def __init__(self):
        # Reentrant: a handle may die, and report that, while its own thread is reporting something.
        self._lock = threading.RLock()
        self._count = dict.fromkeys(EVENTS, 0)
        self._bytes = dict.fromkeys(EVENTS, 0)
        self._wait_seconds = 0.0

    def add(self, event: str, nbytes: int, count: int = 1) -> None:
        with self._lock:
            self._count[event] += count
            self._bytes[event] += nbytes

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._wait_seconds += seconds

    def count(self, event: str) -> int:
        return self._count[event]

    def snapshot(self) -> TensorDict:
        """`count` and `bytes`, each with one int64 per event; `wait_seconds`, float64."""
        with self._lock:
            count, nbytes, wait_seconds = dict(self._count), dict(self._bytes), self._wait_seconds
        with torch.device("cpu"):  # whatever the default device is
            return TensorDict(
                {
                    "count": {event: torch.tensor(n) for event, n in count.items()},
                    "bytes": {event: torch.tensor(n) for event, n in nbytes.items()},
                    "wait_seconds": torch.tensor(wait_seconds, dtype=torch.float64),
                }
            )
