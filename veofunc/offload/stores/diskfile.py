"""`PrivateFile`: a file without a name, in which offloaded tensors wait."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable

from veofunc.offload.stores.space import PAGE, Space

__all__ = ["PrivateFile"]

SMALLEST_STEP, LARGEST_STEP = 16 << 20, 256 << 20  # bytes by which the file becomes larger
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)


class PrivateFile:
    """A nameless file whose blocks are taken, written, read, given back and used again.

    Nothing is left of it when its process ends, however that happens. Disk space is reserved in steps
    before it is given out, so that a full disk is noticed by who wants a block. It belongs to the file
    until that is closed: what fitted once fits again.

    Args:
        directory: where the file lies.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, directory: str):
        self.directory, self.is_direct = directory, False
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._space, self._reserved = Space(), 0
        self._can_reserve = hasattr(os, "posix_fallocate")

    def go_direct(self) -> bool:
        """From now on reads and writes go past the page cache, if the file system lets them.

        Returns:
            whether it does.

        Raises:
            OSError: the file cannot be written at all.
        """
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
            os.pwrite(self._file.fileno(), mmap.mmap(-1, PAGE), 0)  # some file systems refuse only this
            self.is_direct = hasattr(os, "O_DIRECT")
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise self._explained("cannot write to a file in", error) from error
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        return self.is_direct

    def take(self, nbytes: int) -> int:
        """Where a free block of `nbytes` bytes starts.

        Raises:
            OSError: there is no room for it.
        """
        start = self._space.take(nbytes)
        assert start is not None, "a file has no capacity"
        try:
            self._reserve(self._space.end - self._reserved)
        except OSError as error:
            self._space.give(start, nbytes)
            raise self._explained(f"cannot offload {nbytes} bytes to a file in", error) from error
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Takes back the block that `take(nbytes)` gave."""
        self._space.give(start, nbytes)

    def _reserve(self, missing: int) -> None:
        if missing <= 0 or not self._can_reserve:
            return
        step = max(missing, min(max(self._reserved, SMALLEST_STEP), LARGEST_STEP))
        try:
            os.posix_fallocate(self._file.fileno(), self._reserved, step)
            self._reserved += step
        except OSError as error:
            if error.errno in UNSUPPORTED:
                self._can_reserve = False  # then the file grows as it is written
            elif step == missing:
                raise
            else:  # there may be room for less
                os.posix_fallocate(self._file.fileno(), self._reserved, missing)
                self._reserved += missing

    def write(self, content: memoryview, start: int) -> None:
        """Writes whole pages.

        Raises:
            OSError: with directory and cause.
        """
        self._move(os.pwrite, content, start, "cannot offload {} bytes to a file in")

    def read(self, content: memoryview, start: int) -> None:
        """Fills `content`, whole pages.

        Raises:
            OSError: with directory and cause.
        """

        def read_some(file: int, rest: memoryview, at: int) -> int:
            return os.preadv(file, [rest], at)

        self._move(read_some, content, start, "cannot read {} bytes from a file in")

    def _move(self, some: Callable, content: memoryview, start: int, problem: str) -> None:
        """Moves all of `content` by `some(file, rest, at)`, which may move less than it is given."""
        done = 0
        while done < len(content):
            try:
                count = some(self._file.fileno(), content[done:], start + done)
            except OSError as error:
                raise self._explained(problem.format(len(content)), error) from error
            if self.is_direct:
                count -= count % PAGE  # the next transfer must start at a page, too
            if count == 0:
                at = start + done
                raise OSError(errno.EIO, f"the offload file in {self.directory} ended at {at} bytes")
            done += count

    def _explained(self, problem: str, error: OSError) -> OSError:
        return OSError(error.errno, f"{problem} {self.directory}: {error.strerror}")

    def __del__(self):
        if hasattr(self, "_file"):  # else it could not be made
            self._file.close()
