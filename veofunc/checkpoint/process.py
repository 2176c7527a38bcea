"""The training process's end of a writer process."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from veofunc.checkpoint.manifest import FileRecord
from veofunc.checkpoint.writer import PACKET_BYTES, ItemPlace

__all__ = ["Arena", "WriterProcess"]

SCRIPT = Path(__file__).with_name("writer.py")


class Arena:
    """Memory shared with a writer process: one or more files as they are to be.

    Args:
        images: for each file its size in bytes and the places of its items, as `writer.py` takes them.
        pin: whether an accelerator shall copy into it without a detour.

    Attributes:
        descriptor: of the memory; no other arena has the same while this lives.
        memory: all of it, as bytes.
        images: for each file where it starts, its size, and the places of its items.
    """

    def __init__(self, images: Sequence[tuple[int, Sequence[ItemPlace]]], *, pin: bool = False):
        self.images: list[tuple[int, int, Sequence[ItemPlace]]] = []
        end = 0
        for size, items in images:
            self.images.append((end, size, items))
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        table = json.dumps(self.images).encode()
        self.table = (end, len(table))
        self.nbytes = end + len(table)
        self.descriptor = _shared_memory(self.nbytes)
        weakref.finalize(self, os.close, self.descriptor)
        # All pages are there before the first save: a copy into new ones takes five times as long.
        self._map = mmap.mmap(
            self.descriptor, self.nbytes, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        )
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._map[end:] = table
        if pin:
            self._pin()

    def image(self, index: int) -> tuple[memoryview, Sequence[ItemPlace]]:
        """A file and the places of its items."""
        start, size, items = self.images[index]
        return memoryview(self._map)[start : start + size], items

    def _pin(self) -> None:
        runtime = torch.cuda.cudart()
        if runtime.cudaHostRegister(self.memory.data_ptr(), self.nbytes, 0) == 0:
            weakref.finalize(self, runtime.cudaHostUnregister, self.memory.data_ptr())


class WriterProcess:
    """A process that writes arenas to files; started again if it died.

    Args:
        patience: seconds without progress after which it is given up and ended.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._known: set[int] = set()  # arenas that it has mapped
        self._start()

    def begin(self, arena: Arena, paths: Sequence[str], bytes_per_second: float | None) -> None:
        """Have the files of `arena` written to `paths`; `finish` waits for it.

        Raises:
            OSError: the process cannot be started.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        if arena.descriptor not in self._known:
            message = {"arena": arena.descriptor, "bytes": arena.nbytes, "table": arena.table}
            self._send(message, arena.descriptor)
            self._known.add(arena.descriptor)
        self._send({"arena": arena.descriptor, "paths": [*paths], "bytes_per_second": bytes_per_second})

    def finish(self, wrote: Callable[[int], None], tick: Callable[[], None]) -> list[FileRecord]:
        """Wait for the files, and give their sizes and checksums.

        Args:
            wrote: told how many more bytes are written.
            tick: called at least every half second; what it raises ends the writing.

        Raises:
            OSError: a file could not be written; names it. Or the process died, or makes no progress.
        """
        heard = time.monotonic()
        try:
            while True:
                tick()
                reply = self._receive(0.5)
                if reply is None:
                    if time.monotonic() - heard > self._patience:
                        raise TimeoutError(f"the writer made no progress in {self._patience} s")
                    continue
                heard = time.monotonic()
                if "written" in reply:
                    wrote(reply["written"])
                elif "error" in reply:
                    raise OSError(reply["error"])
                else:
                    return [FileRecord(*file) for file in reply["files"]]
        except BaseException:
            self.close()  # it may still be writing
            raise

    def close(self) -> None:
        """End the process, and let go of the memory that it has mapped; `begin` starts another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._known.clear()
        if process and connection:
            self._ender()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-I", "-S", str(SCRIPT), str(theirs.fileno())]
            # A session of its own: Ctrl-C, which is for the training process, does not reach it.
            try:
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        self._process, self._connection = process, ours
        self._ender = weakref.finalize(self, _end, process, ours, os.getpid())

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        assert self._connection is not None
        try:
            socket.send_fds(self._connection, [json.dumps(message).encode()], [*descriptors])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Its next message; None if none came in time."""
        assert self._connection is not None
        if not select.select([self._connection], [], [], seconds)[0]:
            return None
        try:
            packet = self._connection.recv(PACKET_BYTES)
        except ConnectionResetError as error:
            raise self._died() from error
        if not packet:
            raise self._died()
        return json.loads(packet)

    def _died(self) -> OSError:
        assert self._process is not None
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return ChildProcessError(
            f"the writer process {how} while it was writing; the next save starts another"
        )


def _shared_memory(nbytes: int) -> int:
    """A descriptor of so much memory without a name: nothing of it is left whatever happens."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("veofunc-checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    if os.getpid() != owner:  # a fork, which has the connection, too
        connection.close()
        return
    with suppress(OSError):  # it is dead
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    try:
        process.wait(1)  # it ends when the connection is gone
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
