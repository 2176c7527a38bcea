"""Every damage of a file is found, named and survived."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.faults.checkpoint import damage_table
from tests.faults.damages import KINDS, STEPS, draw_changes, unfound, write
from tests.faults.life import Plan
from tests.faults.states import draw_leaves, new_state, stamp_of
from veofunc.checkpoint import async_checkpointer

ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
@pytest.mark.parametrize("damages", ["64", pytest.param("400", marks=pytest.mark.slow)])
def test_every_damage_is_found_named_and_survived(damages, tmp_path):
    options = ["--kills", "0", "--damages", damages, "--ranks", "1,2", "--directory", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.faults", "checkpoint", *options],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    half = int(damages) // 2
    assert run.stdout.split("\n")[-2].split() == f"all {half} of {half} {half} of {half}".split()
    assert list(tmp_path.iterdir()) == []


class TestHarness:
    """A damage that is not found, not named or not survived is seen."""

    @pytest.fixture
    def plan(self, tmp_path):
        leaves = draw_leaves(Random(0), largest=1 << 10)
        return Plan(0, tmp_path, 1, False, leaves, False, None)

    @pytest.fixture
    def ckpt(self, plan):
        with async_checkpointer(new_state(plan.leaves, 0), plan.directory) as ckpt:
            for step in STEPS:
                ckpt.save(new_state(plan.leaves, stamp_of(step, 0, 0)), step)
            ckpt.wait()
            yield ckpt

    @pytest.fixture
    def steps(self, plan, ckpt):
        return {step: plan.directory / f"step_{step}" for step in STEPS}

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_changes_a_file_and_can_be_undone(self, kind, plan, ckpt, steps):
        rng = Random(0)
        for _ in range(20):
            changes = draw_changes(kind, rng, steps)
            originals = {file: file.read_bytes() for file in changes}
            assert changes and all(changes[file] != originals[file] for file in changes)
            write(changes)
            assert all(changes[file] == (file.read_bytes() if file.exists() else None) for file in changes)
            write(originals)
        for step in STEPS:
            ckpt.verify(step)

    def test_no_damage_is_no_find(self, plan, ckpt, steps):
        file = steps[3] / "model" / ".metadata"
        misses = unfound(plan, ckpt, {file: file.read_bytes()})
        said = ["skips [3]", "does not give step 2", "verify(3) accepts it", "restore(like, 3) accepts it"]
        assert len(misses) == len(said)
        assert all(part in miss for part, miss in zip(said, misses, strict=True))

    def test_an_error_that_names_another_file_is_no_find(self, plan, ckpt, steps):
        file, other = steps[3] / "model" / ".metadata", steps[3] / "rest" / ".metadata"
        content = file.read_bytes()
        file.unlink()
        misses = unfound(plan, ckpt, {other: None})
        file.write_bytes(content)
        assert ["names no file" in miss for miss in misses] == [True, True]

    def test_a_checkpointer_that_changes_the_state_is_seen(self, plan, ckpt, steps):
        class Careless:
            verify = ckpt.verify

            def restore(self, like, step=None):
                like["model", "model_w0"].add_(1)
                return ckpt.restore(like, step)

        file = steps[3] / "model" / ".metadata"
        content = file.read_bytes()
        file.unlink()
        misses = unfound(plan, Careless(), {file: None})
        file.write_bytes(content)
        assert len(misses) == 1 and "the state was changed: ['model_w0']" in misses[0]

    def test_the_table_shows_what_was_missed(self):
        tried = {1: Counter({"bit flip": 3, "deletion": 2})}
        table = damage_table(tried, {1: Counter({"bit flip": 2, "deletion": 2})})
        assert "2 of 3" in table and table.splitlines()[-1].split() == ["all", "4", "of", "5"]
