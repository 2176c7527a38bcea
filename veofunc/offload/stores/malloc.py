"""What a C library does with memory that is freed: it should give it back."""

from __future__ import annotations

import ctypes
import os

__all__ = ["give_back_large_blocks", "trim"]

LARGE = 1 << 20  # bytes
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def give_back_large_blocks() -> None:
    """From now on, blocks of `LARGE` bytes and more go back to the system when they are freed.

    With glibc and in the whole process. Otherwise it learns to keep what is freed, up to 32 MiB a block.
    Whoever has set this by an environment variable keeps it.
    """
    libc = _glibc()
    settings = f"{os.environ.get('GLIBC_TUNABLES', '')} {' '.join(os.environ)}".lower()
    if libc is not None and "mmap_threshold" not in settings:
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Gives back what is free now (glibc only)."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
