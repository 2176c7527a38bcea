"""One step on disk, which all ranks write, and read, together.

The files are those of torch.distributed.checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)

from veofunc.checkpoint.manifest import (
    CheckpointError,
    Entry,
    FileRecord,
    Manifest,
    TreePath,
    commit,
    damage,
    describe_file,
    read_complete,
    step_name,
    step_numbers,
    temporary_step,
    verify_files,
)
from veofunc.checkpoint.snapshot import (
    RANK_SECTIONS,
    Empty,
    Leaf,
    describe_leaves,
    match,
    tensors_of_slot,
)

__all__ = ["Ranks", "explain", "read_step", "write_step"]

T = TypeVar("T")


def write_step(
    directory: Path, step: int, staged: Mapping[TreePath, Leaf] | CheckpointError, ranks: Ranks
) -> Path:
    """Write the staged leaves of all ranks as `step` of `directory`. A collective.

    Args:
        directory: where the steps are.
        step: its number.
        staged: leaves in host memory, or what kept this rank from staging, which fails all ranks.
        ranks: who writes.

    Returns:
        The directory of the step, complete and durable.

    Raises:
        CheckpointError: on every rank, if anything failed on any; then nothing is left of it.
    """
    own, entries = _agree(step, staged, ranks)
    path = directory / step_name(step)
    with ExitStack() as stack:
        unfinished = ranks.first(
            f"writing to {directory}",
            lambda: stack.enter_context(temporary_step(directory, step)),
        )
        slots = tuple(sorted({entry.slot for entry in entries if entry.kind == "tensor"}))
        files: dict[str, FileRecord] = {}
        for slot in slots:
            tensors = tensors_of_slot(slot, own, cast(Mapping, staged))
            records = _write_slot(unfinished / slot, tensors, ranks)
            files |= {f"{slot}/{name}": record for name, record in records.items()}
        manifest = Manifest(step, ranks.size, slots, _versions(), files, tuple(entries))
        ranks.first(f"committing {path}", lambda: commit(unfinished, path, manifest))
    return path


def read_step(
    path: Path, like: Mapping[TreePath, Leaf], ranks: Ranks, *, strict: bool
) -> dict[TreePath, Leaf]:
    """Verify the step at `path` and read what a state like `like` has of it. A collective.

    A tensor that `like` has comes on the same device and with the same placements; another one
    whole, on the CPU.

    Raises:
        CheckpointError: on every rank, before anything is read, if a file is damaged or `match`
            finds differences.
    """
    manifest = ranks.each("verifying", lambda: _verify_share(path, ranks))
    if manifest.world_size != ranks.size and any(e.rank is not None for e in manifest.entries):
        warnings.warn(
            f"{path} was saved by {manifest.world_size} ranks and is restored on {ranks.size}: "
            f"{' and '.join(RANK_SECTIONS)} come back only on ranks that saved theirs",
            RuntimeWarning,
            stacklevel=3,
        )
    own = {entry.path: entry for entry in manifest.entries if entry.rank in (None, ranks.rank)}
    wanted = ranks.each(f"comparing with {path}", lambda: match(own, like, strict=strict))
    leaves = {entry.path: _target(entry, like.get(entry.path)) for entry in wanted}
    for slot in manifest.slots:
        _read_slot(path / slot, tensors_of_slot(slot, wanted, leaves), ranks)
    return {**{p: _copy(leaf) for p, leaf in like.items() if p not in leaves}, **leaves}


def _agree(
    step: int, staged: Mapping[TreePath, Leaf] | CheckpointError, ranks: Ranks
) -> tuple[list[Entry], list[Entry]]:
    """The entries of this rank, and those of all, which must save the same structure."""

    def describe_own() -> list[Entry]:
        if isinstance(staged, CheckpointError):
            raise staged
        return describe_leaves(staged, ranks.rank)

    own = ranks.each("staging the state", describe_own)
    shared = [entry for entry in own if entry.rank is None]
    sections = groupby(shared, lambda entry: entry.path[0])
    digests = {name: crc32(repr(list(entries)).encode()) for name, entries in sections}
    private = [entry for entry in own if entry.rank is not None]
    reports = ranks.gather("comparing", lambda: ({"number of the step": step, **digests}, private))
    expected, _ = reports[0]
    for rank, (seen, _) in enumerate(reports):
        names = expected.keys() | seen.keys()
        differing = sorted(name for name in names if expected.get(name) != seen.get(name))
        if differing:
            raise CheckpointError(
                f"rank {rank} saves something else than rank 0: {', '.join(differing)}; "
                "all ranks must save the same step, structure and JSON values"
            )
    return own, shared + [entry for _, entries in reports for entry in entries]


def _write_slot(directory: Path, tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, FileRecord]:
    """Write `tensors` of all ranks into `directory` and sync the files. A collective.

    These are the steps of `dcp.save`, which looks up the default process group on the way and takes
    a process whose group is gone for the only one.

    Returns:
        The files of all ranks, by name.
    """
    is_first = ranks.rank == 0
    planner = DefaultSavePlanner()
    writer = FileSystemWriter(directory, thread_count=1)  # errors in further threads are lost

    def plan_own():
        planner.set_up_planner(tensors, is_coordinator=is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write_own():
        return writer.write_data(planner.finish_plan(plans[ranks.rank]), planner).wait()

    def describe_own():
        names = [f"__{ranks.rank}_*", *([".metadata"] if is_first else [])]
        return {file.name: describe_file(file) for name in names for file in directory.glob(name)}

    # Every rank makes the same global plan out of the same plans.
    plans, metadata = planner.create_global_plan(ranks.gather(f"planning {directory}", plan_own))
    plans = writer.prepare_global_plan(plans)
    results = ranks.gather(f"writing {directory}", write_own)
    ranks.first(f"finishing {directory}", lambda: writer.finish(metadata, results))
    records = ranks.gather(f"checking {directory}", describe_own)
    return {name: record for own in records for name, record in own.items()}


def _verify_share(path: Path, ranks: Ranks) -> Manifest:
    """The manifest of the step at `path`, after this rank has verified its share of the files."""
    try:
        manifest = read_complete(path)
        verify_files(path, manifest, list(manifest.files)[ranks.rank :: ranks.size])
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_way_out(path)}") from error
    return manifest


def _way_out(path: Path) -> str:
    """What to do about the damaged step at `path`."""
    damaged = int(path.name.removeprefix("step_"))
    older = [number for number in step_numbers(path.parent) if number < damaged]
    step = next((s for s in reversed(older) if not damage(path.with_name(step_name(s)))), None)
    if step is None:
        return f"no older one is complete; to go on without it, remove {path}"
    return f"restore(like, step={step}), or remove {path} to restore the newest of the others"


def _read_slot(directory: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Read the saved values of `tensors` into them; each rank reads what it holds. A collective."""

    def read_own():
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(directory)
        metadata = reader.read_metadata()
        planner.set_up_planner(tensors, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()

    ranks.each(f"reading {directory}", read_own)


def _target(entry: Entry, leaf: Leaf) -> Leaf:
    """Where the value of `entry` goes: into a tensor like `leaf`, if that is one."""
    if entry.kind == "empty":
        return Empty()
    if entry.kind == "json":
        return entry.value
    if isinstance(leaf, Tensor):
        return torch.empty_like(leaf)
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")


def _copy(leaf: Leaf) -> Leaf:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _versions() -> dict[str, str]:
    try:
        ours = version("veofunc")
    except PackageNotFoundError:
        ours = "not installed"
    return {"veofunc": ours, "torch": str(torch.__version__)}


class Ranks:
    """The processes that save together. Without torch.distributed: this one alone.

    Which they are is settled here, once, with a gloo group of their own: whatever becomes of the
    user's groups, no rank takes itself for the only one. All ranks of `group` construct it
    together.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            members = dist.get_process_group_ranks(group)
            local = group is not None  # only its members are here; for the whole world, everyone is
            own = dist.new_group(members, backend="gloo", use_local_synchronization=local)
            self._group = cast(dist.ProcessGroup, own)
            self.rank, self.size = members.index(dist.get_rank()), len(members)

    def each(self, doing: str, work: Callable[[], T]) -> T:
        """What `work` gives on this rank, once it succeeded on all ranks, which all call this.

        Raises:
            CheckpointError: on every rank, if `work` raised on any; names rank, `doing` and cause.
        """
        value, failure = None, None
        try:
            value = work()
        except Exception as error:  # raised below, on every rank
            failure = error
        causes = self._all_gather(explain(failure) if failure else "")
        failed = [f"rank {rank}, {doing}: {cause}" for rank, cause in enumerate(causes) if cause]
        if failed:
            raise CheckpointError("; ".join(failed)) from failure
        return cast(T, value)

    def gather(self, doing: str, work: Callable[[], T]) -> list[T]:
        """What `work` gives on every rank, in their order; otherwise as `each`."""
        return self._all_gather(self.each(doing, work))

    def first(self, doing: str, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone does it; otherwise as `each`."""
        return cast(T, self.gather(doing, lambda: work() if self.rank == 0 else None)[0])

    def _all_gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def explain(error: BaseException) -> str:
    """What went wrong, and what before: torch hides the error of a full disk behind another."""
    if isinstance(error, CheckpointError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    before = error.__cause__ or error.__context__
    return f"{text} (after {explain(before)})" if before else text
