"""The new tensors that saved values are read into."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from veofunc.checkpoint.manifest import DamageError, Entry, TreePath
from veofunc.checkpoint.plan import Piece, SlotIndex
from veofunc.checkpoint.snapshot import Leaf, local

__all__ = ["BLOCK_BYTES", "Read", "Target", "reads_of", "targets_of"]

BLOCK_BYTES = 8 << 20  # what is read at once


@dataclass
class Target:
    """A tensor to be read.

    Attributes:
        into: contiguous host memory, in the dtype that was saved, for what this rank holds of it.
        offsets: where that begins in the whole tensor.
        result: the tensor itself, if that is not `into`.
        filled: values read so far.
    """

    into: Tensor
    offsets: tuple[int, ...]
    result: Tensor | None = None
    filled: int = 0

    def finished(self) -> Tensor:
        """The tensor, with what was read."""
        if self.result is None:
            return self.into
        local(self.result).copy_(self.into)
        return self.result


def targets_of(
    entries: Iterable[Entry], like: Mapping[TreePath, Leaf], device: torch.device | None
) -> dict[TreePath, Target]:
    """New memory for the tensors among `entries`; those that were one when saved are one again."""
    targets: dict[TreePath, Target] = {}
    holders: dict[tuple[Any, ...], Target] = {}
    for entry in entries:
        if entry.kind == "tensor":
            target = _target(entry, like.get(entry.path), device)
            if target.result is None or not isinstance(target.result, DTensor):
                final = target.into if target.result is None else target.result
                key = entry.slot, entry.tie or entry.key, final.dtype, final.device
                target = holders.setdefault(key, target)
            targets[entry.path] = target
    return targets


def _target(entry: Entry, leaf: Leaf, device: torch.device | None) -> Target:
    dtype = getattr(torch, entry.dtype)
    if isinstance(leaf, DTensor):
        result = torch.empty_like(leaf)
        into = torch.empty(local(leaf).shape, dtype=dtype, device="cpu")
        return Target(into, tuple(leaf.__create_chunk_list__()[0].offsets), result)
    into = torch.empty(entry.shape, dtype=dtype, device="cpu")
    wanted = leaf if isinstance(leaf, Tensor) else into
    device = device or wanted.device
    same = (wanted.dtype, device) == (dtype, into.device)
    result = None if same else torch.empty(entry.shape, dtype=wanted.dtype, device=device)
    return Target(into, (0,) * len(entry.shape), result)


@dataclass(frozen=True)
class Read:
    """A piece in a file, and the parts of new tensors that its values go to.

    Attributes:
        piece: the piece.
        dtype: as it was saved.
        parts: parts of tensors, each with the place of its values inside the piece.
    """

    piece: Piece
    dtype: torch.dtype
    parts: list[tuple[Tensor, tuple[slice, ...]]]

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return prod(self.piece.sizes) * self.dtype.itemsize

    def values_from(self, file: IO[bytes]) -> int:
        """Read the values into the tensors: their CRC-32."""
        first, _ = self.parts[0]
        whole = tuple(first.shape) == self.piece.sizes and first.is_contiguous()
        values = first if whole else torch.empty(self.piece.sizes, dtype=self.dtype, device="cpu")
        checksum = _read_into(file, values)
        for part, inside in self.parts[1:] if whole else self.parts:
            part.copy_(values[inside])
        return checksum


def reads_of(
    entries: Iterable[Entry], slot: str, index: SlotIndex, targets: Mapping[TreePath, Target]
) -> dict[str, list[Read]]:
    """What to read of each file of a slot, in the order of the file.

    Raises:
        CheckpointError: what was saved does not fill a tensor; names it.
    """
    reads: dict[Piece, Read] = {}
    known: set[int] = set()
    for entry in entries:
        if entry.slot != slot or id(target := targets[entry.path]) in known:
            continue
        known.add(id(target))
        filled = 0
        for piece in index.of(entry):
            part, inside = _common(piece, target)
            filled += part.numel()
            if part.numel():
                reads.setdefault(piece, Read(piece, target.into.dtype, [])).parts.append((part, inside))
        if filled != target.into.numel():
            raise DamageError(
                f"{'.'.join(entry.path)}: only {filled} of {target.into.numel()} values were saved"
            )
    files: dict[str, list[Read]] = {}
    for read in sorted(reads.values(), key=lambda read: read.piece.values):
        files.setdefault(read.piece.file, []).append(read)
    return files


def _common(piece: Piece, target: Target) -> tuple[Tensor, tuple[slice, ...]]:
    """The part of the target that is in the piece, and where in the piece it is."""
    part, inside = [], []
    for start, size, origin, length in zip(
        piece.offsets, piece.sizes, target.offsets, target.into.shape, strict=True
    ):
        first, last = max(start, origin), max(min(start + size, origin + length), start, origin)
        part.append(slice(first - origin, last - origin))
        inside.append(slice(first - start, last - start))
    return target.into[tuple(part)], tuple(inside)


def _read_into(file: IO[bytes], tensor: Tensor) -> int:
    """Fill a contiguous tensor on the CPU from a file: the CRC-32 of what was read."""
    memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    done = checksum = 0
    while done < len(memory):
        num_read = cast(io.RawIOBase, file).readinto(memory[done : done + BLOCK_BYTES])
        if not num_read:
            raise EOFError(f"it ends {len(memory) - done} bytes too early")
        checksum = crc32(memory[done : done + num_read], checksum)
        done += num_read
    return checksum
