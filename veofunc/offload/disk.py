"""`DiskStore`: offloaded tensors wait in a file."""

from __future__ import annotations

import os
import tempfile
import threading

import torch
from torch import Tensor

from veofunc.offload.layout import Layout
from veofunc.offload.stores import Slot

__all__ = ["DiskStore"]


class DiskStore:
    """Keeps offloaded tensors in a file in `directory`; works with and without an accelerator.

    The file has no name: nothing is left behind, not after a crash either. The space of tensors that
    are no longer needed is used again. Writes and reads are synchronous and go through the page cache.

    Args:
        directory: an existing directory, or one that can be made, on a file system with enough room.

    Raises:
        OSError: the directory cannot be made or written to (at once), or the disk is full (in the
            forward pass that wanted to save a tensor), with path and cause.

    Example:
        >>> import tempfile, torch, veofunc as vf
        >>> store = vf.DiskStore(tempfile.mkdtemp())
        >>> slot = store.put(torch.arange(3))
        >>> slot.get()
        tensor([0, 1, 2])
    """

    def __init__(self, directory: str | os.PathLike):
        os.makedirs(directory, exist_ok=True)
        self.directory = os.fspath(directory)
        self._file = _PrivateFile(self.directory)

    def __repr__(self) -> str:
        return f"DiskStore({self.directory!r})"

    def accepts(self, tensor: Tensor) -> bool:
        return True

    def put(self, tensor: Tensor) -> Slot:
        if self._file.process != os.getpid():  # a fork must not write into its parent's file
            self._file = _PrivateFile(self.directory)
        layout = Layout.of(tensor)
        content = memoryview(layout.to_host(tensor).numpy())
        return _DiskSlot(layout, self._file, self._file.write(content))


class _DiskSlot:
    def __init__(self, layout: Layout, file: _PrivateFile, offset: int):
        self.layout, self.file, self.offset = layout, file, offset

    def get(self) -> Tensor:
        content = torch.empty(self.layout.nbytes, dtype=torch.uint8, device="cpu")
        self.file.read_into(memoryview(content.numpy()), self.offset)
        return self.layout.rebuild(content)

    def __del__(self):
        self.file.release(self.offset, self.layout.nbytes)


class _PrivateFile:
    """A nameless file whose blocks are used again; blocks of one size are interchangeable.

    When no block is in use it starts anew, so that sizes that never come again take no space for ever.
    """

    def __init__(self, directory: str):
        self.directory, self.process = directory, os.getpid()
        self.file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self.end = self.num_used = 0
        self.free: dict[int, list[int]] = {}
        # Reentrant: a slot may die, and release its block, while its thread is in here.
        self.lock = threading.RLock()

    def write(self, content: memoryview) -> int:
        """Writes `content` and returns its offset."""
        nbytes = len(content)
        with self.lock:
            blocks = self.free.get(nbytes)
            offset = blocks.pop() if blocks else self.end
            self.end = max(self.end, offset + nbytes)
            self.num_used += 1
        try:
            self._write_all(content, offset)
        except BaseException:
            self.release(offset, nbytes)
            raise
        return offset

    def _write_all(self, content: memoryview, offset: int) -> None:
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(self.file.fileno(), content[written:], offset + written)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot offload {len(content)} bytes to a file in {self.directory}: {error.strerror}",
            ) from error

    def read_into(self, content: memoryview, offset: int) -> None:
        if self.process != os.getpid():
            raise RuntimeError("a tensor that was offloaded before a fork can be read by the parent only")
        done = 0
        while done < len(content):
            try:
                count = os.preadv(self.file.fileno(), [content[done:]], offset + done)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"cannot read {len(content)} bytes from a file in {self.directory}: {error.strerror}",
                ) from error
            if count == 0:
                raise OSError(f"the offload file in {self.directory} ended at {offset + done} bytes")
            done += count

    def release(self, offset: int, nbytes: int) -> None:
        with self.lock:
            self.free.setdefault(nbytes, []).append(offset)
            self.num_used -= 1
            if self.num_used == 0:
                self.free.clear()
                self.end = 0

    def __del__(self):
        if hasattr(self, "file"):  # else it could not be made
            self.file.close()
