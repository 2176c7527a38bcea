"""Writes prepared memory to files: run as a process of its own, beside the training process.

It imports nothing but the standard library, starts in milliseconds, and shares no interpreter lock with
training. The memory (an arena) holds the files as they are to be, but for the checksums of their items,
which only now are computed. `WriterProcess` in `process.py` is the other end of the socket; each message
is one JSON object in one packet:

    {"arena": 3, "bytes": n, "table": [start, nbytes]}      with its file descriptor: new memory
    {"arena": 3, "paths": [...], "bytes_per_second": null}  write its files there, durably
    <- {"written": n}                                       so many bytes more
    <- {"files": [[size, crc32], ...]}                      done
    <- {"error": "..."}                                     or not
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any
from zlib import crc32

PAGE_BYTES = 4096  # direct I/O wants multiples of it
BLOCK_BYTES = 8 << 20  # written at once
PACKET_BYTES = 128 << 10
SIGN_OF_LIFE = 0.5  # seconds between two of a pace that sleeps
TELL_SECONDS = 0.1  # between two messages about progress

# (where its values start, how many bytes, the two places of their checksum); all in bytes of the file
ItemPlace = Sequence[int]


def main(descriptor: int) -> None:
    """Serve the training process until it closes its end, or dies."""
    for ignored in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # a job is told to end; a save still ends well
        signal.signal(ignored, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    arenas: dict[int, tuple[memoryview, list[Any]]] = {}
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
        except ConnectionResetError:
            packet = b""
        if not packet:
            os._exit(0)  # whatever is being written, nobody waits for it
        message = json.loads(packet)
        if "table" in message:
            memory = memoryview(mmap.mmap(descriptors[0], message["bytes"]))
            os.close(descriptors[0])
            start, nbytes = message["table"]
            arenas[message["arena"]] = memory, json.loads(bytes(memory[start : start + nbytes]))
        else:
            arena = arenas[message["arena"]]
            threading.Thread(target=_answer, args=(connection, *arena, message), daemon=True).start()


def _answer(
    connection: socket.socket, memory: memoryview, images: list[Any], message: dict[str, Any]
) -> None:
    def send(reply: dict[str, Any]) -> None:
        with suppress(ConnectionError):  # then `main` ends the process
            connection.send(json.dumps(reply).encode())

    pace = Pace(message["bytes_per_second"], lambda nbytes: send({"written": nbytes}))

    def write(place: Any, path: str) -> list[int]:
        start, size, items = place
        image = Image(memory[start : start + size], items)
        write_file(path, image.blocks(), size, pace)
        return [size, image.crc32]

    try:
        with ThreadPoolExecutor(len(images)) as threads:
            files = list(threads.map(write, images, message["paths"]))
        pace.settle()
        send({"files": files})
    except OSError as error:  # the training process raises it
        send({"error": str(error)})
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})


class Pace:
    """Counts bytes as they are written, and slows down whoever writes more than so many a second.

    Args:
        bytes_per_second: None for as fast as it can.
        tell: told now and then how many more bytes are written, or 0 as a sign of life.
    """

    def __init__(self, bytes_per_second: float | None, tell: Callable[[int], None]):
        self._bytes_per_second = bytes_per_second
        self._tell = tell
        self._lock = threading.Lock()
        self._free_at = self._told_at = time.monotonic()
        self._untold = 0

    def wrote(self, nbytes: int) -> None:
        """Called after each block, by any thread."""
        with self._lock:
            now = time.monotonic()
            self._untold += nbytes
            if now - self._told_at >= TELL_SECONDS:  # whoever listens is in training
                self._settle(now)
            if self._bytes_per_second is None:
                return
            free_at = max(self._free_at, now) + nbytes / self._bytes_per_second
            self._free_at = free_at
        while (rest := free_at - time.monotonic()) > 0:
            time.sleep(min(rest, SIGN_OF_LIFE))
            self.settle()  # slow is not dead

    def settle(self) -> None:
        """Tell the rest."""
        with self._lock:
            self._settle(time.monotonic())

    def _settle(self, now: float) -> None:
        self._tell(self._untold)
        self._told_at, self._untold = now, 0


class Image:
    """A file in memory, complete but for the checksums of its items."""

    def __init__(self, memory: memoryview, items: Sequence[ItemPlace]):
        self.crc32 = 0  # of the blocks so far
        self.size = len(memory)
        self._memory = memory
        self._items = iter(items)

    def blocks(self) -> Iterator[memoryview]:
        """The file in blocks of `BLOCK_BYTES`, each given when the checksums in it are filled in."""
        sealed = 0
        for start in range(0, self.size, BLOCK_BYTES):
            block = self._memory[start : start + BLOCK_BYTES]
            while sealed < start + len(block):
                sealed = self._seal_next(sealed)
            yield block

    def _seal_next(self, sealed: int) -> int:
        """Fill in the checksum of the next item; where its values end."""
        memory, place = self._memory, next(self._items, None)
        if place is None:
            self.crc32 = crc32(memory[sealed:], self.crc32)
            return self.size
        start, nbytes, first, second = place
        own = crc32(memory[start : start + nbytes])
        memory[first : first + 4] = memory[second : second + 4] = own.to_bytes(4, "little")
        self.crc32 = combine(crc32(memory[sealed:start], self.crc32), own, nbytes)
        return start + nbytes


def write_file(path: str, blocks: Iterable[memoryview], size: int, pace: Pace) -> None:
    """Write `blocks`, `size` bytes in all, to the new file `path`, durably.

    Each block but the last is `BLOCK_BYTES` long and starts on a page. It is written while the next but
    not the one after it is taken.

    Raises:
        OSError: naming the file, and if the disk is full how much is missing.
    """
    descriptor, is_direct = _open(path)
    try:
        start, pending = 0, Future()
        pending.set_result(None)
        with ThreadPoolExecutor(1) as disk:
            for block in blocks:
                pending.result()
                pending = disk.submit(_write, descriptor, block, start, is_direct, pace)
                start += len(block)
            pending.result()
        os.fsync(descriptor)
        sync_directory(os.path.dirname(path))
    except OSError as error:
        raise _located(error, path, size) from error
    finally:
        os.close(descriptor)


def _open(path: str) -> tuple[int, bool]:
    """A new file, and whether its blocks go straight to the disk, past the page cache and its cost."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), False


