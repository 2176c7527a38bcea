"""Saving the whole training state while training goes on."""

from __future__ import annotations

import logging
import os
import socket
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from veofunc.checkpoint.manifest import (
    CheckpointError,
    DamageError,
    TreePath,
    check_step,
    damage,
    read_complete,
    step_numbers,
    verify_files,
)
from veofunc.checkpoint.options import Options, names_of
from veofunc.checkpoint.plain import read_plain
from veofunc.checkpoint.ranks import Agreement, Ranks, explain
from veofunc.checkpoint.restore import Request, read_step
from veofunc.checkpoint.retention import Retention
from veofunc.checkpoint.save import Gate, Save
from veofunc.checkpoint.slot import Slot, SlotOptions
from veofunc.checkpoint.snapshot import (
    REST,
    Leaf,
    describe_leaves,
    describe_values,
    digests_of_small,
    flatten,
    unflatten,
)
from veofunc.checkpoint.step import StepWriter, Task
from veofunc.checkpoint.storage import LOCK, Storage, open_storage, step_name

__all__ = ["Checkpointer", "async_checkpointer"]

T = TypeVar("T")

NUM_LOOKS = 5  # at steps that another process replaces or removes meanwhile

logger = logging.getLogger(__name__)


def async_checkpointer(
    state: TensorDictBase,
    directory: str | Path = "checkpoints",
    *,
    slots: Mapping[str, Iterable[str]] | None = None,
    per_rank: Iterable[str] = (),
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: tuple[str, int] | tuple[str, int, str] | None = None,
    copy: bool = True,
    double_buffer: bool = False,
    files_per_rank: int = 1,
    bytes_per_second: float | None = None,
    timeout: float = 300.0,
    process_group: dist.ProcessGroup | None = None,
) -> Checkpointer:
    """A checkpointer that copies the state, and writes it to disk while training goes on.

    A step becomes visible in `directory` only when every byte of every rank is safely on disk.
    Leaving the `with` block waits for what is pending, raises what failed, and frees the memory. With
    several ranks every rank makes the checkpointer, after `init_process_group`, and all of them save
    and restore the same steps, in the same order.

    The state consists of slots, each a part that is written by a process of its own, side by side with
    the others, and of which one save at a time is written.

    Args:
        state: a template, as `train_state` makes it; memory on the host is made by its shapes: for one
            copy of what this rank writes.
        directory: where the steps go, each as `step_<n>`; made if missing; seen by all ranks. Or a URL
            that fsspec knows, as "s3://bucket/run".
        slots: top-level keys of the state by the name of their slot; by default `model` and `optimizer`
            are one each, and the others share `rest`.
        per_rank: top-level keys that differ from rank to rank, besides `rng`, `window` and `loader`: each
            rank saves, and gets back, its own. Elsewhere plain tensors and JSON values are the same on all
            ranks; sharded tensors are DTensors.
        keep_last: how many of the newest complete steps to keep; if no `keep_` is given, all.
        keep_every: keep those whose number is a multiple of it.
        keep_best: keep those with the lowest, or highest, of a metric that `save` is given: its name,
            how many, and if they are the highest "max".
        copy: False to write tensors from where they are: for a state whose tensors are never written
            again, as in functional updates. Small tensors are copied all the same, and those on an
            accelerator.
        double_buffer: twice the memory, so that a save need not wait for the one before to be written.
        files_per_rank: into how many files a rank writes a slot.
        bytes_per_second: how fast each rank may write at most; by default as fast as it can.
        timeout: seconds without progress, or a sign of life of another rank, after which a save fails.
        process_group: the ranks that save together; by default all.

    Returns:
        A context manager that saves and restores steps, and lists, verifies and removes old ones.

    Raises:
        CheckpointError: the ranks do not all see the same directory.
        NotADirectoryError: `directory` is something else.
        TypeError: a leaf of `state` cannot be saved; names it. Or an option is of a wrong kind.
        ValueError: an option has a wrong value, or two leaves would have the same name on disk.

    Warns:
        RuntimeWarning: another process writes there, or this one may not: it can read.

    Example:
        >>> import torch, veofunc as vf
        >>> model = torch.nn.Linear(2, 1)
        >>> with vf.async_checkpointer(vf.train_state(model), "runs/docs/checkpoints") as ckpt:
        ...     save = ckpt.save(vf.train_state(model, step=7), step=7)
        >>> save.result().name, ckpt.latest()
        ('step_7', 7)
        >>> state = ckpt.restore(vf.train_state(model))
        >>> state["step"], torch.equal(state["model", "weight"], model.weight)
        (7, True)
    """
    options = Options.of(
        slots=slots,
        per_rank=per_rank,
        keep=(keep_last, keep_every, keep_best),
        copy=copy,
        double_buffer=double_buffer,
        files_per_rank=files_per_rank,
        bytes_per_second=bytes_per_second,
        timeout=timeout,
    )
    leaves = flatten(state)  # refuses what cannot be saved before anything is made
    return Checkpointer(leaves, open_storage(directory), options, Ranks(process_group, options.timeout))


