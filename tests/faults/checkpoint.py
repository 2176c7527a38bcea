"""Checkpoints of processes that are killed while they save, and of files that are damaged afterwards."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tqdm import tqdm

from tests.faults import processes
from tests.faults.damages import KINDS, damage_often
from tests.faults.kills import MOMENTS, Tally, kill_often
from tests.faults.verdict import FAULTS

SHOWN = 20  # faults that are printed


def run(
    kills: int = 1000,
    damages: int = 1000,
    seed: int = 0,
    ranks: str = "1,2,4",
    directory: str = "",
    patience: float = 60.0,
) -> tuple[str, bool]:
    """Kill and damage that often.

    Args:
        kills: how often processes that save are killed.
        damages: how often a file of a good step is damaged.
        seed: of all that is drawn.
        ranks: how many processes save together, by turns; at most two of them for damages.
        directory: where the steps go, on the file system to be tried; by default a temporary one.
        patience: seconds without progress after which a process counts as hanging.

    Returns:
        The tables, and whether everything was as it must be.
    """
    numbers = tuple(int(number) for number in ranks.split(","))
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="faults-", dir=directory or None))
    processes.adopt_orphans()
    tqdm.monitor_interval = 0  # its thread would be in the way of forks
    tables, evidence = [], []
    if kills:
        with tqdm(total=kills, desc="kills", mininterval=1.0) as bar:
            tallies, found = kill_often(kills, seed, numbers, root, patience, bar.update)
        tables.append(kill_table(tallies))
        evidence += found
    if damages:
        few = tuple(number for number in numbers if number <= 2) or numbers[:1]
        with tqdm(total=damages, desc="damages", mininterval=1.0) as bar:
            tried, counted, missed = damage_often(damages, seed, few, root, patience, bar.update)
        tables.append(damage_table(tried, counted))
        evidence += missed
    if evidence:
        (root / "evidence.txt").write_text("\n".join(evidence))
        shown = "\n".join(evidence[:SHOWN])
        return "\n\n".join([*tables, shown, f"{len(evidence)} faults, all in {root}/evidence.txt"]), False
    shutil.rmtree(root)
    return "\n\n".join(tables), True


def kill_table(tallies: dict[int, Tally]) -> str:
    """One row for each number of processes."""
    head = [
        "processes",
        "kills",
        "one",
        "all",
        "writer",
        *dict.fromkeys(MOMENTS),
        "noticed",
        "saves",
        *FAULTS,
    ]
    rows = [
        [
            number,
            tally.kills,
            *(tally.victims[victim] for victim in ("one", "all", "writer")),
            *(tally.moments[moment] for moment in dict.fromkeys(MOMENTS)),
            tally.noticed,
            tally.saves,
            *(tally.faults[fault] for fault in FAULTS),
        ]
        for number, tally in tallies.items()
    ]
    return _table([head, *rows, ["all", *map(sum, zip(*(row[1:] for row in rows), strict=True))]])


def damage_table(tried: dict, found: dict) -> str:
    """One row for each kind of damage, and how many were found of those tried for each number of ranks."""
    head = ["damage", *(f"found, {number} ranks" for number in tried)]
    rows = [
        [kind, *(f"{found[number][kind]} of {tried[number][kind]}" for number in tried)] for kind in KINDS
    ]
    totals = ["all", *(f"{found[number].total()} of {tried[number].total()}" for number in tried)]
    return _table([head, *rows, totals])


def _table(rows: list[list]) -> str:
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    return "\n".join(lines)
