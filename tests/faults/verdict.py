"""What must hold after processes were killed: by what they reported, what is on disk, and a restart."""

from __future__ import annotations

import warnings
from random import Random

from tests.faults.life import Plan, checkpointer, one_line
from tests.faults.processes import Journal
from tests.faults.reader import look
from tests.faults.states import differences, new_state, step_of
from veofunc.checkpoint import CheckpointError

FAULTS = ("torn", "lost", "half seen", "leftovers", "hangs", "errors")

Fault = tuple[str, str]  # which of FAULTS, and the evidence


def judge(journals: list[Journal], killed: float, committed: dict[int, int]) -> list[Fault]:
    """What the ranks have reported: successes into `committed`; failures that should not have been."""
    faults = []
    for rank, journal in enumerate(journals):
        for moment, word, about in journal.read():
            if word == "committed":
                step = step_of(int(about))
                committed[step] = max(int(about), committed.get(step, 0))
            elif word == "wrong":
                faults.append(("half seen", f"rank {rank}: {about}"))
            elif (word == "failed" and moment < killed) or (
                word == "error" and (moment < killed or about.startswith("saving"))
            ):
                faults.append(("errors", f"rank {rank}, {moment - killed:+.3f} s from the kill: {about}"))
    return faults


def check(plan: Plan, committed: dict[int, int]) -> list[Fault]:
    """What is wrong with the directory, as a process that starts now finds it."""
    if not plan.directory.exists():
        return [("lost", "the directory")] if committed else []
    before = look(plan.directory, plan.leaves_of, plan.num_ranks)
    with checkpointer(plan, new_state(plan.leaves, 0), Random(0)) as ckpt:
        after = look(plan.directory, plan.leaves_of, plan.num_ranks)
        faults = [("torn", what) for what in dict.fromkeys(before.torn + after.torn)]
        faults += [("leftovers", name) for name in after.leftovers]
        faults += [("lost", what) for what in lost(after.stamps, committed, plan.keep_last)]
        faults += [("half seen", what) for what in half_seen(plan, ckpt, after.stamps)]
    return faults


def lost(there: dict[int, int], committed: dict[int, int], keep_last: int | None) -> list[str]:
    """Which of the committed steps are neither there, as new as reported, nor rightly removed."""
    kept = sorted(there.keys() | committed.keys())[-keep_last if keep_last else None :]
    found = []
    for step, stamp in committed.items():
        if step in there and there[step] < stamp:
            found.append(f"step {step} has stamp {there[step]}, {stamp} was reported")
        elif step in kept and step not in there:
            found.append(f"step {step} is gone, there are {sorted(there)}")
    return found


def half_seen(plan: Plan, ckpt, there: dict[int, int]) -> list[str]:
    """How what the checkpointer gives differs from what is there."""
    newest = max(there, default=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that another number of ranks has saved it
        warnings.filterwarnings("error", "(?s).*skipped", RuntimeWarning)
        try:
            if ckpt.latest() != newest or ckpt.steps() != tuple(sorted(there)):
                return [f"there are {sorted(there)}, latest() is {ckpt.latest()}, steps() {ckpt.steps()}"]
            if newest is None:
                return []
            ckpt.verify(newest)
            leaves = plan.leaves_of(newest)
            wrong = differences(ckpt.restore(new_state(leaves, 0)), leaves, there[newest])
        except (CheckpointError, RuntimeWarning) as error:
            return [one_line(error)]
    return [f"step {newest} restores {', '.join(wrong)} wrongly"] if wrong else []
