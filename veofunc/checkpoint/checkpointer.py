"""Saving the whole training state while training goes on."""

from __future__ import annotations

import logging
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from veofunc.checkpoint.manifest import (
    CheckpointError,
    TreePath,
    check_step,
    damage,
    read_complete,
    remove_abandoned,
    remove_step,
    step_name,
    step_numbers,
    verify_files,
)
from veofunc.checkpoint.snapshot import Leaf, allocate_, describe_leaves, flatten, stage_, unflatten
from veofunc.checkpoint.step import Ranks, explain, read_step, write_step

__all__ = ["Checkpointer", "Save", "async_checkpointer"]

logger = logging.getLogger(__name__)


def async_checkpointer(
    state: TensorDictBase,
    directory: str | Path = "checkpoints",
    *,
    keep_last: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Checkpointer:
    """A checkpointer that copies the state, and writes it to disk while training goes on.

    A step becomes visible in `directory` only when every byte of every rank is safely on disk.
    Leaving the `with` block waits for what is pending and raises what failed. With several ranks
    every rank makes the checkpointer, after `init_process_group`, and all of them save and restore
    the same steps, in the same order.

    The sections `rng` and `window` differ from rank to rank: each saves, and gets back, its own.
    Elsewhere plain tensors and JSON values are the same on all ranks; sharded tensors are DTensors.

    Args:
        state: a template, as `train_state` makes it; buffers in host memory are made by its shapes.
        directory: where the steps go, each as `step_<n>`; made if missing; seen by all ranks.
        keep_last: how many of the newest complete steps to keep; by default all.
        process_group: the ranks that save together; by default all.

    Returns:
        A context manager that saves and restores steps, and lists, verifies and removes old ones.

    Raises:
        TypeError: a leaf of `state` cannot be saved; names it. Or `keep_last` is not an int.
        ValueError: `keep_last` is below 1, or two leaves would have the same name on disk.
        NotADirectoryError: `directory` is something else.

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
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int)):
        raise TypeError(f"keep_last must be an int or None, got {keep_last!r}")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, or None to keep all, got {keep_last}")
    directory = Path(directory).absolute()
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"directory must be a directory or new, {directory} is a file")
    return Checkpointer(state, directory, keep_last, Ranks(process_group))


class Save:
    """One save on its way to disk, as `Checkpointer.save` returns it."""

    def __init__(self, future: Future[Path], told: bool):
        self._future = future
        self._told = told  # whether its failure was raised

    @property
    def done(self) -> bool:
        """Whether it is on disk, or failed."""
        return self._future.done()

    def wait_staged(self) -> None:
        """Return when the state may change: at once, as `save` copies before it returns."""

    def result(self) -> Path:
        """Wait until the step is on disk; its directory.

        Raises:
            CheckpointError: it could not be saved; names rank, file and cause.
        """
        self._future.exception()
        self._told = True
        return self._future.result()

    def _wait(self) -> None:
        """Wait until it is done, and raise its failure if nobody was told yet."""
        if self._future.exception() is not None and not self._told:
            self.result()


class Checkpointer:
    """Saves and restores the steps of one directory; `async_checkpointer` makes it.

    One background thread writes, one save at a time. The state in training is only read.
    """

    def __init__(self, state: TensorDictBase, directory: Path, keep_last: int | None, ranks: Ranks):
        self._directory = directory
        self._keep_last = keep_last
        self._ranks = ranks
        self._buffers: dict[TreePath, Tensor] = {}
        self._pending: Save | None = None
        self._turn = threading.Lock()
        self._saving: int | None = None  # the thread whose turn it is
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="veofunc-checkpoint")
        allocate_(self._buffers, self._flat(state))
        directory.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            remove_abandoned(directory)

    def save(self, state: TensorDictBase, step: int) -> Save:
        """Copy `state` to host memory, and write it to disk in the background as `step`.

        When it returns, the state may change. A save still being written is waited for first.
        Threads that save at once wait for each other.

        Args:
            state: what to save, on every rank with the same structure.
            step: its number, not saved before; 0 is a step.

        Returns:
            The save on its way, which tells when it is done, and where it is or why it failed.

        Raises:
            CheckpointError: the save before failed and nobody was told yet; this one is not made.
            FileExistsError: `step` exists already.
            RuntimeError: this thread is inside `save` already, as when a signal handler saves.
            TypeError: `step` is not an int, or a leaf can't be saved; names the leaf.
            ValueError: `step` is not from 0 to 2**63 - 1, or two leaves would have the same name on disk.
        """
        if self._turn.locked() and self._saving == threading.get_ident():
            raise RuntimeError(
                "save was called inside a save of the same thread, as by a signal handler: let the handler "
                "set a flag, and save when the first has returned"
            )
        with self._turn:
            self._saving = threading.get_ident()
            try:
                return self._save(state, step)
            finally:
                self._saving = None

    def wait(self) -> None:
        """Wait for the pending save, if there is one.

        Raises:
            CheckpointError: it failed, and nobody was told yet; names rank, file and cause.
        """
        self._thread.submit(int).result()  # also for a save whose handle an interrupt has lost
        if self._pending is not None:
            self._pending._wait()

    def steps(self) -> tuple[int, ...]:
        """All complete steps in ascending order, as far as manifests and file sizes tell."""
        return tuple(s for s in step_numbers(self._directory) if not damage(self._path(s)))

    def latest(self) -> int | None:
        """The newest complete step, as far as manifests and file sizes tell; None if there is none.

        Warns:
            RuntimeWarning: a newer one is skipped; says what is wrong with it.
        """
        for step in reversed(step_numbers(self._directory)):
            reason = damage(self._path(step))
            if not reason:
                return step
            warnings.warn(f"step {step} is skipped: {reason}", RuntimeWarning, stacklevel=2)
        return None

    def verify(self, step: int) -> None:
        """Read all files of `step` and compare them with their checksums.

        Raises:
            CheckpointError: the step does not exist or a file is damaged; says which, and how.
            TypeError: `step` is not an int.
            ValueError: `step` is not from 0 to 2**63 - 1.
        """
        check_step(step)
        path = self._path(self._choose(step))
        manifest = read_complete(path)
        verify_files(path, manifest, manifest.files)

    def restore(self, like: TensorDictBase, step: int | None = None, *, strict: bool = True) -> TensorDict:
        """Read the verified values of `step` into a new state; it shares nothing with `like`.

        A pending save is waited for first. Each tensor comes on the device, and with the
        placements, that it has in `like`: sharded tensors are resharded. What `like` lacks as a
        whole (a section, or what is below an empty TensorDict, as optimizer state before the first
        step) comes as it was saved, tensors on the CPU.

        Args:
            like: a state of the same structure; its values do not matter.
            step: which one; by default the newest complete one.
            strict: False keeps the value of `like` for what was not saved, and leaves out what it
                has not.

        Returns:
            The state, as a TensorDict. Batch sizes are not saved: all are empty. Tensors of a subclass
            other than DTensor are plain ones.

        Raises:
            CheckpointError: there is no such step, a file is damaged (says what to do), or the saved
                state differs from `like`; lists all differences. Also if the pending save failed.
            TypeError: a leaf of `like` cannot be restored; names it. Or `step` is not an int.
            ValueError: `step` is not from 0 to 2**63 - 1.

        Warns:
            RuntimeWarning: another number of ranks saved it; says what may be missing.
        """
        if step is not None:
            check_step(step)
        self.wait()
        leaves = flatten(like)
        path = self._path(self._ranks.first("choosing a step", lambda: self._choose(step)))
        with torch.inference_mode(False):  # its tensors may be trained on
            return unflatten(read_step(path, leaves, self._ranks, strict=strict))

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except CheckpointError as failure:  # must not hide why the block was left
            error.add_note(str(failure))

    def _path(self, step: int) -> Path:
        return self._directory / step_name(step)

    def _save(self, state: TensorDictBase, step: int) -> Save:
        self.wait()
        try:
            self._check_new(step)
            staged = stage_(self._buffers, self._flat(state))
        except Exception as error:
            # The other ranks wait to hear of it; here it is raised at once.
            self._submit(step, CheckpointError(explain(error)), told=True)
            raise
        return self._submit(step, staged)

    def _flat(self, state: TensorDictBase) -> dict[TreePath, Leaf]:
        """The leaves of `state`, of which no two have the same name on disk."""
        leaves = flatten(state)
        if {path for path, leaf in leaves.items() if isinstance(leaf, Tensor)} != self._buffers.keys():
            describe_leaves(leaves, self._ranks.rank)  # refuses such; what has buffers was accepted
        return leaves

    def _check_new(self, step: int) -> None:
        check_step(step)
        if self._path(step).exists():
            state = damage(self._path(step)) or "it is complete"
            raise FileExistsError(f"{self._path(step)} exists ({state}); remove it to save the step again")

    def _choose(self, step: int | None) -> int:
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"there is no complete step in {self._directory}")
        if not self._path(step).exists():
            raise CheckpointError(f"there is no {self._path(step)}; complete steps: {self.steps()}")
        return step

    def _submit(self, step: int, staged: dict[TreePath, Leaf] | CheckpointError, told: bool = False) -> Save:
        self._pending = Save(self._thread.submit(self._write, step, staged), told)
        return self._pending

    def _write(self, step: int, staged: dict[TreePath, Leaf] | CheckpointError) -> Path:
        """Runs in the background."""
        try:
            path = write_step(self._directory, step, staged, self._ranks)
            self._ranks.first("removing older steps", lambda: self._remove_older(step))
        except Exception as error:
            text = f"step {step} of {self._directory} was not saved: {explain(error)}"
            logger.error(text)
            raise CheckpointError(text) from error
        return path

    def _remove_older(self, saved: int) -> None:
        """Remove the oldest complete steps beyond `keep_last`, but not the one just saved."""
        if self._keep_last is None:
            return
        for step in self.steps()[: -self._keep_last]:
            if step != saved:
                try:
                    remove_step(self._path(step))
                except OSError as error:  # the save has succeeded; the next one tries again
                    logger.warning("step %d could not be removed: %s", step, error)
