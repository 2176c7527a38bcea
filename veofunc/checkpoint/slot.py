"""One slot of a checkpointer: what this rank writes of it, the memory for that, and the writer process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.distributed.tensor import DTensor

from veofunc.checkpoint.manifest import CheckpointError, Entry, FileRecord, TreePath
from veofunc.checkpoint.plan import PlannedFile, plan_files
from veofunc.checkpoint.process import WriterProcess
from veofunc.checkpoint.snapshot import memory_of
from veofunc.checkpoint.staging import LiveFile, LiveTensors, Staging, can_stay_live
from veofunc.checkpoint.storage import Content, Storage
from veofunc.checkpoint.writer import Image, Pace

__all__ = ["Plan", "Slot", "SlotOptions", "Staged", "digests_of"]


@dataclass(frozen=True)
class SlotOptions:
    """What all slots of a checkpointer have in common.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        copy: whether tensors are copied, or read while they are written to disk.
        num_buffers: how many saves of a slot may be under way.
        num_files: how many files a rank writes of what is copied in a slot, at most, and of the rest.
        patience: seconds without progress after which writing is given up.
        storage: where to.
    """

    rank: int
    world_size: int
    copy: bool
    num_buffers: int
    num_files: int
    patience: float
    storage: Storage


class Slot:
    """The part of a state that is written by itself.

    Its plan and memory are made for tensors of one structure, and again for those of another.

    Attributes:
        name: of its directory.
        plan: what this rank writes of it.
    """

    def __init__(self, name: str, options: SlotOptions):
        self.name = name
        self._options = options
        self._paths: list[TreePath] = []
        self._layout: list[Any] = []
        self._ties: list[tuple[TreePath, TreePath]] = []
        self._live_paths: frozenset[TreePath] = frozenset()
        self._live_files: list[PlannedFile] = []
        self._buffers: list[Staging] = []
        self._writer: WriterProcess | None = None
        self.plan = Plan("", "")
        self._digests: dict[str, int] = {}

    def fits(self, tensors: Mapping[TreePath, Tensor]) -> bool:
        """Whether what `prepare_` made is for tensors like these."""
        return (
            len(tensors) == len(self._layout)
            and [*map(_layout, tensors.values())] == self._layout
            and self._paths == [*tensors]
            and all(memory_of(tensors[a]) == memory_of(tensors[b]) for a, b in self._ties)
            and all(can_stay_live(tensors[path]) for path in self._live_paths)
        )

    def prepare_(self, entries: Sequence[Entry], tensors: Mapping[TreePath, Tensor]) -> None:
        """Plan the files and make the memory for tensors like these. No save may be under way."""
        options = self._options
        self.close()
        paths = {entry.key: entry.path for entry in entries}
        self._ties = [(entry.path, paths[entry.tie]) for entry in entries if entry.tie]
        may_stay = () if options.copy else (path for path, tensor in tensors.items() if can_stay_live(tensor))
        self._live_paths = frozenset(may_stay)
        place = options.rank, options.world_size, options.num_files
        copied, self._live_files = plan_files(entries, tensors, *place, self._live_paths)
        self._buffers = [Staging(copied, tensors) for _ in range(options.num_buffers)]
        if not options.storage.in_process and copied:
            self._writer = WriterProcess(options.patience)
        pieces = [
            (key, piece.to_json()) for file in [*copied, *self._live_files] for key, piece in file.pieces
        ]
        text = json.dumps({"tensors": [entry.to_json() for entry in entries], "pieces": pieces})
        self.plan = Plan(text, sha256(text.encode()).hexdigest())
        self._digests = digests_of(entries)
        self._paths, self._layout = [*tensors], [*map(_layout, tensors.values())]

    def stage(self, tensors: Mapping[TreePath, Tensor], background: Executor | None) -> Staged:
        """Get hold of the values of tensors that fit; `background` copies them, if given."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)  # the one used longest ago is the next
        turn = buffer.take()
        live = LiveTensors({path: leaf for path, leaf in tensors.items() if path in self._live_paths})
        files = [LiveFile(file, live) for file in self._live_files]
        copied = None
        buffer.copy(tensors, turn, small=True)  # buffers that a forward pass writes to are among them
        if background and not buffer.overlaps:
            large = {path: tensors[path] for path in buffer.large}
            copied = background.submit(_copy_unchanged, buffer, large, turn, _versions(large))
        else:
            buffer.copy(tensors, turn, small=False)
            if background:
                copied = background.submit(buffer.synchronize)
            else:
                buffer.synchronize()
        return Staged(self, buffer, live, files, self.plan, self._digests, copied)

    def write(
        self,
        staged: Staged,
        directory: str,
        bytes_per_second: float | None,
        wrote: Callable[[int], None],
        tick: Callable[[], None],
    ) -> dict[str, FileRecord]:
        """Write the files of a save, durably, into `directory`: their sizes and checksums, by name.

        Raises:
            CheckpointError: a tensor that is not copied was written to meanwhile; names it.
            OSError: naming the file.
        """
        storage, buffer = self._options.storage, staged.buffer
        names = [file.name for file in buffer.files]
        ours: dict[str, Content] = {file.name: file for file in staged.live_files}
        if self._writer:
            paths = [f"{storage.root}/{directory}/{name}" for name in names]
            self._writer.begin(buffer.arena, paths, bytes_per_second)
        else:
            ours |= {name: Image(*buffer.arena.image(index)) for index, name in enumerate(names)}

        def progress(nbytes: int) -> None:
            wrote(nbytes)
            tick()

        pace = Pace(bytes_per_second, progress)
        try:
            for name, file in ours.items():
                storage.write(f"{directory}/{name}", file, pace)
            pace.settle()
            theirs = self._writer.finish(wrote, tick) if self._writer else []
        except BaseException:
            if self._writer:
                self._writer.close()  # it may be writing still
            raise
        staged.live.check_unchanged()
        records = {name: FileRecord(file.size, file.crc32) for name, file in ours.items()}
        return records | dict(zip(names if self._writer else [], theirs, strict=True))

    def close(self) -> None:
        """Free the memory and end the process; `prepare_` makes others."""
        if self._writer:
            self._writer.close()
        self._writer = None
        self._buffers, self._layout = [], []


