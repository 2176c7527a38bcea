"""Limits of the operating system, for tests of what happens at them."""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest


@contextlib.contextmanager
def largest_file(nbytes: int) -> Generator[None]:
    """While the block runs, no file grows beyond `nbytes`: a real "File too large".

    That goes for files of this process, and of those that it has started before or starts meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    _limit((nbytes, hard))
    try:
        yield
    finally:
        _limit((soft, hard))


def _limit(limits: tuple[int, int]) -> None:
    for process in (os.getpid(), *children()):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_FSIZE, limits)


def children() -> list[int]:
    """The processes that this one has started."""
    found = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    return [int(process) for processes in found for process in processes]


@contextlib.contextmanager
def small_disk(directory: Path, nbytes: int) -> Generator[Path]:
    """While the block runs, `directory` is a disk of `nbytes`: a real "No space left on device"."""
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", directory], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
