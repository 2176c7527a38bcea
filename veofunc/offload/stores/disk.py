"""`DiskStore`: offloaded tensors wait in a file."""

from __future__ import annotations

import errno
import os
import warnings

import torch
from torch import Tensor

from veofunc.offload.stores import malloc
from veofunc.offload.stores.codec import check_codec, put_coded
from veofunc.offload.stores.diskfile import PrivateFile
from veofunc.offload.stores.store import Slot
from veofunc.offload.stores.traffic import Copy, Traffic

__all__ = ["DiskStore"]

INFLIGHT_BYTES = 128 << 20


class DiskStore:
    """Keeps offloaded tensors in a file in `directory`; works with and without an accelerator.

    `put` copies into a buffer and returns; one thread writes the buffers to the file, another reads ahead
    what is asked for with `slot.prefetch`. A buffer holds its tensor until its memory is needed, so that
    the newest tensors come back without the disk; and what was read becomes, in host memory, the tensor
    itself, without a copy (nor a way to resize its storage).

    The file has no name: nothing is left behind, not after a crash either. Blocks of tensors that are no
    longer needed are used again. Disk space is reserved in steps of up to 256 MiB and given back when
    the store and its last tensor are gone, so that a step that fitted once fits again. With `O_DIRECT` the
    page cache, which would fill the memory that was just freed, is left out.

    A tensor that could not be written stays in its buffer. This raises, once, at the next `put` or when
    that tensor is got, whichever comes first; after that it can be got, and later puts write it again
    first: they raise for as long as the disk is full and work again afterwards.

    Memory of the host must also be given back by the C library. So the first tensor from host memory sets
    glibc's `M_MMAP_THRESHOLD` to 1 MiB, and every 64 MiB its `malloc_trim` is called, for the whole process.
    Blocks of 1 MiB and more then go back to the system when they are freed, and new ones cost page
    faults: a few percent of a step. Set `MALLOC_MMAP_THRESHOLD_` in the environment to choose otherwise.

    After a fork the child uses a file of its own, and cannot read what its parent put.

    Args:
        directory: an existing directory, or one that can be made, on a file system with enough room.
        inflight_bytes: bytes of memory for buffers, both ways together and with tensors that were got; an
            int of at least 0. `put` waits when more is to be written. A larger tensor passes alone. Twice
            the `prefetch` of `offload` lets both ways run beside the computation.
        direct: whether to go past the page cache. None: if the file system can, else a warning is given.
            True: an error if it cannot. False: through the page cache.
        codec: None, or `torch.bfloat16` or `torch.int8`: floating tensors that are wider are kept in it,
            with a loss. Gradients are then no longer the same bit for bit. The bounds are at
            `veofunc.offload.stores.codec`.

    Raises:
        ValueError: an option is out of range.
        OSError: with the directory and the cause. At once: it cannot be made or written to. In the
            forward pass that saves a tensor: the disk is full. As said above: an earlier write failed.

    Warns:
        UserWarning: once, if `direct` is None and the file system has no direct I/O.

    Example:
        >>> import tempfile, torch, veofunc as vf
        >>> store = vf.DiskStore(tempfile.mkdtemp())
        >>> slot = store.put(torch.arange(3))
        >>> slot.get()
        tensor([0, 1, 2])

    Source: SSDTrain (arXiv 2408.10013) for getting a tensor from memory while it is being written.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        inflight_bytes: int = INFLIGHT_BYTES,
        direct: bool | None = None,
        codec: torch.dtype | None = None,
    ):
        if isinstance(inflight_bytes, bool) or not isinstance(inflight_bytes, int) or inflight_bytes < 0:
            raise ValueError(f"inflight_bytes must be an int >= 0 (bytes), got {inflight_bytes!r}")
        if direct is not None and not isinstance(direct, bool):
            raise ValueError(f"direct must be True, False or None (if possible), got {direct!r}")
        check_codec(codec)
        file = _open(directory)
        self.directory, self.inflight_bytes, self.direct = os.fspath(directory), inflight_bytes, direct
        self.codec = codec
        self._goes_direct = direct is not False and file.go_direct()
        if direct and not self._goes_direct:
            raise OSError(
                errno.EINVAL,
                f"no direct I/O to files in {self.directory}; with direct=None or False it is done without",
            )
        if direct is None and not self._goes_direct:
            warnings.warn(
                f"no direct I/O to files in {self.directory}: offloaded tensors go through the page cache, "
                "which takes memory for them again and a copy more each way. Choose a directory on a local "
                "disk, or say direct=False",
                stacklevel=2,
            )
        try:
            self._traffic = Traffic(file, inflight_bytes)
        except ValueError as error:
            raise ValueError(
                f"inflight_bytes must be no more bytes than this process can have, such as {INFLIGHT_BYTES}, "
                f"got {inflight_bytes}: {error}"
            ) from error
        self._has_host_tensors = False

    def __repr__(self) -> str:
        typed = [repr(self.directory)]
        if self.inflight_bytes != INFLIGHT_BYTES:
            typed.append(f"inflight_bytes={self.inflight_bytes}")
        if self.direct is not None:
            typed.append(f"direct={self.direct}")
        if self.codec is not None:
            typed.append(f"codec={self.codec}")
        return f"DiskStore({', '.join(typed)})"

    def accepts(self, tensor: Tensor) -> bool:
        return True

    def put(self, tensor: Tensor) -> Slot:
        if self._traffic.process != os.getpid():  # a fork must not write into its parent's file
            self._traffic = self._fresh_traffic()
        if tensor.device.type == "cpu" and not self._has_host_tensors:
            self._has_host_tensors = True
            malloc.give_back_large_blocks()
        return put_coded(self._put, tensor, self.codec)

    def _put(self, tensor: Tensor) -> Slot:
        return _DiskSlot(self._traffic, self._traffic.put(tensor))

    def _fresh_traffic(self) -> Traffic:
        file = PrivateFile(self.directory)
        if self._goes_direct:
            file.go_direct()
        return Traffic(file, self.inflight_bytes)


def _open(directory: str | os.PathLike) -> PrivateFile:
    try:
        os.makedirs(directory, exist_ok=True)
        return PrivateFile(os.fspath(directory))
    except OSError as error:
        raise OSError(  # of the same subclass: Python chooses it by the number
            error.errno,
            f"directory={os.fspath(directory)!r} must be a directory, or one that can be made, in which this "
            f"process may write files: {error.strerror}; choose another",
        ) from error


class _DiskSlot:
    """Owns a copy: its death frees the block and the buffer."""

    __slots__ = ("__weakref__", "_copy", "_traffic")

    def __init__(self, traffic: Traffic, copy: Copy):
        self._traffic, self._copy = traffic, copy

    def get(self) -> Tensor:
        if self._traffic.process != os.getpid():
            raise RuntimeError("a tensor that was offloaded before a fork can be read by the parent only")
        return self._traffic.get(self._copy)

    def prefetch(self) -> None:
        if self._traffic.process == os.getpid():
            self._traffic.prefetch(self._copy)

    def __del__(self):
        self._traffic.bury(self._copy)