@dataclass(frozen=True)
class Plan:
    """What one rank writes of a slot: its entries and where their pieces are, as JSON; and its SHA-256."""

    text: str
    digest: str


@dataclass(frozen=True)
class Staged:
    """The values of one slot in one save.

    Attributes:
        slot: whose they are.
        buffer: where they are copied to.
        live: those that are not copied.
        live_files: the files of those.
        plan: what this rank writes.
        digests: of its entries, by section.
        copied: done when they are copied; None if they are already.
    """

    slot: Slot
    buffer: Staging
    live: LiveTensors
    live_files: Sequence[LiveFile]
    plan: Plan
    digests: Mapping[str, int]
    copied: Future[None] | None

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in [*self.buffer.files, *self.live_files])


def digests_of(entries: Sequence[Entry]) -> dict[str, int]:
    """A checksum for each section of what all ranks must have in common.

    Not whether tensors are one: a rank that holds nothing of them cannot tell.
    """
    common = (replace(entry, tie="") for entry in entries if entry.rank is None)
    shared = sorted(common, key=lambda entry: entry.path)
    return {name: crc32(repr([*group]).encode()) for name, group in groupby(shared, lambda e: e.path[0])}


def _copy_unchanged(
    buffer: Staging,
    tensors: Mapping[TreePath, Tensor],
    turn: int,
    before: Mapping[TreePath, int | None],
) -> None:
    """Copy them, if nobody wrote to them since `before`, as far as their version counters tell."""
    buffer.copy(tensors, turn, small=False)
    changed = [".".join(path) for path, version in _versions(tensors).items() if version != before[path]]
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)}: written to while being copied; call wait_staged() before anything "
            "writes to a state that is saved with block=False"
        )


def _versions(tensors: Mapping[TreePath, Tensor]) -> dict[TreePath, int | None]:
    return {path: None if t.is_inference() else t._version for path, t in tensors.items()}


def _layout(tensor: Tensor) -> Any:
    """What `prepare_` depends on."""
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.device, tensor.device_mesh, tensor.placements
    return tensor.shape, tensor.dtype, tensor.device
