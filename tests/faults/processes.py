"""Processes that save together: forks of one that has imported everything, and is never one of them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

DEATH_SIGNAL, SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


def adopt_orphans() -> None:
    """From now on what is left of a killed child is a child of this process."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def fork(work: Callable[[], object], log: Path) -> int:
    """Run it in a new process, which writes what went wrong to `log`; the pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # it must not outlive this process
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that have not ended."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def ended(pids: Iterable[int], seconds: float) -> bool:
    """Wait until these children have ended; whether they did within that time."""
    waiting, until = set(pids), time.monotonic() + seconds
    while True:
        waiting = {pid for pid in waiting if not _reaped(pid)}
        if not waiting or time.monotonic() > until:
            return not waiting
        time.sleep(0.002)


def join(rank: int, num_ranks: int, port_file: Path):
    """Make the process group of the ranks over 127.0.0.1, on a free port; their mesh."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.001)
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), num_ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    return init_device_mesh("cpu", (num_ranks,))


class Journal:
    """Lines that a process has written about itself, and that its death does not take back."""

    def __init__(self, path: Path):
        self.path = path
        self._file: int | None = None

    def write(self, word: str, about: object = "", *, durable: bool = False) -> None:
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, f"{time.monotonic():.6f} {word} {about}\n".encode())
        if durable:
            os.fsync(self._file)

    def read(self) -> list[tuple[float, str, str]]:
        """Moment (seconds), word and what it is about."""
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        parts = (line.split(" ", 2) for line in lines)
        return [(float(moment), word, about) for moment, word, about in parts]


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # reaped before
        return True
