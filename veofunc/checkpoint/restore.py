"""Reading a step: it is verified while it is read into new tensors, before any of them is given away."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO
from zlib import crc32

import torch
from torch import Tensor

from veofunc.checkpoint.items import item
from veofunc.checkpoint.manifest import (
    CheckpointError,
    DamageError,
    Entry,
    FileRecord,
    Manifest,
    TreePath,
    check_crc32,
    read_complete,
    read_file,
)
from veofunc.checkpoint.plan import INDEX, SlotIndex
from veofunc.checkpoint.snapshot import Empty, Leaf, match
from veofunc.checkpoint.storage import Storage, step_name
from veofunc.checkpoint.targets import BLOCK_BYTES, Read, reads_of, targets_of
from veofunc.checkpoint.writer import combine

__all__ = ["Request", "read_indices", "read_step", "with_kept"]

CHUNK_BYTES = 32 << 20  # about what one thread reads of a file
NUM_THREADS = 4


@dataclass(frozen=True)
class Request:
    """What to read, and how.

    Attributes:
        like: the leaves of a state of the same structure.
        only: the sections to read; None for all.
        strict: whether both must have the same leaves.
        cast: whether floating-point tensors may have been saved in another dtype.
        verify: "full" or "sizes".
        device: where plain tensors go; None for where they are in `like`, or the CPU.
        ranks: "own", "drop" or "all": what becomes of the sections that each rank has saved its own of.
        rank: of this process.
        world_size: number of ranks that read.
    """

    like: Mapping[TreePath, Leaf]
    only: frozenset[str] | None
    strict: bool
    cast: bool
    verify: str
    device: torch.device | None
    ranks: str
    rank: int
    world_size: int

    @property
    def chosen(self) -> dict[TreePath, Leaf]:
        """The leaves of `like` in the sections to read."""
        return {p: leaf for p, leaf in self.like.items() if self.only is None or p[0] in self.only}


def read_step(storage: Storage, step: int, request: Request) -> dict[TreePath, Leaf]:
    """What a state like `request.like` has of `step`, as new leaves.

    Of the ranks that read together each verifies all of some of the files; of the others each reads,
    and verifies, what it needs.

    Raises:
        CheckpointError: a file is damaged, or `match` finds differences.

    Warns:
        RuntimeWarning: another number of ranks saved it; says what may be missing.
    """
    manifest, indices = read_indices(storage, step)
    entries = [*manifest.values, *(entry for index in indices.values() for entry in index.entries)]
    sections = {entry.path[0] for entry in entries}
    unknown = sorted((request.only or frozenset()) - sections - {path[0] for path in request.like})
    if unknown:
        raise CheckpointError(
            f"only must name sections that step {step} has, {sorted(sections)}, got {unknown}"
        )
    saved, like, others = _of_this_rank(entries, manifest, request)
    wanted = match(saved, like, strict=request.strict, cast=request.cast)
    targets = targets_of(wanted, like, request.device)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        files = []
        for slot in sorted({entry.slot for entry in saved.values() if entry.kind == "tensor"}):
            reads = reads_of(wanted, slot, indices[slot], targets)
            for name, record in manifest.files.items():
                if name.startswith(f"{slot}/"):
                    full, mine = f"{step_name(step)}/{name}", reads.get(name.removeprefix(f"{slot}/"), [])
                    files.append(_FileRead(storage, full, record, mine, request, threads))
        for file in files:
            file.finish()
    values = {entry.path: _value(entry) for entry in wanted if entry.kind != "tensor"}
    tensors = {path: target.finished() for path, target in targets.items()}
    return with_kept(like | others, values | tensors)


def read_indices(storage: Storage, step: int) -> tuple[Manifest, dict[str, SlotIndex]]:
    """What there is in a step: its manifest, and the tensors of each slot.

    Raises:
        CheckpointError: a file is missing, has another size, or is one of these and damaged.
    """
    manifest = read_complete(storage, step)
    names = {slot: f"{slot}/{INDEX}" for slot in manifest.slots}
    contents = {s: read_file(storage, f"{step_name(step)}/{n}", manifest.files[n]) for s, n in names.items()}
    return manifest, {slot: SlotIndex.from_bytes(content) for slot, content in contents.items()}


def _of_this_rank(
    entries: Iterable[Entry], manifest: Manifest, request: Request
) -> tuple[dict[TreePath, Entry], dict[TreePath, Leaf], dict[TreePath, Leaf]]:
    """The saved entries for this rank, the leaves to compare with them, and those that stay as they are."""
    chosen = [entry for entry in entries if request.only is None or entry.path[0] in request.only]
    shared = {entry.path: entry for entry in chosen if entry.rank is None}
    private = [entry for entry in chosen if entry.rank is not None]
    sections = sorted({entry.path[0] for entry in private})
    like = request.chosen
    if request.ranks != "own":
        others = {path: leaf for path, leaf in like.items() if path[0] in sections}
        like = {path: leaf for path, leaf in like.items() if path[0] not in sections}
        if request.ranks == "drop":
            return shared, like, others
        moved = [replace(e, path=(e.path[0], f"rank_{e.rank}", *e.path[1:])) for e in private]
        return shared | {entry.path: entry for entry in moved}, like, {}
    if private and manifest.world_size != request.world_size:
        warnings.warn(
            f"step {manifest.step} was saved by {manifest.world_size} ranks and is restored on "
            f"{request.world_size}: {' and '.join(sections)} come back only on ranks that saved theirs, and "
            'stay as in `like` on others; ranks="all" gives those of all, ranks="drop" none',
            RuntimeWarning,
            stacklevel=5,
        )
    mine = {entry.path: entry for entry in private if entry.rank == request.rank}
    if mine or not private:
        return shared | mine, like, {}
    others = {path: leaf for path, leaf in like.items() if path[0] in sections}
    return shared, {path: leaf for path, leaf in like.items() if path[0] not in sections}, others


class _FileRead:
    """One file, read by several threads."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        record: FileRecord,
        reads: Sequence[Read],
        request: Request,
        threads: Executor,
    ):
        self._storage, self._name, self._record = storage, name, record
        writer = re.search(r"__(\d+)_\d+\.distcp$", name)
        is_mine = int(writer[1] if writer else 0) % request.world_size == request.rank
        self._verify = request.verify == "full"
        self._whole = self._verify and is_mine
        chunks = _chunks(_spans(reads, record.size if self._whole else None))
        self._futures = [threads.submit(self._read, chunk) for chunk in chunks]

    def finish(self) -> None:
        """Wait for it.

        Raises:
            CheckpointError: it is damaged, or cannot be read.
        """
        checksum = 0
        try:
            for future in self._futures:
                for crc, nbytes in future.result():
                    checksum = combine(checksum, crc, nbytes)
        except (OSError, EOFError) as error:
            raise DamageError(f"{self._storage.root}/{self._name}: {error}") from error
        if self._whole:
            check_crc32(self._storage, self._name, self._record, checksum)

    def _read(self, spans: Sequence[_Span]) -> list[tuple[int, int]]:
        """Checksum and size of each span."""
        with self._storage.open(self._name) as file:
            return [(self._read_span(file, span), span.end - span.start) for span in spans]

    def _read_span(self, file: IO[bytes], span: _Span) -> int:
        file.seek(span.start)
        checksum, content, place, read = 0, b"", span.start, span.read
        while place < span.gap_end:
            content = file.read(min(span.gap_end - place, BLOCK_BYTES))
            if not content:
                raise EOFError(f"it ends at {place}")
            checksum, place = crc32(content, checksum), place + len(content)
        if read is None:
            return checksum
        own = read.values_from(file)
        if self._verify and not self._whole:  # the piece's own checksum, as the span is its item
            at = item(read.dtype, read.piece.sizes).crc_before
            if content[at : at + 4] != own.to_bytes(4, "little"):
                raise DamageError(
                    f"{self._storage.root}/{self._name}: the CRC-32 of the values at {read.piece.values} "
                    "is not the one beside them; the file changed after it was saved"
                )
        return combine(checksum, own, read.nbytes)