class Checkpointer:
    """Saves and restores the steps of one directory; `async_checkpointer` makes it.

    The state in training is only read. What takes long happens in background threads, which mostly wait
    for the processes that write.
    """

    def __init__(self, leaves: Mapping[TreePath, Leaf], storage: Storage, options: Options, ranks: Ranks):
        self._storage = storage
        self._options = options
        self._ranks = ranks
        self._writer = StepWriter(storage, ranks.rank, ranks.size, options.bytes_per_second)
        self._slots: dict[str, Slot] = {}
        # With their slots; those not known to have ended. Any thread may drop one: go through a copy.
        self._saves: list[tuple[Save, frozenset[str]]] = []
        self._damaged: set[int] = set()  # steps that look complete, but `restore` has found otherwise
        self._retaining = threading.Lock()
        self._turn = threading.Lock()
        self._saving: int | None = None  # the thread whose turn it is
        self._stager, self._threads = _pool(1), _pool(32)
        self._is_mine = False  # whether this may write
        self._process = os.getpid()
        self._broken_off: set[str] = set()  # slots of a failed `save`: which of their buffers is free is open
        weakref.finalize(self, storage.release)
        # What concurrent.futures itself uses: `atexit` comes when its pools are closed already.
        threading._register_atexit(_finish, weakref.ref(self), os.getpid())  # ty: ignore[missing-attribute]
        describe_leaves(leaves, options.sections, ranks.rank)  # refuses names that would be the same
        if self._open():
            self._prepare(leaves, self._by_slot(leaves))
            with ranks.agreement("plan") as agreement:
                self._writer.introduce({name: slot.plan for name, slot in self._slots.items()}, agreement)

    def save(
        self,
        state: TensorDictBase,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        block: bool = True,
    ) -> Save:
        """Copy `state` to host memory, and write it to disk in the background as `step`.

        When it returns, the state may change. It waits for a save that still writes the same slots, with
        `double_buffer` for the one before that. Threads that save at once wait for each other.

        Args:
            state: what to save, on every rank with the same structure.
            step: its number, not saved before; 0 is a step.
            metrics: numbers to keep with it, as `keep_best` compares them; those of rank 0 count.
            overwrite: whether a complete step of that number may be there: it stays until the new one
                is complete.
            block: False to return before the state is copied: nothing may write to it before
                `wait_staged` of the result has returned, in front of the optimizer's step for example.

        Returns:
            The save on its way, which tells when it is done, and where it is or why it failed.

        Raises:
            CheckpointError: a save of the same slots failed and nobody was told yet, or another process
                writes to the directory; this one is not made.
            FileExistsError: `step` exists already.
            RuntimeError: this thread is inside `save` already, as when a signal handler saves.
            TypeError: `step` is not an int, a metric not a number, or a leaf can't be saved; names it.
            ValueError: `step` is not from 0 to 2**63 - 1, or two leaves would have the same name on disk.
        """
        if self._process != os.getpid():
            raise CheckpointError(
                f"{self._storage.root} is written to by process {self._process}, of which this one is a "
                "fork: save there"
            )
        if self._turn.locked() and self._saving == threading.get_ident():
            raise RuntimeError(
                "save was called inside a save of the same thread, as by a signal handler: let the handler "
                "set a flag, and save when the first has returned (as save_on_signal does)"
            )
        with self._turn:
            self._saving = threading.get_ident()
            try:
                return self._uninterrupted(state, step, metrics, overwrite, block)
            finally:
                self._saving = None

    def wait(self) -> None:
        """Wait for all pending saves.

        Raises:
            CheckpointError: one failed, and nobody was told yet; names rank, file and cause.
        """
        if os.getpid() != self._process:
            return  # the saves are those of the process that this is a fork of
        saves = [save for save, _ in [*self._saves]]
        for save in saves:
            save._ended()
        for save in saves:
            save._wait()
        self._forget_ended()

    def close(self) -> None:
        """Wait for all pending saves, free the memory, end the processes, and let others write here.

        Reading goes on to work, and a later `save` makes everything again.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._stager.shutdown()
            self._threads.shutdown()
            self._stager, self._threads = _pool(1), _pool(32)
            for slot in self._slots.values():
                slot.close()
            self._slots = {}
            self._storage.release()
            self._is_mine = False

    def steps(self) -> tuple[int, ...]:
        """All complete steps in ascending order, as far as manifests and file sizes tell."""
        return tuple(step for step in step_numbers(self._storage) if not damage(self._storage, step))

    def latest(self) -> int | None:
        """The newest complete step, as far as manifests and file sizes tell; None if there is none.

        Warns:
            RuntimeWarning: a newer one is skipped; says what is wrong with it.
        """
        return self._newest(frozenset())

    def verify(self, step: int) -> None:
        """Read all files of `step` and compare them with their checksums.

        Raises:
            CheckpointError: the step does not exist or a file is damaged; says which, and how.
            TypeError: `step` is not an int.
            ValueError: `step` is not from 0 to 2**63 - 1.
        """
        check_step(step)
        manifest = read_complete(self._storage, self._choose(step))
        verify_files(self._storage, manifest, manifest.files)

    def restore(
        self,
        like: TensorDictBase,
        step: int | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        verify: Literal["full", "sizes"] = "full",
        only: Iterable[str] | None = None,
        cast: bool = False,
        map_location: torch.device | str | None = None,
        ranks: Literal["own", "drop", "all"] = "own",
    ) -> TensorDict:
        """Read the verified values of `step` into a new state; it shares nothing with `like`.

        Pending saves are waited for first. Each tensor comes on the device, and with the placements,
        that it has in `like`: sharded tensors are resharded. What `like` lacks as a whole (a section, or
        what is below an empty TensorDict, as optimizer state before the first step) comes as it was
        saved, tensors on the CPU. Tensors that were one when saved are one again.

        Args:
            like: a state of the same structure; its values do not matter.
            step: which one; by default the newest good one: one with a damaged file is skipped. Or the
                `Path` of a directory that torch.distributed.checkpoint wrote, which has no checksums.
            strict: False keeps the value of `like` for what was not saved, and leaves out what it
                has not.
            verify: "full" compares all files that are read with their checksums, "sizes" only their sizes,
                as must be where there are no checksums.
            only: top-level keys to read; the state has no others.
            cast: whether floating-point tensors may come in another dtype, that of `like`.
            map_location: where plain tensors go, whatever device they have in `like`.
            ranks: what becomes of the sections `per_rank`: "own" gives each rank what it saved, "drop"
                keeps what `like` has, and "all" gives all of them as `state[section, "rank_0"]` and so on.

        Returns:
            The state, as a TensorDict. Batch sizes are not saved: all are empty. Tensors of a subclass
            other than DTensor are plain ones.

        Raises:
            CheckpointError: there is no such step, a file is damaged (says what to do), or the saved
                state differs from `like`; lists all differences. Also if a pending save failed.
            TypeError: a leaf of `like` cannot be restored; names it. Or `step` is not an int.
            ValueError: `step` is not from 0 to 2**63 - 1, or an option has a wrong value.

        Warns:
            RuntimeWarning: a newer step is skipped; says what is wrong with it. Or another number of
                ranks saved it; says what may be missing.
        """
        if not (step is None or isinstance(step, os.PathLike)):
            check_step(step)
        if verify not in ("full", "sizes"):
            raise ValueError(f'verify must be "full" or "sizes", got {verify!r}')
        if verify == "full" and isinstance(step, os.PathLike):
            raise ValueError(
                f'verify must be "sizes" for {step}: torch.distributed.checkpoint writes no checksums'
            )
        if ranks not in ("own", "drop", "all"):
            raise ValueError(f'ranks must be "own", "drop" or "all", got {ranks!r}')
        request = Request(
            like=flatten(like),
            only=None if only is None else frozenset(names_of("only", only)),
            strict=strict,
            cast=cast,
            verify=verify,
            device=None if map_location is None else _device(map_location),
            ranks=ranks,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
        )
        self.wait()
        with torch.inference_mode(False):  # its tensors may be trained on
            if isinstance(step, os.PathLike):
                return unflatten(self._together(f"reading {step}", lambda: read_plain(step, request)))
            return unflatten(self._read(step, request))

    def __repr__(self) -> str:
        return f"Checkpointer({self._storage.root!r}, rank {self._ranks.rank} of {self._ranks.size})"

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failure:  # must not hide why the block was left
            error.add_note(str(failure))

    def _open(self) -> bool:
        """Whether this may write; on all ranks together, which must see one directory."""

        def claim(roots: list[str]) -> str:
            if {*roots} != {self._storage.root}:
                raise CheckpointError(f"directory must be the same on all ranks, got {roots}")
            return self._storage.claim()

        def look() -> None:
            if not self._storage.in_process and LOCK not in self._storage.names():
                raise CheckpointError(
                    f"{self._storage.root} of rank 0 is not seen here; all ranks must share it"
                )

        with self._ranks.agreement("open") as agreement:
            owner = agreement.round("opening", lambda: self._storage.root, claim)
            if not owner:
                agreement.round("opening", look, lambda _: None)
        if self._ranks.rank == 0:
            self._storage.release()  # until the first save: who only reads must not be in the way
        if owner and owner != _here():
            text = f"{self._storage.root} is written to by {owner}: this checkpointer can read, and not save"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return not owner

    def _uninterrupted(self, *args: Any) -> Save:
        """Save in a thread that no interrupt reaches: either it is made, or not begun."""
        stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None
        gate = Gate()

        def save() -> Save:
            with stream or nullcontext():
                return self._save(gate, *args)

        future = self._stager.submit(save)
        try:
            return future.result()
        except BaseException:
            if gate.close():
                wait([future])  # until then the state must not change
            raise

    def _save(
        self,
        gate: Gate,
        state: TensorDictBase,
        step: int,
        metrics: Mapping[str, float] | None,
        overwrite: bool,
        block: bool,
    ) -> Save:
        agreement = self._ranks.agreement("save", background=True)
        slots: frozenset[str] = frozenset()
        try:
            check_step(step)
            measured = _checked(metrics or {})
            leaves = flatten(state)
            tensors = self._by_slot(leaves)
            slots = frozenset(tensors) or frozenset([REST])
            self._make_room(slots)
            self._claim()
            self._check_new(step, overwrite)
            gate.begin()
            self._prepare(leaves, tensors)
            background = None if block else self._threads
            staged = {name: self._slots[name].stage(own, background) for name, own in tensors.items()}
            values = tuple(describe_values(leaves, self._options.sections, self._ranks.rank))
            small = digests_of_small(leaves, self._options.sections) if self._ranks.size > 1 else {}
            save = Save(step, sum(part.nbytes for part in staged.values()))
            save._copies = [part.copied for part in staged.values() if part.copied]
            task = Task(step, staged, values, small, measured, save._wrote)
        except BaseException as error:
            self._broken_off |= slots
            if self._ranks.size > 1:  # the others must hear of it; here it is raised at once
                self._begin(Save(step, told=True), slots, CheckpointError(explain(error)), agreement)
            raise
        self._begin(save, slots, task, agreement)
        return save

    def _begin(
        self, save: Save, slots: frozenset[str], task: Task | CheckpointError, agreement: Agreement
    ) -> None:
        """Have it written in the background, after those that are written to the same slots."""
        before = [other for other, theirs in [*self._saves] if slots & theirs and not other.done]
        self._saves.append((save, slots))
        try:
            self._threads.submit(self._run, save, task, agreement, before)
        except BaseException:  # no pool takes work any more, as at the end of the process
            save._future.cancel()
            raise

    def _run(
        self, save: Save, task: Task | CheckpointError, agreement: Agreement, before: list[Save]
    ) -> None:
        """Runs in the background."""
        if not save._future.set_running_or_notify_cancel():
            task = CheckpointError("save was interrupted")
        where = f"{self._storage.root}/{step_name(save.step)}"
        try:
            for other in before:
                other._ended()
            self._writer.write(task, agreement)
            self._damaged.discard(save.step)
            if self._ranks.rank == 0:
                self._remove_older(save.step)
        except Exception as error:
            text = f"step {save.step} of {self._storage.root} was not saved: {explain(error)}"
            logger.error(text)
            failure = CheckpointError(text)
            failure.__cause__ = error
            if not save._future.cancelled():
                save._future.set_exception(failure)
            return
        save._future.set_result(where)

    def _make_room(self, slots: frozenset[str]) -> None:
        """Wait until a buffer of each slot is free, and raise what failed in them."""
        for slot in sorted(slots):
            saves = [save for save, theirs in [*self._saves] if slot in theirs]
            num_free = 0 if slot in self._broken_off else self._options.num_buffers - 1
            num_done = len(saves) - num_free
            for index, save in enumerate(saves):
                if index < num_done or save.done:
                    save._wait()
        self._forget_ended()
        self._broken_off -= slots

    def _forget_ended(self) -> None:
        """Drop what nobody needs to wait for; other threads add to the list meanwhile."""
        for known in [*self._saves]:
            if known[0]._over:
                with suppress(ValueError):  # another thread has dropped it
                    self._saves.remove(known)

    def _claim(self) -> None:
        if self._is_mine or self._ranks.rank:
            return
        owner = self._storage.claim()
        if owner:
            way_out = "close() that one" if owner == _here() else "end that one, or take another directory"
            who = "another checkpointer of this process" if owner == _here() else owner
            raise CheckpointError(
                f"{self._storage.root} is written to by {who}: one directory is for one run; {way_out}"
            )
        self._is_mine = True

    def _check_new(self, step: int, overwrite: bool) -> None:
        where = f"{self._storage.root}/{step_name(step)}"
        if any(save.step == step and not save.done for save, _ in [*self._saves]):
            raise FileExistsError(f"{where} is being saved already")
        steps = step_numbers(self._storage)
        if steps and step < steps[-1] and self._ranks.rank == 0:
            logger.warning(
                "%s is older than step %d, which stays the newest, also for keep_last; to go back for good, "
                "remove the later steps",
                where,
                steps[-1],
            )
        if step not in steps:
            return
        reason = damage(self._storage, step)
        if step in self._damaged:
            reason = reason or "a file is damaged, as restore has found"
        if reason and self._ranks.rank == 0:
            name = self._storage.set_aside(step)
            logger.warning("%s is no complete step (%s); it was moved to %s", where, reason, name)
        if not (reason or overwrite):
            raise FileExistsError(f"{where} exists; overwrite=True replaces it once the new one is complete")

    def _by_slot(self, leaves: Mapping[TreePath, Leaf]) -> dict[str, dict[TreePath, Tensor]]:
        slots: dict[str, dict[TreePath, Tensor]] = defaultdict(dict)
        name_of = self._options.sections.slots.get
        for path, leaf in leaves.items():
            if isinstance(leaf, Tensor):
                slots[name_of(path[0], REST)][path] = leaf
        return dict(slots)

    def _prepare(
        self, leaves: Mapping[TreePath, Leaf], slots: Mapping[str, Mapping[TreePath, Tensor]]
    ) -> None:
        """Make what is needed to save such leaves, unless it is there."""
        changed = [name for name, tensors in slots.items() if not self._slot(name).fits(tensors)]
        if changed:
            entries = describe_leaves(leaves, self._options.sections, self._ranks.rank)
            for name in changed:
                for save, theirs in [*self._saves]:
                    if name in theirs:  # it uses the memory
                        save._ended()
                mine = [entry for entry in entries if entry.kind == "tensor" and entry.slot == name]
                self._slot(name).prepare_(mine, slots[name])

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            options, ranks = self._options, self._ranks
            shared = SlotOptions(
                rank=ranks.rank,
                world_size=ranks.size,
                copy=options.copy,
                num_buffers=options.num_buffers,
                num_files=options.num_files,
                patience=options.timeout,
                storage=self._storage,
            )
            self._slots[name] = Slot(name, shared)
        return self._slots[name]

    def _newest(self, besides: Container[int]) -> int | None:
        """The newest step that looks complete, with a warning for each newer one that does not."""
        for _ in range(NUM_LOOKS):
            vanished = False
            for step in reversed(step_numbers(self._storage)):
                reason = "" if step in besides else damage(self._storage, step)
                if reason and step not in step_numbers(self._storage):
                    vanished = True  # it was removed, or is being replaced, by who writes here
                elif reason:
                    warnings.warn(f"step {step} is skipped: {reason}", RuntimeWarning, stacklevel=3)
                elif step not in besides:
                    return step
            if not vanished:
                break
        return None

    def _choose(self, step: int | None, besides: Container[int] = ()) -> int:
        step = self._newest(besides) if step is None else step
        root = self._storage.root
        if step is None:
            raise CheckpointError(f"there is no complete step in {root}")
        if step not in step_numbers(self._storage):
            raise CheckpointError(f"there is no {root}/{step_name(step)}; complete steps: {self.steps()}")
        return step

    def _read(self, step: int | None, request: Request) -> dict[TreePath, Leaf]:
        """The leaves of the step, or of the newest good one; on all ranks together."""
        skipped: set[int] = set()
        num_looks = 0

        def choose(_: Any) -> tuple[int, float]:
            chosen = self._choose(step, skipped)
            return chosen, self._saved_at(chosen)

        while True:
            with self._ranks.agreement("restore") as agreement:
                chosen, saved_at = agreement.round("choosing a step", lambda: None, choose)
                leaves: dict[TreePath, Leaf] = {}

                def read(chosen: int = chosen, leaves: dict[TreePath, Leaf] = leaves) -> str:
                    try:
                        leaves |= read_step(self._storage, chosen, request)
                    except DamageError as error:
                        return str(error)
                    return ""

                reasons = agreement.round(f"reading step {chosen}", read, lambda reasons: reasons)
            found = "; ".join(dict.fromkeys(filter(None, reasons)))
            if not found:
                return leaves
            num_looks += 1
            if num_looks < NUM_LOOKS and self._changed_since(chosen, saved_at):
                continue  # whoever writes here has replaced or removed it meanwhile
            self._damaged.add(chosen)
            skipped.add(chosen)
            if step is not None:
                raise CheckpointError(f"{found}; {self._way_out(chosen)}")
            warnings.warn(f"step {chosen} is skipped: {found}", RuntimeWarning, stacklevel=3)

    def _saved_at(self, step: int) -> float:
        """When a step was saved; 0 if it is not complete."""
        try:
            return read_complete(self._storage, step).time
        except DamageError:
            return 0.0

    def _changed_since(self, step: int, saved_at: float) -> bool:
        """Whether a step is another than it was, or gone, as rank 0 sees it."""
        with self._ranks.agreement("restore") as agreement:
            return agreement.round(
                "looking again", lambda: None, lambda _: saved_at != 0 and self._saved_at(step) != saved_at
            )

    def _together(self, doing: str, work: Callable[[], T]) -> T:
        """What `work` gives on this rank, once it succeeded on all."""
        given: list[T] = []
        with self._ranks.agreement("restore") as agreement:
            agreement.round(doing, lambda: given.append(work()), lambda _: None)
        return given[0]

    def _way_out(self, step: int) -> str:
        """What to do about a damaged step."""
        older = [other for other in self.steps() if other < step and other not in self._damaged]
        where = f"{self._storage.root}/{step_name(step)}"
        if not older:
            return f"no older one is complete; to go on without it, remove {where}"
        return f"restore(like, step={older[-1]}), or remove {where} to restore the newest of the others"

    def _remove_older(self, saved: int) -> None:
        if self._options.retention == Retention():
            return
        with self._retaining:
            metrics: dict[int, Mapping[str, float]] = {}
            for step in step_numbers(self._storage):
                with suppress(DamageError):  # it does not count
                    metrics[step] = read_complete(self._storage, step).metrics
            for step in self._options.retention.doomed(metrics, saved):
                try:
                    self._storage.remove(step_name(step))
                except OSError as error:  # the save has succeeded; the next one tries again
                    logger.warning("step %d could not be removed: %s", step, error)


def _finish(checkpointer: weakref.ref[Checkpointer], process: int) -> None:
    """At the end of the process wait for pending saves: after this no pool of threads takes new work."""
    ckpt = checkpointer()
    if ckpt is not None and os.getpid() == process:  # a fork has none of its threads
        for save, _ in [*ckpt._saves]:
            save._ended()


def _here() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="veofunc-checkpoint")


def _device(where: torch.device | str) -> torch.device:
    text = f'map_location must be a device that holds values, as "cpu" or "cuda:0", got {where!r}'
    try:
        device = torch.device(where)
    except RuntimeError as error:
        raise ValueError(text) from error
    if device.type == "meta":
        raise ValueError(text)
    return device


def _checked(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise TypeError(f'metrics must be a mapping as {{"loss": 1.2}}, got {metrics!r}')
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(
                f"metrics must be numbers by their names, got {name!r}: {value!r}; of a tensor "
                "give its .item()"
            )
    return {name: float(value) for name, value in metrics.items()}
