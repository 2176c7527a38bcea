"""Files of a good step damaged, one way after the other, and whether each damage is found."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random

import torch.distributed as dist

from tests.faults import processes
from tests.faults.kills import wait_until
from tests.faults.life import TIMEOUT, Plan, one_line
from tests.faults.processes import Journal
from tests.faults.states import differences, draw_leaves, new_state, stamp_of
from veofunc.checkpoint import CheckpointError, async_checkpointer

STEPS = (1, 2, 3)
PAGE = 4096

Changes = dict[Path, bytes | None]  # file to what it holds then; None: it is gone


def flip_a_bit(rng: Random, steps: Mapping[int, Path]) -> Changes:
    file = _any_file(rng, steps[3])
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return {file: bytes(content)}


def truncate(rng: Random, steps: Mapping[int, Path]) -> Changes:
    file = _any_file(rng, steps[3])
    content = file.read_bytes()
    return {file: content[: rng.choice([0, len(content) - 1, rng.randrange(len(content))])]}


def delete(rng: Random, steps: Mapping[int, Path]) -> Changes:
    return {_any_file(rng, steps[3]): None}


def swap_between_steps(rng: Random, steps: Mapping[int, Path]) -> Changes:
    file = _any_file(rng, steps[3])
    other = steps[2] / file.relative_to(steps[3])
    return _swap(file, other) if other.exists() else {}


def swap_within_a_step(rng: Random, steps: Mapping[int, Path]) -> Changes:
    return _swap(_any_file(rng, steps[3]), _any_file(rng, steps[3]))


def take_from_an_older_step(rng: Random, steps: Mapping[int, Path]) -> Changes:
    file = _any_file(rng, steps[3])
    other = steps[rng.choice([1, 2])] / file.relative_to(steps[3])
    return {file: other.read_bytes()} if other.exists() else {}


def zero_a_page(rng: Random, steps: Mapping[int, Path]) -> Changes:
    file = _any_file(rng, steps[3])
    content = file.read_bytes()
    start = rng.randrange(0, len(content), PAGE)
    page = content[start : start + PAGE]
    return {file: content[:start] + bytes(len(page)) + content[start + PAGE :]}


def append(rng: Random, steps: Mapping[int, Path]) -> Changes:
    file = _any_file(rng, steps[3])
    return {file: file.read_bytes() + rng.choice([b"\n", b"\0", rng.randbytes(rng.randint(1, 5000))])}


KINDS: dict[str, Callable[[Random, Mapping[int, Path]], Changes]] = {
    "bit flip": flip_a_bit,
    "truncation": truncate,
    "deletion": delete,
    "swap between steps": swap_between_steps,
    "swap within a step": swap_within_a_step,
    "file of an older step": take_from_an_older_step,
    "page of zeros": zero_a_page,
    "appended bytes": append,
}


def draw_changes(kind: str, rng: Random, steps: Mapping[int, Path]) -> Changes:
    """A damage of that kind that changes at least one byte; only what it changes."""
    while True:
        changes = KINDS[kind](rng, steps)
        changes = {file: content for file, content in changes.items() if content != file.read_bytes()}
        if changes:
            return changes


def damage_often(
    damages: int, seed: int, ranks: tuple[int, ...], root: Path, patience: float, tick: Callable[[], None]
) -> tuple[dict[int, Counter], dict[int, Counter], list[str]]:
    """As many damages, shared between steps saved by each number of ranks.

    Returns:
        By number of ranks, how many of each kind were tried and how many found; what was missed.
    """
    tried, found, missed = {}, {}, []
    for index, num_ranks in enumerate(ranks):
        share = damages * (index + 1) // len(ranks) - damages * index // len(ranks)
        where = root / f"damages_{num_ranks}"
        where.mkdir(parents=True)
        leaves = draw_leaves(Random(f"damages {seed} {num_ranks}"), largest=1 << 14)
        plan = Plan(seed, where / "steps", num_ranks, num_ranks > 1, leaves, False, None)
        results = _damage_in_forks(plan, share, where, patience, tick)
        tried[num_ranks] = Counter(kind for kind, _ in results)
        found[num_ranks] = Counter(kind for kind, misses in results if not misses)
        missed += [f"{kind}: {what} ({num_ranks} ranks)" for kind, misses in results for what in misses]
        if len(results) < share:
            logs = "".join(log.read_text() for log in sorted(where.glob("*.log")))
            missed.append(f"only {len(results)} of {share} damages were tried ({num_ranks} ranks): {logs}")
    return tried, found, missed


def damage_steps(plan: Plan, damages: int, rank: int, journal: Journal, port_file: Path) -> None:
    """What each rank does: save good steps, then damage (rank 0), restore, undo, as often."""
    mesh = processes.join(rank, plan.num_ranks, port_file) if plan.has_group else None
    like = new_state(plan.leaves, 0, rank, mesh)
    with open_steps(plan, like) as ckpt:
        for step in STEPS:
            ckpt.save(new_state(plan.leaves, stamp_of(step, 0, 0), rank, mesh), step).result()
    steps = {step: plan.directory / f"step_{step}" for step in STEPS}
    rng = Random(plan.seed)
    for kind in itertools.islice(itertools.cycle(KINDS), damages):
        changes = draw_changes(kind, rng, steps)
        originals = {file: file.read_bytes() for file in changes}
        _barrier(mesh)
        if rank == 0:
            write(changes)
        _barrier(mesh)
        with open_steps(plan, like) as ckpt:  # a new one, which does not remember earlier damages
            misses = unfound(plan, ckpt, changes, rank, mesh)
        misses = _of_all_ranks([f"rank {rank}: {what}" for what in misses], mesh)
        if rank == 0:
            write(originals)
            journal.write("tried", f"{kind}\t" + "\t".join(misses))
        _barrier(mesh)


def open_steps(plan: Plan, like):
    options = {"slots": {"ema": ["ema"]}, "files_per_rank": 2, "timeout": 10 * TIMEOUT}
    return async_checkpointer(like, plan.directory, **options)


def write(files: Changes) -> None:
    """Through new files, so that what else has a link to the old ones keeps it."""
    for file, content in files.items():
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)


def unfound(plan: Plan, ckpt, changes: Changes, rank: int = 0, mesh=None) -> list[str]:
    """In which way the damage is not found, or not said, or does harm."""
    like = new_state(plan.leaves, 0, rank, mesh)
    damaged: dict[int, list[str]] = {}
    for file in changes:
        name = file.relative_to(plan.directory)
        damaged.setdefault(int(name.parts[0].removeprefix("step_")), []).append("/".join(name.parts[1:]))
    about = ", ".join(map(str, changes))
    misses = _falls_back_wrongly(plan, ckpt, like, damaged, rank, mesh)  # first: before it is told which
    for step, names in damaged.items():
        misses += _accepts(f"verify({step})", lambda step=step: ckpt.verify(step), names)
        misses += _accepts(f"restore(like, {step})", lambda step=step: ckpt.restore(like, step), names)
    touched = differences(like, plan.leaves, 0, rank, mesh)
    misses += [f"the state was changed: {touched}"] if touched else []
    return [f"{about}: {miss}" for miss in misses]


def _accepts(call: str, work: Callable[[], object], names: list[str]) -> list[str]:
    """Whether it goes through although files are damaged, or fails without naming one."""
    try:
        work()
    except CheckpointError as error:
        return [] if any(name in str(error) for name in names) else [f"{call} names no file: {error}"]
    except Exception as error:  # another kind of error is a fault, not the end
        return [f"{call} raises {one_line(error)}"]
    return [f"{call} accepts it"]


def _falls_back_wrongly(plan: Plan, ckpt, like, damaged: Mapping[int, object], rank: int, mesh) -> list[str]:
    """How `restore(like)` fails to give the newest good step, and to warn (rank 0) of those it skips."""
    good = max(step for step in STEPS if step not in damaged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            restored = ckpt.restore(like)
        except Exception as error:  # it must not fail, whatever it is
            return [f"restore(like) raises {one_line(error)}"]
    texts = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    silent = [step for step in damaged if not any(f"step {step}" in text for text in texts)]
    misses = [f"restore(like) skips {silent} and says only {texts}"] if silent and rank == 0 else []
    wrong = differences(restored, plan.leaves, stamp_of(good, 0, 0), rank, mesh)
    return misses + ([f"restore(like) does not give step {good}: {wrong}"] if wrong else [])


def _damage_in_forks(
    plan: Plan, damages: int, where: Path, patience: float, tick
) -> list[tuple[str, list[str]]]:
    """Each kind tried, with what was missed."""
    journals = [Journal(where / f"rank_{rank}.journal") for rank in range(plan.num_ranks)]
    pids = [
        processes.fork(
            lambda rank=rank, own=own: damage_steps(plan, damages, rank, own, where / "port"),
            where / f"rank_{rank}.log",
        )
        for rank, own in enumerate(journals)
    ]
    num_seen = 0
    while wait_until(partial(_has_more, journals[0], num_seen, pids), patience):
        new = len(journals[0].read()) - num_seen
        if not new:
            break
        for _ in range(new):
            tick()
        num_seen += new
    if not processes.ended(pids, min(patience, 5.0)):
        processes.kill(pids)
        processes.ended(pids, patience)
    lines = [about.split("\t") for _, _, about in journals[0].read()]
    return [(kind, [miss for miss in misses if miss]) for kind, *misses in lines]


def _has_more(journal: Journal, num_seen: int, pids: list[int]) -> bool:
    return len(journal.read()) > num_seen or not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _any_file(rng: Random, step: Path) -> Path:
    return rng.choice(sorted(file for file in step.rglob("*") if file.is_file()))


def _swap(one: Path, other: Path) -> Changes:
    return {one: other.read_bytes(), other: one.read_bytes()}


def _barrier(mesh) -> None:
    if mesh is not None:
        dist.barrier()


def _of_all_ranks(misses: list[str], mesh) -> list[str]:
    if mesh is None:
        return misses
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, misses)
    return [miss for own in gathered for miss in own]
