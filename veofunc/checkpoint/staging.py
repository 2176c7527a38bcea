"""How a save gets hold of the values of one slot: by a copy into prepared memory, or by reference."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import mul
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from veofunc.checkpoint.items import item
from veofunc.checkpoint.manifest import CheckpointError, TreePath
from veofunc.checkpoint.plan import Box, PlannedFile
from veofunc.checkpoint.process import Arena
from veofunc.checkpoint.snapshot import SMALL_BYTES, local
from veofunc.checkpoint.writer import BLOCK_BYTES, combine

__all__ = ["LiveFile", "LiveTensors", "Staging", "can_stay_live"]

SAMPLES = 32  # places of a tensor that are compared
SAMPLE_BYTES = 16


class Staging:
    """Prepared memory for the files of one slot: made once, with all that is not a value already in it.

    Args:
        files: what is copied, and to where.
        leaves: the tensors by their path, for their devices.
    """

    def __init__(self, files: Sequence[PlannedFile], leaves: Mapping[TreePath, Tensor]):
        self.files = files
        devices = {local(leaves[path]).device for file in files for path, _, _ in file.parts}
        self._streams = {device: torch.Stream(device) for device in devices if device.type != "cpu"}
        pin = any(device.type == "cuda" for device in devices)
        with torch.inference_mode(False):  # else no save outside could write into it
            self.arena = Arena([(file.size, file.places) for file in files], pin=pin)
            laid_out = [*self._lay_out()]
        self._groups = {
            is_small: [part for part in laid_out if (local(leaves[part[0]]).nbytes < SMALL_BYTES) is is_small]
            for is_small in (True, False)
        }
        self._turn = 0  # how many saves have used it
        self._copying = threading.Lock()
        self._are_whole = all(_box_of(local(leaves[p]), box) is leaves[p] for p, box, _ in laid_out)

    @property
    def overlaps(self) -> bool:
        """Whether `copy` returns before the values are copied, as an accelerator copies by itself."""
        return bool(self._streams)

    def take(self) -> int:
        """The turn of a save, which `copy` is given; waits for a copy that an interrupted one still makes."""
        with self._copying:
            self._turn += 1
            return self._turn

    @property
    def large(self) -> list[TreePath]:
        """The tensors that are not small."""
        return [path for path, _, _ in self._groups[False]]

    def copy(self, leaves: Mapping[TreePath, Tensor], turn: int, *, small: bool) -> None:
        """Copy the values of small tensors, or of large; those of an accelerator come with `synchronize`.

        Raises:
            CheckpointError: it is another's turn: this save was interrupted.
        """
        with self._copying:
            if turn != self._turn:
                raise CheckpointError("save was interrupted")
            if self._groups[small]:
                self._copy(leaves, self._groups[small])

    def synchronize(self) -> None:
        """Return when the values are copied."""
        for stream in self._streams.values():
            stream.synchronize()

    def _copy(self, leaves: Mapping[TreePath, Tensor], parts: list[tuple[TreePath, Box, Tensor]]) -> None:
        targets = [target for _, _, target in parts]
        if self._are_whole:  # as mostly, and faster
            sources = [leaves[path] for path, _, _ in parts]
        else:
            sources = [_box_of(local(leaves[path]), box) for path, box, _ in parts]
        for device, stream in self._streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))
        with torch.inference_mode(False), torch.no_grad():
            if not self._streams:
                torch._foreach_copy_(targets, sources)
                return
            for target, source in zip(targets, sources, strict=True):
                with self._streams.get(source.device, nullcontext()):
                    target.copy_(source, non_blocking=True)

    def _lay_out(self) -> Iterator[tuple[TreePath, Box, Tensor]]:
        """Put in what surrounds the values; where those of each piece go."""
        for file, (start, _, _) in zip(self.files, self.arena.images, strict=True):
            for (path, box, dtype), (values, nbytes, *_) in zip(file.parts, file.places, strict=True):
                around, place = item(dtype, box[1]), start + values
                self._write(place - len(around.before), around.before)
                self._write(place + nbytes, around.after)
                yield path, box, self.arena.memory[place : place + nbytes].view(dtype).view(box[1])

    def _write(self, place: int, content: bytes) -> None:
        self.arena.memory[place : place + len(content)] = _tensor(content)


def can_stay_live(tensor: Tensor) -> bool:
    """Whether its memory can be written to disk as it is. Small ones are copied: that is faster, and safe."""
    tensor = local(tensor)
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor.device.type == "cpu" and is_plain and tensor.numel() * tensor.itemsize >= SMALL_BYTES


class LiveTensors:
    """Tensors that are saved without a copy, and a guard that notices, mostly, when they are written to.

    It compares version counters and a sample of the bytes. So it does not see a write that moves no
    counter, as those of fused optimizers, of `.data` and of numpy, if it changes no sampled byte.
    """

    def __init__(self, leaves: Mapping[TreePath, Tensor]):
        self.leaves = leaves
        self.bytes = {path: _bytes_of(leaf) for path, leaf in leaves.items()}
        self._seen = {path: self._look(path) for path in leaves}

    def check_unchanged(self) -> None:
        """See to it that they are as they were.

        Raises:
            CheckpointError: naming those that are not.
        """
        changed = [".".join(path) for path, seen in self._seen.items() if self._look(path) != seen]
        if changed:
            raise CheckpointError(
                f"{', '.join(changed)}: written to while being saved; copy=False is for tensors that are "
                "never written to again, as in functional updates"
            )

    def _look(self, path: TreePath) -> tuple[Any, ...]:
        values, leaf = self.bytes[path], self.leaves[path]
        stride = max(1, (len(values) - SAMPLE_BYTES) // (SAMPLES - 1))
        sample = values.as_strided((min(SAMPLES, len(values) // SAMPLE_BYTES), SAMPLE_BYTES), (stride, 1))
        return _version(leaf), _version(local(leaf)), sample.numpy().tobytes()  # two counters if sharded


class LiveFile:
    """A file of live tensors, put together block by block while it is written."""

    def __init__(self, file: PlannedFile, tensors: LiveTensors):
        self.name = file.name
        self.size = file.size
        self.crc32 = 0
        self._file = file
        self._tensors = tensors

    def blocks(self) -> Iterator[memoryview]:
        """The file in blocks of `BLOCK_BYTES`; each is good until the next but one is taken."""
        memory = mmap.mmap(-1, 2 * BLOCK_BYTES)
        blocks, used, turn = torch.frombuffer(memory, dtype=torch.uint8).split(BLOCK_BYTES), 0, 0
        for segment in self._segments():
            while len(segment):
                part = segment[: BLOCK_BYTES - used]
                blocks[turn][used : used + len(part)].copy_(part)  # torch lets other threads run meanwhile
                used, segment = used + len(part), segment[len(part) :]
                if used == BLOCK_BYTES:
                    yield memoryview(memory)[turn * BLOCK_BYTES :][:used]
                    used, turn = 0, 1 - turn
        yield memoryview(memory)[turn * BLOCK_BYTES :][:used]

    def _segments(self) -> Iterator[Tensor]:
        """The bytes of the file, in parts."""
        end = 0
        for (path, box, dtype), (start, nbytes, *_) in zip(self._file.parts, self._file.places, strict=True):
            around, first = item(dtype, box[1]), _offset(local(self._tensors.leaves[path]), box[0])
            values = self._tensors.bytes[path][first : first + nbytes]
            own = crc32(values.numpy())
            before = bytes(start - len(around.before) - end) + _sealed(around.before, around.crc_before, own)
            after = _sealed(around.after, around.crc_after, own)
            self.crc32 = crc32(after, combine(crc32(before, self.crc32), own, nbytes))
            end = start + nbytes + len(after)
            yield from (_tensor(before), values, _tensor(after))


def _box_of(tensor: Tensor, box: Box) -> Tensor:
    if box[1] == tensor.shape:
        return tensor
    return tensor[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _offset(tensor: Tensor, offsets: Sequence[int]) -> int:
    """Bytes before the element at `offsets` of a contiguous tensor."""
    return tensor.itemsize * sum(map(mul, offsets, tensor.stride()))


def _bytes_of(tensor: Tensor) -> Tensor:
    return local(tensor).detach().reshape(-1).view(torch.uint8)


def _sealed(around: bytes, place: int, checksum: int) -> bytes:
    return around[:place] + checksum.to_bytes(4, "little") + around[place + 4 :]


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
