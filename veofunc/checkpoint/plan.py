"""Which piece of which tensor a rank writes, and where in which file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from veofunc.checkpoint.items import ALIGNMENT, item, pieces
from veofunc.checkpoint.manifest import CheckpointError, Entry, TreePath
from veofunc.checkpoint.snapshot import local
from veofunc.checkpoint.writer import ItemPlace

__all__ = ["DCP_METADATA", "INDEX", "Piece", "PlannedFile", "SlotIndex", "plan_files"]

INDEX = "index.json"
DCP_METADATA = ".metadata"

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where its bytes are; positions are bytes of the file.

    Attributes:
        offsets: where the box begins in the whole tensor.
        sizes: its shape.
        file: name of the file.
        item: where its item begins.
        values: where its values begin.
        length: bytes of the item.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    item: int
    values: int
    length: int

    @staticmethod
    def from_json(fields: Sequence[Any]) -> Piece:
        """From the list of its attributes."""
        offsets, sizes, *rest = fields
        return Piece(tuple(offsets), tuple(sizes), *rest)

    def to_json(self) -> list[Any]:
        """The list of its attributes."""
        return [self.offsets, self.sizes, self.file, self.item, self.values, self.length]


@dataclass
class PlannedFile:
    """One file of this rank, as it is laid out.

    Attributes:
        name: in the directory of its slot.
        size: in bytes.
        parts: for each piece whose it is and where it begins in what this rank holds of that.
        places: for each piece the places of its values and checksums, as the writer takes them.
        pieces: the pieces, by the keys of their tensors.
    """

    name: str
    size: int = 0
    parts: list[tuple[TreePath, Box, torch.dtype]] = field(default_factory=list)
    places: list[ItemPlace] = field(default_factory=list)
    pieces: list[tuple[str, Piece]] = field(default_factory=list)

    def append_(self, entry: Entry, dtype: torch.dtype, inside: Box, offsets: tuple[int, ...]) -> None:
        """Put a piece at the end."""
        sizes = inside[1]
        around, nbytes = item(dtype, sizes), prod(sizes) * dtype.itemsize
        start = -(-self.size // ALIGNMENT) * ALIGNMENT
        values = start + len(around.before)
        self.size = values + nbytes + len(around.after)
        crcs = start + around.crc_before, values + nbytes + around.crc_after
        self.parts.append((entry.path, inside, dtype))
        self.places.append((values, nbytes, *crcs))
        self.pieces.append((entry.key, Piece(offsets, sizes, self.name, start, values, self.size - start)))


def plan_files(
    entries: Iterable[Entry],
    leaves: Mapping[TreePath, Tensor],
    rank: int,
    world_size: int,
    num_files: int,
    live: frozenset[TreePath],
) -> tuple[list[PlannedFile], list[PlannedFile]]:
    """The files that `rank` writes of the tensors of one slot.

    What several ranks hold is written by one of them; all come to the same decision by themselves.

    Args:
        entries: of the tensors, the same on all ranks but for each rank's own.
        leaves: the tensors.
        rank: who asks.
        world_size: number of ranks.
        num_files: how many files, at most, for those in `leaves` that are copied, and for the others.
        live: those that are not.

    Returns:
        The files for what is copied, and those for what is not; none is empty.
    """
    files = [PlannedFile(f"__{rank}_{index}.distcp") for index in range(2 * num_files)]
    loads = [0] * world_size
    for entry in sorted(entries, key=lambda entry: entry.key):
        if entry.tie:
            continue
        leaf = leaves[entry.path]
        if entry.rank is None and not isinstance(leaf, DTensor):
            writer = loads.index(min(loads))
            loads[writer] += leaf.numel() * leaf.itemsize
            if writer != rank:
                continue
        elif isinstance(leaf, DTensor) and not _writes_replica(leaf, entry.key):
            continue
        group = files[num_files:] if entry.path in live else files[:num_files]
        origin = (
            tuple(leaf.__create_chunk_list__()[0].offsets) if isinstance(leaf, DTensor) else (0,) * leaf.dim()
        )
        if local(leaf).numel() == 0 and leaf.numel():
            continue  # others have something of it
        for inside in pieces(tuple(local(leaf).shape), leaf.itemsize):
            file = min(group, key=lambda file: file.size)
            file.append_(entry, leaf.dtype, inside, tuple(map(sum, zip(origin, inside[0], strict=True))))
    return [f for f in files[:num_files] if f.parts], [f for f in files[num_files:] if f.parts]


def _writes_replica(tensor: DTensor, key: str) -> bool:
    """Whether this rank is the one that writes, of those that hold the same shard."""
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return False
    replica, num_replicas = 0, 1
    for coordinate, size, placement in zip(
        coordinates, tensor.device_mesh.shape, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            replica, num_replicas = replica * size + coordinate, num_replicas * size
    return crc32(key.encode()) % num_replicas == replica


@dataclass(frozen=True)
class SlotIndex:
    """All tensors of one slot, of all ranks, and where their pieces are.

    Attributes:
        entries: what the tensors are.
        pieces: for each key that is not tied to another one, the boxes that tile its tensor.
    """

    entries: tuple[Entry, ...]
    pieces: dict[str, tuple[Piece, ...]]

    def check_complete(self) -> None:
        """See to it that the pieces of each tensor cover it once.

        Raises:
            CheckpointError: naming tensors that would be saved in part.
        """
        problems = [p for entry in self.entries if (p := self._gap(entry))]
        if problems:
            raise CheckpointError(
                "not every value has one rank that saves it (all ranks of a tensor's mesh must save "
                f"together): {'; '.join(problems)}"
            )

    def of(self, entry: Entry) -> tuple[Piece, ...]:
        """The pieces of a tensor."""
        return self.pieces.get(entry.tie or entry.key, ())

    def to_bytes(self) -> bytes:
        """As the content of a file."""
        pieces = {key: [piece.to_json() for piece in pieces] for key, pieces in self.pieces.items()}
        body = {"tensors": [entry.to_json() for entry in self.entries], "pieces": pieces}
        return json.dumps(body).encode()

    @staticmethod
    def from_bytes(content: bytes) -> SlotIndex:
        """The inverse of `to_bytes`."""
        body = json.loads(content)
        pieces = {key: tuple(map(Piece.from_json, found)) for key, found in body["pieces"].items()}
        return SlotIndex(tuple(map(Entry.from_json, body["tensors"])), pieces)

    def dcp_metadata(self) -> bytes:
        """The file by which torch.distributed.checkpoint reads the same; tied tensors share their bytes."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for entry in self.entries:
            chunks = [
                ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in self.of(entry)
            ]
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            tensors[entry.key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for number, (chunk, piece) in enumerate(zip(chunks, self.of(entry), strict=True)):
                place = MetadataIndex(entry.key, chunk.offsets, number)
                places[place] = _StorageInfo(piece.file, piece.item, piece.length)
        planner_data = {key: (key,) for key in tensors}
        return pickle.dumps(Metadata(tensors, planner_data, places, version=CURRENT_DCP_VERSION))

    def _gap(self, entry: Entry) -> str:
        """What is not as it must be with the pieces of a tensor; empty if all is."""
        if entry.tie:
            apart = entry.key in self.pieces
            return f"{entry.key}: the same as {entry.tie} on rank 0, and not on all ranks" if apart else ""
        pieces = self.of(entry)
        found, whole = sum(prod(piece.sizes) for piece in pieces), prod(entry.shape)
        if not pieces or found < whole:
            return f"{entry.key}: {found} of {whole} values"
        if found > whole or _overlap(pieces):
            return f"{entry.key}: some values twice"
        return ""


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two boxes share a value; soon known of those that follow each other along the first axis."""
    rows = sorted((p.offsets[:1], p.sizes[:1]) for p in pieces)
    if all(start + size <= after for ((start,), (size,)), ((after,), _) in pairwise(rows)):
        return False

    def apart(a: Piece, b: Piece) -> bool:
        sides = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
        return any(start + size <= other or other + width <= start for start, size, other, width in sides)

    return not all(apart(a, b) for a, b in combinations(pieces, 2))