@dataclass(frozen=True)
class _Span:
    """Bytes of a file from `start` to `end`; at the end of them the values of a piece that is wanted."""

    start: int
    end: int
    read: Read | None

    @property
    def gap_end(self) -> int:
        """Where the values begin."""
        return self.read.piece.values if self.read else self.end


def _spans(reads: Sequence[Read], size: int | None) -> Iterator[_Span]:
    """What to read of a file: all of its `size` bytes, or if that is None the items of the pieces."""
    end = 0
    for read in reads:
        start = read.piece.item if size is None else end
        end = read.piece.values + read.nbytes
        yield _Span(start, end, read)
    if size is not None:
        yield _Span(end, size, None)


def _chunks(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Consecutive spans, together what one thread reads at once."""
    chunk: list[_Span] = []
    for span in spans:
        chunk.append(span)
        if span.end - chunk[0].start >= CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def with_kept(like: Mapping[TreePath, Leaf], leaves: dict[TreePath, Leaf]) -> dict[TreePath, Leaf]:
    """`leaves`, and copies of what else there is in `like`."""
    return {path: _copy(leaf) for path, leaf in like.items() if path not in leaves} | leaves


def _value(entry: Entry) -> Leaf:
    return Empty() if entry.kind == "empty" else entry.value


def _copy(leaf: Leaf) -> Leaf:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
