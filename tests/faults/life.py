"""What a rank does between its start and its violent end: restore the newest step, save step after step."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.processes import Journal, join
from tests.faults.states import Leaf, differences, draw_leaves, fill_, new_state, num_bytes, stamp_of, step_of
from veofunc.checkpoint import Checkpointer, CheckpointError, async_checkpointer

TIMEOUT = 3.0  # seconds after which a rank must have noticed that another one is gone


@dataclass(frozen=True)
class Plan:
    """What all processes that save to one directory, one after the other, have in common.

    Attributes:
        seed: of all that they draw.
        directory: of the steps.
        num_ranks: how many save together.
        has_group: False for one process without torch.distributed.
        leaves: of the state.
        is_separate: whether steps with an odd number hold the section `ema`, the others all else.
        keep_last: as of `async_checkpointer`.
    """

    seed: int
    directory: Path
    num_ranks: int
    has_group: bool
    leaves: tuple[Leaf, ...]
    is_separate: bool
    keep_last: int | None

    def leaves_of(self, step: int) -> tuple[Leaf, ...]:
        """Those that a step holds."""
        if not self.is_separate:
            return self.leaves
        return tuple(leaf for leaf in self.leaves if (leaf.section == "ema") == bool(step % 2))


def draw_plan(seed: int, num_ranks: int, directory: Path) -> Plan:
    rng = Random(f"plan {seed}")
    has_group = num_ranks > 1 or rng.random() < 0.5
    keep_last = rng.choice([None, 1, 2, 3])
    leaves = draw_leaves(rng)
    return Plan(seed, directory, num_ranks, has_group, leaves, rng.random() < 0.3, keep_last)


def checkpointer(plan: Plan, state, rng: Random, **options: Any) -> Checkpointer:
    """One for that directory; what does not change what is promised is drawn."""
    drawn = {
        "slots": {"ema": ["ema"]},
        "keep_last": plan.keep_last,
        "copy": rng.random() < 0.7,
        "double_buffer": rng.random() < 0.3,
        "files_per_rank": rng.choice([1, 1, 2, 3]),
        "bytes_per_second": rng.choice([None, None, 10 * num_bytes(plan.leaves)]),
        "timeout": TIMEOUT,
    }
    return async_checkpointer(state, plan.directory, **{**drawn, **options})


def live(plan: Plan, life: int, rank: int, journal: Journal, port_file: Path) -> None:
    """Save until the end comes from outside."""
    phase = ["starting"]
    try:
        mesh = join(rank, plan.num_ranks, port_file) if plan.has_group else None
        rng = Random(f"{plan.seed} life {life}")  # the same on all ranks
        copies = rng.random() < 0.7
        ckpt = checkpointer(plan, new_state(plan.leaves, 0, rank, mesh), rng, copy=copies)
        phase[0] = "restoring"
        step = restore_newest(ckpt, plan, rank, mesh, rng, journal)
        Life(plan, life, rank, mesh, rng, journal, ckpt, copies, phase).save_steps(step)
    except BaseException as error:
        journal.write("error", f"{phase[0]}: {one_line(error)}")
        traceback.print_exc()
        raise


def restore_newest(ckpt: Checkpointer, plan: Plan, rank: int, mesh, rng: Random, journal: Journal) -> int:
    """Check the newest step; the number of the next one."""
    newest = ckpt.latest()
    if newest is None:
        journal.write("restored", "nothing")
        return 0
    leaves = plan.leaves_of(newest)
    like = new_state(leaves, 0, rank, mesh)
    restored = ckpt.restore(like, rng.choice([None, newest]))
    stamp = int(restored[leaves[0].section, leaves[0].name])
    wrong = differences(restored, leaves, stamp, rank, mesh) + differences(like, leaves, 0, rank, mesh)
    if wrong or step_of(stamp) != newest:
        journal.write("wrong", f"step {newest}, restored with stamp {stamp}: {wrong}")
    journal.write("restored", stamp)
    return newest + 1


@dataclass
class Life:
    """One rank that saves."""

    plan: Plan
    life: int
    rank: int
    mesh: Any
    rng: Random
    journal: Journal
    ckpt: Checkpointer
    copies: bool
    phase: list[str]

    def __post_init__(self):
        self.attempt = 0
        self.pending: list[tuple[int, Any]] = []
        self.committed: int | None = None  # the newest
        self.states: dict[tuple[Leaf, ...], Any] = {}

    def save_steps(self, step: int) -> None:
        while True:
            self.phase[0] = "saving"
            try:
                step = self.save_one(step)
            except CheckpointError as error:
                self.journal.write("failed", one_line(error))
                self.drain()
                self.phase[0] = "agreeing"
                step = self.agree(step + 1)

    def save_one(self, step: int) -> int:
        """Save `step`, or the newest one again; the number of the next one."""
        again, waits, blocks = (self.rng.random() < share for share in (0.2, 0.5, 0.7))
        if again:
            self.finish()
            again = self.committed is not None
        chosen = step_of(self.committed) if again else step
        self.attempt += 1
        stamp = stamp_of(chosen, self.life, self.attempt)
        state = self.state(stamp)
        self.journal.write("began", stamp)
        save = self.ckpt.save(state, chosen, overwrite=again, block=blocks)
        self.pending.append((stamp, save))
        if not blocks:
            save.wait_staged()
        if waits:
            self.finish()
        return max(step, chosen + 1)

    def state(self, stamp: int):
        """The state of that save: the same tensors changed in place, if saving copies them."""
        leaves = self.plan.leaves_of(step_of(stamp))
        if self.copies and leaves in self.states:
            fill_(self.states[leaves], leaves, stamp, self.rank, self.mesh)
        else:
            self.states[leaves] = new_state(leaves, stamp, self.rank, self.mesh)
        return self.states[leaves]

    def finish(self) -> None:
        """Wait for all that is pending."""
        while self.pending:
            stamp, save = self.pending.pop(0)
            save.result()
            self.journal.write("committed", stamp, durable=True)
            self.committed = max(stamp, self.committed or 0)

    def drain(self) -> None:
        """Wait for all that is pending, whatever becomes of it."""
        while self.pending:
            with contextlib.suppress(CheckpointError):
                self.finish()
        with contextlib.suppress(CheckpointError):
            self.ckpt.wait()
        self.journal.write("drained")

    def agree(self, step: int) -> int:
        """Go on as all ranks do, from the largest `step` of all and the newest save that all know of."""
        if self.mesh is not None:
            numbers = torch.tensor([step, self.attempt, -(self.committed or 0)])
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            step, self.attempt, newest = numbers.tolist()
            self.committed = -newest or None
        self.rng = Random(f"{self.plan.seed} life {self.life} step {step}")
        return step


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " | ")