def _write(descriptor: int, block: memoryview, start: int, is_direct: bool, pace: Pace) -> None:
    done = 0
    while done < len(block):
        left = len(block) - done
        if is_direct and (left < PAGE_BYTES or done % PAGE_BYTES):  # the end of the file, or of the disk
            is_direct = _through_the_page_cache(descriptor)
        end = done + left - left % PAGE_BYTES if is_direct else len(block)
        try:
            done += os.pwrite(descriptor, block[done:end], start + done)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            is_direct = _through_the_page_cache(descriptor)  # this file system wants something else
    pace.wrote(len(block))


def _through_the_page_cache(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _located(error: OSError, path: str, size: int) -> OSError:
    """`error` with the file, and how much room there is for it."""
    text = f"{path}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        status = os.statvfs(os.path.dirname(path))
        text += f"; the file needs {size} bytes, {status.f_bavail * status.f_frsize} are free"
    return OSError(error.errno, text)


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two byte strings one after the other, from that of each; `nbytes` of the second.

    As zlib's `crc32_combine`, which Python does not have.
    """
    return _times(_shift(nbytes), first) ^ second


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial of CRC-32."""
    power, factor, bits = 1 << 31, 1 << 30, 8 * nbytes
    while bits:
        if bits & 1:
            power = _times(factor, power)
        factor, bits = _times(factor, factor), bits >> 1
    return power


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32; the highest bit is the lowest power."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


if __name__ == "__main__":
    main(int(sys.argv[1]))
