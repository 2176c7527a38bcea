"""The writer process by itself, without torch on the other end; test_process.py has both ends."""

import errno
import fcntl
import json
import mmap
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.limits import small_disk
from veofunc.checkpoint import writer
from veofunc.checkpoint.writer import Image, Pace, combine, write_file

BLOCK = 8192  # bytes; a small one, so that small files have several


class Clock:
    """Stands in for `time`: it goes on only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Process:
    """A writer process, by its protocol."""

    def __init__(self):
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(30)
        command = [sys.executable, "-I", "-S", writer.__file__, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def give(self, number: int, contents: list[bytes]) -> None:
        """An arena of files without items."""
        images, memory = [], b""
        for content in contents:
            images.append((len(memory), len(content), []))
            memory += content + bytes(-len(content) % mmap.PAGESIZE)
        table = json.dumps(images).encode()
        with os.fdopen(os.memfd_create("arena"), "wb") as file:
            file.write(memory + table)
            file.flush()
            message = {"arena": number, "bytes": file.tell(), "table": [len(memory), len(table)]}
            socket.send_fds(self.connection, [json.dumps(message).encode()], [file.fileno()])

    def begin(self, number: int, paths: list, bytes_per_second: float | None = None) -> None:
        message = {"arena": number, "paths": [*map(str, paths)], "bytes_per_second": bytes_per_second}
        self.connection.send(json.dumps(message).encode())

    def hear(self) -> dict:
        return json.loads(self.connection.recv(writer.PACKET_BYTES))

    def finish(self) -> dict:
        """Its last message."""
        while "written" in (reply := self.hear()):
            pass
        return reply


@pytest.fixture
def process():
    process = Process()
    yield process
    process.connection.close()
    process.process.kill()
    process.process.wait()


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(writer, "BLOCK_BYTES", BLOCK)


def on_pages(content: bytes) -> memoryview:
    """A copy that begins on a page, as direct I/O wants it."""
    memory = mmap.mmap(-1, len(content) + 1)
    memory[: len(content)] = content
    return memoryview(memory)[: len(content)]


def noise(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def at_once() -> Pace:
    return Pace(None, lambda nbytes: None)


def write(path, content) -> Image:
    image = Image(memoryview(content), [])
    write_file(str(path), image.blocks(), image.size, at_once())
    return image


@given(st.binary(), st.binary())
def test_combine_gives_the_checksum_of_both(first, second):
    assert combine(crc32(first), crc32(second), len(second)) == crc32(first + second)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 50_000_001])
def test_combine_knows_long_strings(nbytes):
    second = bytes(nbytes)
    assert combine(crc32(b"first"), crc32(second), nbytes) == crc32(second, crc32(b"first"))


@given(
    sizes=st.lists(st.tuples(st.integers(4, 50), st.integers(0, 150), st.integers(4, 50)), max_size=6),
    end=st.integers(0, 100),
    block=st.integers(16, 120),
)
def test_an_image_has_its_checksums_before_a_block_is_given(sizes, end, block):
    content, places = bytearray(), []
    for before, nbytes, after in sizes:
        values = len(content) + before
        content += noise(before + nbytes + after)
        places.append((values, nbytes, values - 4, values + nbytes))
    content += noise(end)
    expected = bytearray(content)
    for values, nbytes, first, second in places:
        own = crc32(content[values : values + nbytes]).to_bytes(4, "little")
        expected[first : first + 4] = expected[second : second + 4] = own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", block)
        image = Image(memoryview(content), places)
        blocks = [bytes(each) for each in image.blocks()]
    assert all(len(each) == block for each in blocks[:-1])
    assert b"".join(blocks) == expected
    assert image.crc32 == crc32(expected)


SIZES = [0, 1, 4095, 4096, 4097, BLOCK, BLOCK + 1, 3 * BLOCK + 4096 + 5]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_has_the_bytes_that_were_given(size, tmp_path, small_blocks):
    image = write(tmp_path / "file", on_pages(noise(size)))
    assert (tmp_path / "file").read_bytes() == noise(size)
    assert image.crc32 == crc32(noise(size))


@pytest.mark.parametrize("size", SIZES)
def test_memory_that_does_not_begin_on_a_page_is_written_all_the_same(size, tmp_path, small_blocks):
    write(tmp_path / "file", on_pages(b"x" + noise(size))[1:])
    assert (tmp_path / "file").read_bytes() == noise(size)


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FileExistsError, match="file"):
        write(tmp_path / "file", b"after")
    assert (tmp_path / "file").read_bytes() == b"before"


def test_a_file_system_without_direct_io_is_written_through_the_page_cache(
    tmp_path, monkeypatch, small_blocks
):
    real_open, opened = os.open, []

    def open_as_some_file_systems_do(path, flags, mode=0o777):
        descriptor = real_open(path, flags, mode)
        opened.append(flags & os.O_DIRECT)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument", path)  # the file has been made
        return descriptor

    monkeypatch.setattr(os, "open", open_as_some_file_systems_do)
    write(tmp_path / "file", on_pages(noise(20_000)))
    assert (tmp_path / "file").read_bytes() == noise(20_000)
    assert opened[0]
    assert not opened[1]


def test_a_system_without_direct_io_is_written_through_the_page_cache(tmp_path, monkeypatch, small_blocks):
    monkeypatch.delattr(os, "O_DIRECT")
    write(tmp_path / "file", on_pages(noise(20_000)))
    assert (tmp_path / "file").read_bytes() == noise(20_000)


def test_a_file_system_that_refuses_a_direct_write_gets_an_ordinary_one(tmp_path, monkeypatch, small_blocks):
    real_pwrite, refused = os.pwrite, []

    def wants_something_else(descriptor, content, place):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(place)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(descriptor, content, place)

    monkeypatch.setattr(os, "pwrite", wants_something_else)
    write(tmp_path / "file", on_pages(noise(20_000)))
    assert (tmp_path / "file").read_bytes() == noise(20_000)
    assert refused == [0]


@pytest.mark.parametrize("most", [100, 4096, 5000])
def test_what_the_system_writes_in_parts_is_written_whole(most, tmp_path, monkeypatch, small_blocks):
    real_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, place: real_pwrite(fd, content[:most], place))
    write(tmp_path / "file", on_pages(noise(20_000)))
    assert (tmp_path / "file").read_bytes() == noise(20_000)


def test_a_block_is_written_before_the_next_but_one_is_taken(tmp_path, monkeypatch):
    real_pwrite, written = os.pwrite, []

    def slow(descriptor, content, place):
        time.sleep(0.01)
        written.append(place)
        return real_pwrite(descriptor, content, place)

    def blocks():
        for number in range(6):
            assert len(written) >= number - 1
            yield memoryview(bytes([number]) * 4096)

    monkeypatch.setattr(os, "pwrite", slow)
    write_file(str(tmp_path / "file"), blocks(), 6 * 4096, at_once())
    assert sorted({*written}) == [number * 4096 for number in range(6)]


def test_a_file_and_its_directory_are_durable_at_the_end(tmp_path, monkeypatch):
    real_fsync, synced = os.fsync, []

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, os.stat(path).st_size if path.endswith("file") else None))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "file", noise(5000))
    assert synced == [(str(tmp_path / "file"), 5000), (str(tmp_path), None)]


@pytest.mark.parametrize("size", [5 << 20, 20 << 20], ids=["last block", "first block"])
def test_a_full_disk_is_named_with_what_is_needed_and_what_is_free(size, tmp_path):
    with small_disk(tmp_path, 4 << 20) as disk, pytest.raises(OSError, match="No space left") as failure:
        write(disk / "file", on_pages(bytes(size)))
    assert failure.value.errno == errno.ENOSPC
    assert f"{disk / 'file'}: " in str(failure.value)
    needed, free = re.search(r"needs (\d+) bytes, (\d+) are free", str(failure.value)).groups()
    assert int(needed) == size
    assert int(free) < 4 << 20


def test_whoever_takes_a_block_and_fails_is_heard_and_no_descriptor_stays_open(tmp_path):
    def blocks():
        yield memoryview(bytes(4096))
        raise KeyError("taken")

    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyError, match="taken"):
        write_file(str(tmp_path / "file"), blocks(), 8192, at_once())
    assert os.listdir("/proc/self/fd") == before


def test_the_pace_is_kept_over_all_blocks(monkeypatch):
    clock, told = Clock(), []
    monkeypatch.setattr(writer, "time", clock)
    pace = Pace(100.0, told.append)
    for _ in range(10):
        pace.wrote(50)
    assert clock.now == pytest.approx(5)
    assert sum(told) == 500


def test_threads_share_one_pace():
    pace, begin = Pace(10_000.0, lambda nbytes: None), time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            threads.submit(pace.wrote, 100)
    assert time.monotonic() - begin >= 0.2


def test_time_that_passed_without_writing_is_not_made_up_for(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(writer, "time", clock)
    pace = Pace(100.0, lambda nbytes: None)
    pace.wrote(50)
    clock.now += 1000
    pace.wrote(50)
    assert clock.now == pytest.approx(1001)


def test_a_long_sleep_is_told_as_no_more_bytes(monkeypatch):
    clock, told = Clock(), []
    monkeypatch.setattr(writer, "time", clock)
    Pace(1.0, lambda nbytes: told.append((clock.now, nbytes))).wrote(60)
    assert sum(nbytes for _, nbytes in told) == 60
    assert max(after - before for (before, _), (after, _) in pairwise(told)) <= 1
    assert clock.now == pytest.approx(60)


def test_without_a_pace_nobody_sleeps(monkeypatch):
    clock, told = Clock(), []
    monkeypatch.setattr(writer, "time", clock)
    pace = Pace(None, told.append)
    pace.wrote(1 << 40)
    pace.wrote(3)
    assert clock.now == 0
    assert told == []  # it is too early to tell
    pace.settle()
    assert told == [(1 << 40) + 3]


def test_the_process_writes_arenas_more_than_once(process, tmp_path):
    contents = {1: [noise(10_000), noise(3)], 2: [noise(5000)]}
    for number, arena in contents.items():
        process.give(number, arena)
    for turn, number in enumerate([1, 2, 1]):
        paths = [tmp_path / f"{turn}_{index}" for index in range(len(contents[number]))]
        process.begin(number, paths)
        assert process.finish() == {"files": [[len(each), crc32(each)] for each in contents[number]]}
        assert [path.read_bytes() for path in paths] == contents[number]


def test_the_process_tells_how_much_is_written(process, tmp_path):
    process.give(1, [bytes(20 << 20)])
    process.begin(1, [tmp_path / "file"])
    written = []
    while "written" in (reply := process.hear()):
        written.append(reply["written"])
    assert sum(written) == 20 << 20
    assert written  # and not for each block, as whoever listens is in training
    assert len(written) < 20


def test_the_process_tells_what_failed_and_goes_on(process, tmp_path):
    process.give(1, [noise(10)])
    process.begin(1, [tmp_path / "nowhere" / "file"])
    error = process.finish()["error"]
    assert "No such file" in error
    assert str(tmp_path / "nowhere" / "file") in error
    process.begin(1, [tmp_path / "file"])
    assert "files" in process.finish()


@pytest.mark.parametrize("is_writing", [False, True])
def test_the_process_ends_with_the_connection(is_writing, process, tmp_path):
    process.give(1, [bytes(10_000)])
    process.begin(1, [tmp_path / "file"])
    process.finish()
    if is_writing:
        process.begin(1, [tmp_path / "slow"], bytes_per_second=1)
    process.connection.close()
    assert process.process.wait(30) == 0


def test_the_process_lives_on_when_a_job_is_told_to_end(process, tmp_path):
    process.give(1, [noise(10)])
    process.begin(1, [tmp_path / "before"])
    process.finish()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.process.send_signal(number)
    process.begin(1, [tmp_path / "after"])
    assert "files" in process.finish()
    assert (tmp_path / "after").read_bytes() == noise(10)


def test_the_process_needs_the_standard_library_alone():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print({name.partition('.')[0] for name in sys.modules} - {*sys.stdlib_module_names, '__main__'})"
    )
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, writer.__file__], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "set()"
