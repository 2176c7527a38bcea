"""Processes killed while they save lose nothing that was reported, and show nothing half."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.faults.life import Plan
from tests.faults.processes import Journal
from tests.faults.states import draw_leaves, new_state, stamp_of
from tests.faults.verdict import FAULTS, check, judge, lost
from veofunc.checkpoint import async_checkpointer

ROOT = Path(__file__).parents[2]


def run_command(*options: str, timeout: float = 600) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", "-m", "tests.faults", "checkpoint", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment)


def counts_in(table: str) -> dict[str, str]:
    """The last row of a table of kills."""
    head, *_, last = table.split("\n\n")[0].strip().splitlines()
    return dict(zip(re.split(r"  +", head.strip()), re.split(r"  +", last.strip()), strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kills", "ranks"), [("25", "1,2"), pytest.param("150", "1,2,4", marks=pytest.mark.slow)]
)
def test_killed_at_any_moment_nothing_is_torn_or_lost(kills, ranks, tmp_path):
    run = run_command("--kills", kills, "--damages", "0", "--ranks", ranks, "--directory", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    counts = counts_in(run.stdout)
    assert counts["kills"] == kills and int(counts["saves"]) > 0
    assert [counts[fault] for fault in FAULTS] == ["0"] * len(FAULTS)
    assert list(tmp_path.iterdir()) == []


class TestHarness:
    """What it must find is found: each fault, made on purpose, is counted as what it is."""

    @pytest.fixture
    def plan(self, tmp_path):
        leaves = draw_leaves(Random(0), largest=1 << 10)
        return Plan(0, tmp_path / "steps", 1, False, leaves, False, None)

    @pytest.fixture
    def committed(self, plan):
        """Two good steps, as the harness knows them."""
        for step in (1, 2):
            self.save(plan, step, new_state(plan.leaves, stamp_of(step, 0, 1)))
        return {step: stamp_of(step, 0, 1) for step in (1, 2)}

    def save(self, plan, step, state):
        with async_checkpointer(state, plan.directory) as ckpt:
            ckpt.save(state, step)

    def faults(self, plan, committed):
        return {kind for kind, _ in check(plan, committed)}

    def test_finds_no_fault_where_there_is_none(self, plan, committed):
        assert check(plan, committed) == []

    @pytest.mark.parametrize("index", range(12))
    def test_counts_one_tensor_of_another_step_as_torn(self, plan, committed, index):
        mixed = new_state(plan.leaves, stamp_of(3, 0, 1))
        other = new_state(plan.leaves, stamp_of(2, 0, 1))
        leaf = plan.leaves[index % len(plan.leaves)]
        mixed[leaf.section, leaf.name] = other[leaf.section, leaf.name]
        self.save(plan, 3, mixed)
        assert self.faults(plan, committed) == {"torn", "half seen"}

    def test_counts_one_value_of_another_save_of_the_step_as_torn(self, plan, committed):
        mixed = new_state(plan.leaves, stamp_of(3, 0, 1))
        mixed.set_non_tensor(("model", "progress"), {"stamp": stamp_of(3, 0, 2)})
        self.save(plan, 3, mixed)
        assert "torn" in self.faults(plan, committed)

    def test_counts_a_missing_tensor_as_torn(self, plan, committed):
        half = new_state(plan.leaves[:-1], stamp_of(3, 0, 1))
        self.save(plan, 3, half)
        assert "torn" in self.faults(plan, committed)

    def test_counts_values_of_another_step_as_torn(self, plan, committed):
        self.save(plan, 3, new_state(plan.leaves, stamp_of(2, 0, 1)))
        assert "torn" in self.faults(plan, committed)

    def test_counts_a_file_that_differs_from_the_manifest_as_torn(self, plan, committed):
        file = max((plan.directory / "step_2").rglob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])
        assert "torn" in self.faults(plan, committed)

    def test_counts_a_step_without_a_manifest_as_torn(self, plan, committed):
        (plan.directory / "step_2" / "manifest.json").unlink()
        assert "torn" in self.faults(plan, committed)

    @pytest.mark.parametrize("step", [1, 2])
    def test_counts_a_removed_step_as_lost(self, plan, committed, step):
        shutil.rmtree(plan.directory / f"step_{step}")
        assert self.faults(plan, committed) == {"lost"}

    def test_counts_a_save_that_an_older_one_of_its_step_has_outlived_as_lost(self, plan, committed):
        assert self.faults(plan, committed | {2: stamp_of(2, 0, 2)}) == {"lost"}

    def test_counts_a_directory_that_is_gone_as_lost(self, plan, committed):
        shutil.rmtree(plan.directory)
        assert self.faults(plan, committed) == {"lost"}

    def test_counts_what_is_no_step_as_leftover(self, plan, committed):
        (plan.directory / "stray").write_text("")
        assert self.faults(plan, committed) == {"leftovers"}

    @pytest.mark.parametrize(
        ("there", "keep_last", "num_lost"),
        [
            ((1, 2, 3), None, 0),
            ((2, 3), None, 1),
            ((2, 3), 2, 0),
            ((3,), 2, 1),
            ((2,), 1, 1),
            ((4,), 1, 0),
            ((), 1, 1),
        ],
    )
    def test_a_step_is_lost_unless_enough_newer_ones_are_there(self, there, keep_last, num_lost):
        committed = {step: stamp_of(step, 0, 1) for step in (1, 2, 3)}
        stamps = {step: stamp_of(step, 0, 1) for step in there}
        assert len(lost(stamps, committed, keep_last)) == num_lost

    @pytest.mark.parametrize(
        ("word", "about", "moment", "fault"),
        [
            ("wrong", "step 2", "before", "half seen"),
            ("failed", "disk full", "before", "errors"),
            ("failed", "rank 1 is gone", "after", None),
            ("error", "saving: KeyError", "after", "errors"),
            ("error", "restoring: the other has gone", "after", None),
            ("error", "restoring: KeyError", "before", "errors"),
        ],
    )
    def test_reports_of_the_ranks_are_judged(self, word, about, moment, fault, tmp_path):
        journal = Journal(tmp_path / "journal")
        journal.write("began", 1_000_001)
        journal.write(word, about)
        journal.write("committed", 1_000_001, durable=True)
        written = journal.read()[1][0]
        committed = {}
        faults = judge([journal], written + (1 if moment == "before" else -1), committed)
        assert [kind for kind, _ in faults] == ([fault] if fault else [])
        assert committed == {1: 1_000_001}

    @pytest.mark.distributed
    def test_counts_processes_that_make_no_progress_in_time_as_hanging(self, tmp_path):
        options = ["--kills", "3", "--damages", "0", "--ranks", "1", "--patience", "0", "--directory"]
        run = run_command(*options, str(tmp_path))
        assert run.returncode == 1
        assert int(counts_in(run.stdout)["hangs"]) > 0
        assert re.search(r"^hangs: .*run_0, life 0, 1 processes", run.stdout, re.MULTILINE)
