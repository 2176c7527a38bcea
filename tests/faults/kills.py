"""Processes killed while they save, and what is on disk then."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from tests.faults import processes
from tests.faults.life import TIMEOUT, Plan, draw_plan, live
from tests.faults.processes import Journal
from tests.faults.verdict import Fault, check, judge

LIVES = 8  # processes that save to a directory, one after the other, before a new one is begun
SHARE_WATCHED = 0.1  # of the kills of one of several ranks, after which the others must notice
MOMENTS = ("any", "any", "any", "starting", "unfinished", "data", "manifest", "shown")


@dataclass
class Tally:
    """What became of the kills of one number of processes."""

    kills: int = 0
    saves: int = 0  # whose success was reported before the kill
    victims: Counter = field(default_factory=Counter)
    moments: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    noticed: int = 0  # kills after which the survivors were given the time to notice


@dataclass
class Run:
    """The directory that one life after another saves to.

    Attributes:
        plan: what the lives have in common.
        root: holds the directory, the journals and what the processes have printed.
        patience: seconds without progress after which a process counts as hanging.
        committed: step to the newest stamp of it whose success was reported.
    """

    plan: Plan
    root: Path
    patience: float
    committed: dict[int, int] = field(default_factory=dict)


def kill_often(
    kills: int, seed: int, ranks: tuple[int, ...], root: Path, patience: float, tick: Callable[[], None]
) -> tuple[dict[int, Tally], list[str]]:
    """Kill that often, by turns with each number of processes; tallies by it, and evidence of faults."""
    rng = Random(seed)
    tallies = {num_ranks: Tally() for num_ranks in ranks}
    paces: dict[int, list[float]] = {num_ranks: [0.05] for num_ranks in ranks}
    evidence: list[str] = []
    index = 0
    while sum(tally.kills for tally in tallies.values()) < kills:
        num_ranks = ranks[index % len(ranks)]
        where = root / f"run_{index}"
        where.mkdir(parents=True)
        run = Run(draw_plan(seed + index, num_ranks, where / "steps"), where, patience)
        found: list[str] = []
        for life in range(LIVES):
            if found or sum(tally.kills for tally in tallies.values()) == kills:
                break  # what was found stays as it is
            found = kill_once(run, life, rng, paces[num_ranks], tallies[num_ranks])
            tick()
        evidence += found
        if not found:
            shutil.rmtree(where)
        index += 1
    return tallies, evidence


def kill_once(run: Run, life: int, rng: Random, pace: list[float], tally: Tally) -> list[str]:
    """Start the ranks, kill, and check what is there then; the faults found."""
    faults: list[Fault] = []
    moment = rng.choice(MOMENTS)
    journals = [Journal(run.root / f"life_{life}_rank_{rank}.journal") for rank in range(run.plan.num_ranks)]
    pids = start(run, life, journals)
    if await_moment(run, moment, journals, rng, pace):
        struck = strike(pids, journals, rng)
        faults += aftermath(run, struck, journals, rng, tally)
    else:
        struck = Strike("all", time.monotonic(), [])
        faults.append(("hangs", f"nothing was saved: {[j.read()[-1:] for j in journals]}"))
    faults += end(run, pids)
    faults += judge(journals, struck.moment, run.committed)
    faults += check_in_a_fork(run, life)
    pace += durations(journals)
    del pace[:-50]
    tally.kills += 1
    tally.saves += sum(word == "committed" for _, word, _ in journals[0].read())
    tally.victims[struck.victim] += 1
    tally.moments[moment] += 1
    tally.faults.update({kind for kind, _ in faults})
    return [
        f"{kind}: {what} (in {run.root}, life {life}, {run.plan.num_ranks} processes, "
        f"{struck.victim} killed at {moment!r})"
        for kind, what in faults
    ]


def start(run: Run, life: int, journals: list[Journal]) -> list[int]:
    port = run.root / f"life_{life}.port"
    return [
        processes.fork(
            lambda rank=rank, journal=journal: live(run.plan, life, rank, journal, port),
            run.root / f"life_{life}_rank_{rank}.log",
        )
        for rank, journal in enumerate(journals)
    ]


def await_moment(run: Run, moment: str, journals: list[Journal], rng: Random, pace: list[float]) -> bool:
    """Return when it is time to kill; False if no save has begun by then."""
    if moment == "starting":
        time.sleep(rng.uniform(0, 0.15))
        return True
    if not wait_until(lambda: any(said(journal, "began", "error") for journal in journals), run.patience):
        return False
    if moment == "any":
        time.sleep(rng.uniform(0, 6 * statistics.median(pace)))
    else:
        for _ in range(rng.choice([1, 1, 2, 4])):
            before = signs(run.plan.directory)
            wait_until(partial(_is_new, moment, before, run.plan.directory), 2.0, pause=0.0)
        time.sleep(rng.choice([0.0, 0.0, rng.uniform(0, 0.003)]))
    return True


def signs(directory: Path) -> set[tuple[str, str, int]]:
    """What of a save can be seen from outside: kind, name, and what tells it from another of that name."""
    seen = set()
    try:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            unfinished = entry.name.startswith(".unfinished-")
            seen.add(("unfinished" if unfinished else "shown", entry.name, entry.inode()))
            if unfinished:
                for name in _files(Path(entry.path)):
                    seen.add(("manifest" if name == "manifest.json" else "data", f"{entry.name}/{name}", 0))
    except OSError:  # it was renamed meanwhile
        pass
    return seen


@dataclass(frozen=True)
class Strike:
    """What was killed ("one" rank, one "writer" of a rank, "all" ranks), when, and which ranks survive."""

    victim: str
    moment: float
    survivors: list[Journal]


def strike(pids: list[int], journals: list[Journal], rng: Random) -> Strike:
    """Kill one rank, one writer or all."""
    writers = [child for pid in pids for child in processes.children(pid)]
    victim = rng.choice(["one", "one", "all", "writer"])
    if victim == "writer" and not writers:
        victim = "one"
    among = writers if victim == "writer" else pids
    chosen = rng.sample(among, len(among) if victim == "all" else 1)
    survivors = [journal for pid, journal in zip(pids, journals, strict=True) if pid not in chosen]
    moment = time.monotonic()
    processes.kill(chosen)
    return Strike(victim, moment, survivors)


def aftermath(run: Run, struck: Strike, journals: list[Journal], rng: Random, tally: Tally) -> list[Fault]:
    """Give the others some time: if a writer was killed to save again, else to notice, now and then."""
    survivors, since = struck.survivors, struck.moment
    if struck.victim == "writer":
        return _slow(survivors, lambda own: saves_again(own, since), run.patience, "saves no more")
    if survivors and all(said(own, "began") for own in journals) and rng.random() < SHARE_WATCHED:
        tally.noticed += 1
        seconds = TIMEOUT + run.patience
        return _slow(survivors, lambda own: said(own, "drained", "error", after=since), seconds, "goes on")
    if survivors:
        time.sleep(rng.uniform(0, 0.1))
    return []


def end(run: Run, pids: list[int]) -> list[Fault]:
    """End the ranks; their writers must end by themselves."""
    processes.kill(pid for pid in pids if not _has_ended(pid))
    faults = []
    if not processes.ended(pids, run.patience):
        faults.append(("hangs", f"of {pids} not all have ended"))
    orphans = processes.children(os.getpid())
    if not processes.ended(orphans, run.patience):
        faults.append(("hangs", f"writers outlive their ranks: {orphans}"))
        processes.kill(processes.children(os.getpid()))
        processes.ended(orphans, run.patience)
    return faults


def check_in_a_fork(run: Run, life: int) -> list[Fault]:
    """`check` in a process of its own."""
    result = run.root / f"life_{life}.result"
    log = run.root / f"life_{life}_check.log"
    pid = processes.fork(lambda: result.write_text(json.dumps(check(run.plan, run.committed))), log)
    if not processes.ended([pid], run.patience):
        processes.kill([pid])
        processes.ended([pid], run.patience)
        return [("hangs", f"the restart: {_text(log)}")]
    if not result.exists():
        return [("half seen", f"the restart fails: {_text(log)}")]
    return [(kind, what) for kind, what in json.loads(result.read_text())]


def durations(journals: list[Journal]) -> list[float]:
    """How many seconds saves took from their begin to their report."""
    began, taken = {}, []
    for moment, word, about in journals[0].read():
        if word == "began":
            began[about] = moment
        elif word == "committed":
            taken.append(moment - began[about])
    return taken


def saves_again(journal: Journal, killed: float) -> bool:
    """Whether a save that began after the kill has succeeded; True too if the rank has given up."""
    lines = journal.read()
    began = {about for moment, word, about in lines if word == "began" and moment > killed}
    return any(word == "error" or (word == "committed" and about in began) for _, word, about in lines)


def said(journal: Journal, *words: str, after: float = 0.0) -> bool:
    return any(word in words and moment > after for moment, word, _ in journal.read())


def _slow(
    journals: list[Journal], is_done: Callable[[Journal], bool], seconds: float, what: str
) -> list[Fault]:
    """Those of which it is not true in time."""
    waited = [(journal, wait_until(partial(is_done, journal), seconds)) for journal in journals]
    return [("hangs", f"{own.path.name} {what}: {own.read()[-3:]}") for own, done in waited if not done]


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.001) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True


def _is_new(moment: str, before: set, directory: Path) -> bool:
    return any(kind == moment for kind, *_ in signs(directory) - before)


def _files(directory: Path) -> list[str]:
    return [str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()]


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _has_ended(pid: int) -> bool:
    """Whether that child has, without reaping it."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, flags) is not None
