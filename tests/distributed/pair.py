"""Checks that two processes run together, from a test file that is also the script of each."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


def run_checks(checks: Mapping[str, Callable[[], object]], rank: int, directory: Path) -> None:
    """Runs them up to the first that fails: after it the ranks may wait for each other. Writes results."""
    results = {}
    for name, check in checks.items():
        try:
            check()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
            break
    (directory / f"results_{rank}.json").write_text(json.dumps(results))


def run_on_two_ranks(script: str, directory: Path) -> None:
    """Runs `python script RANK directory` in two processes; ends them."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", script, str(rank), str(directory)], env=environment)
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.wait(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def what_failed(name: str, rank: int, directory: Path) -> str:
    """What failed in that check on that rank; empty if nothing did."""
    results = json.loads((directory / f"results_{rank}.json").read_text())
    return results.get(name, f"not reached, after {list(results)}")
