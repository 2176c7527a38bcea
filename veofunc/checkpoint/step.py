"""One save, which all ranks make together: nothing is visible before everything of every rank is durable."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from veofunc.checkpoint.manifest import (
    CheckpointError,
    Entry,
    FileRecord,
    Manifest,
    check_size,
    to_bytes,
)
from veofunc.checkpoint.plan import DCP_METADATA, INDEX, Piece, SlotIndex
from veofunc.checkpoint.ranks import BEAT, Agreement
from veofunc.checkpoint.slot import Plan, Staged, digests_of
from veofunc.checkpoint.storage import Storage
from veofunc.checkpoint.writer import Image, Pace

__all__ = ["StepWriter", "Task"]


@dataclass(frozen=True)
class Task:
    """What this rank has to do with one save.

    Attributes:
        step: its number.
        staged: the tensors, by slot.
        values: the other leaves.
        small: checksums by section of small tensors that must be the same on all ranks.
        metrics: what was measured.
        wrote: told how many more bytes are written.
    """

    step: int
    staged: Mapping[str, Staged]
    values: tuple[Entry, ...]
    small: Mapping[str, int]
    metrics: Mapping[str, float]
    wrote: Callable[[int], None]


class StepWriter:
    """Writes steps into a storage; remembers what the ranks have told each other already.

    Args:
        storage: where to.
        rank: of this process.
        world_size: number of ranks.
        bytes_per_second: how fast this rank may write; None for as fast as it can.
    """

    def __init__(self, storage: Storage, rank: int, world_size: int, bytes_per_second: float | None):
        self._storage = storage
        self._rank = rank
        self._world_size = world_size
        self._bytes_per_second = bytes_per_second
        self._told: dict[str, str] = {}  # by slot, the digest of the plan of this rank that rank 0 has
        self._known: dict[str, _Known] = {}  # by slot, on rank 0

    def introduce(self, plans: Mapping[str, Plan], agreement: Agreement) -> None:
        """Tell rank 0 what the slots will be like, before the first save.

        Raises:
            CheckpointError: on every rank, if together they would not save all of every tensor.
        """

        def learn(parts: list[dict[str, Any]]) -> None:
            for slot in parts[0]["slots"]:
                if all(slot in part["slots"] for part in parts):  # else the save says so
                    self._learn(slot, parts)

        agreement.round("planning", lambda: self._plans(plans), learn)
        self._told |= {slot: plan.digest for slot, plan in plans.items()}

    def write(self, task: Task | CheckpointError, agreement: Agreement) -> None:
        """Write one step, which then is complete and durable; or tell the others why this rank cannot.

        Raises:
            CheckpointError: on every rank, if anything failed on any; then nothing of it is visible.
        """
        begun: list[str] = []
        try:
            with agreement:
                self._write(task, agreement, begun)
        except BaseException:
            self._told.clear()
            for name in begun:
                self._storage.remove(name)
            raise

    def _write(self, task: Task | CheckpointError, agreement: Agreement, begun: list[str]) -> None:
        def describe() -> dict[str, Any]:
            if isinstance(task, CheckpointError):
                raise task
            return self._describe(task, agreement)

        def begin(parts: list[dict[str, Any]]) -> str:
            descriptions[:] = parts
            self._compare(parts)
            for slot in parts[0]["slots"]:
                self._learn(slot, parts)
            begun.append(self._storage.begin(parts[0]["step"], parts[0]["slots"]))
            return begun[0]

        descriptions: list[dict[str, Any]] = []
        directory = agreement.round("staging the state", describe, begin)
        assert isinstance(task, Task)
        self._told |= {slot: staged.plan.digest for slot, staged in task.staged.items()}
        agreement.round(
            f"writing {self._storage.root}/{directory}",
            lambda: self._write_slots(task, directory, agreement),
            lambda parts: self._commit(task, directory, descriptions, parts),
        )

    def _describe(self, task: Task, agreement: Agreement) -> dict[str, Any]:
        """What this rank saves."""
        sections: dict[str, list[int]] = {}
        for digests in (
            task.small,
            digests_of(task.values),
            *(staged.digests for staged in task.staged.values()),
        ):
            for name, digest in digests.items():
                sections.setdefault(name, []).append(digest)
        for staged in task.staged.values():
            while staged.copied and not wait([staged.copied], BEAT).done:
                agreement.tick()
            if staged.copied:
                staged.copied.result()
        return {
            "step": task.step,
            "sections": sections,
            "own values": [entry.to_json() for entry in task.values if entry.rank is not None],
            **self._plans({slot: staged.plan for slot, staged in task.staged.items()}),
        }

    def _plans(self, plans: Mapping[str, Plan]) -> dict[str, Any]:
        """The digests of plans, and those that rank 0 does not have."""
        unknown = {slot: plan.text for slot, plan in plans.items() if self._told.get(slot) != plan.digest}
        return {"slots": {slot: plan.digest for slot, plan in plans.items()}, "plans": unknown}

    def _compare(self, parts: list[dict[str, Any]]) -> None:
        expected, *others = [
            {"number of the step": part["step"], "slots": [*part["slots"]], **part["sections"]}
            for part in parts
        ]
        for rank, seen in enumerate(others, start=1):
            names = expected.keys() | seen.keys()
            differing = sorted(name for name in names if expected.get(name) != seen.get(name))
            if differing:
                raise CheckpointError(
                    f"rank {rank} saves something else than rank 0: {', '.join(differing)}; all ranks must "
                    "save the same step, structure and values, but for sections named in per_rank"
                )

    def _write_slots(self, task: Task, directory: str, agreement: Agreement) -> dict[str, list[int]]:
        """The files of this rank: size and checksum by their name in `directory`."""
        total = sum(staged.nbytes for staged in task.staged.values())

        def write(item: tuple[str, Staged]) -> dict[str, list[int]]:
            name, staged = item
            rate = self._bytes_per_second and self._bytes_per_second * staged.nbytes / max(total, 1)
            found = staged.slot.write(staged, f"{directory}/{name}", rate, task.wrote, agreement.tick)
            return {f"{name}/{file}": [record.size, record.crc32] for file, record in found.items()}

        if not task.staged:
            return {}
        with ThreadPoolExecutor(len(task.staged)) as threads:
            found = threads.map(write, task.staged.items())
            return {name: record for records in found for name, record in records.items()}

    def _commit(
        self,
        task: Task,
        directory: str,
        descriptions: list[dict[str, Any]],
        parts: list[dict[str, list[int]]],
    ) -> None:
        """Make it a step, as all that it is made of is durable. Only on rank 0."""
        files = {name: FileRecord(*record) for part in parts for name, record in part.items()}
        for slot in task.staged:
            for name, content in self._known[slot].files.items():
                image = Image(memoryview(content), [])
                self._storage.write(f"{directory}/{slot}/{name}", image, Pace(None, lambda nbytes: None))
                files[f"{slot}/{name}"] = FileRecord(image.size, image.crc32)
        for name, record in files.items():  # ranks may not share the place, as memory://
            check_size(self._storage, f"{directory}/{name}", record)
        others = [Entry.from_json(fields) for part in descriptions[1:] for fields in part["own values"]]
        values = (*task.values, *others)
        versions = {"veofunc": _own_version(), "torch": str(torch.__version__)}
        manifest = Manifest(
            task.step,
            self._world_size,
            tuple(task.staged),
            versions,
            time.time(),
            dict(task.metrics),
            files,
            values,
        )
        self._storage.publish(directory, task.step, task.staged, to_bytes(manifest))

    def _learn(self, slot: str, parts: list[dict[str, Any]]) -> None:
        """What says which tensors are in a slot, and where: made again only if a rank's plan is another."""
        digests = [part["slots"][slot] for part in parts]
        known = self._known.get(slot)
        if known and known.digests == digests:
            return
        before = known.plans if known else []
        texts = [part["plans"].get(slot) or before[rank] for rank, part in enumerate(parts)]
        index = _index([json.loads(text) for text in texts])
        index.check_complete()
        files = {INDEX: index.to_bytes(), DCP_METADATA: index.dcp_metadata()}
        self._known[slot] = _Known(digests, texts, files)


@dataclass(frozen=True)
class _Known:
    """Of one slot: the plans of all ranks, their digests, and the files that are made of them."""

    digests: list[str]
    plans: list[str]
    files: dict[str, bytes]


def _index(plans: list[dict[str, Any]]) -> SlotIndex:
    """Of the plans of all ranks."""
    entries = [Entry.from_json(fields) for fields in plans[0]["tensors"]]
    for plan in plans[1:]:
        entries += [entry for entry in map(Entry.from_json, plan["tensors"]) if entry.rank is not None]
    pieces: dict[str, list[Piece]] = {}
    for plan in plans:
        for key, fields in plan["pieces"]:
            pieces.setdefault(key, []).append(Piece.from_json(fields))
    found = {key: tuple(sorted(boxes, key=lambda piece: piece.offsets)) for key, boxes in pieces.items()}
    return SlotIndex(tuple(entries), found)


def _own_version() -> str:
    try:
        return version("veofunc")
    except PackageNotFoundError:
        return "not installed"
