"""Ranks that each see a part of the data equal one that sees all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def run_ranks(name: str, directory: Path, world_size: int = 2) -> None:
    """Runs the checks of `ranks.py` called `name` in so many processes, and fails with their output."""
    script = Path(__file__).with_name("ranks.py")
    command = [sys.executable, "-W", "error", str(script), name, str(directory / "rendezvous")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=script.parents[2],
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), "\n".join(outputs)
    assert all(f"{name} passed" in output for output in outputs), outputs


def test_two_ranks_equal_one(tmp_path):
    run_ranks("sums", tmp_path)


@pytest.mark.parametrize("world_size", [2, 4])
def test_channel_sums_of_data_and_sequence_parallel_ranks_equal_one(tmp_path, world_size):
    run_ranks("channel", tmp_path, world_size)


def test_swapped_parameters_of_fsdp2_are_refused(tmp_path):
    run_ranks("fsdp", tmp_path)
