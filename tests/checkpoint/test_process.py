"""Writer processes that live, die and hang; test_writer.py has what they do, by itself."""

import gc
import json
import mmap
import os
import random
import signal
import time
from zlib import crc32

import pytest
import torch

from tests import limits
from veofunc.checkpoint.manifest import FileRecord
from veofunc.checkpoint.process import Arena, WriterProcess

SLOW = 1000.0  # bytes per second, at which files of these tests take a minute


@pytest.fixture(autouse=True)
def children(monkeypatch):
    """The processes that the test has started, not those that earlier ones have left to live on."""
    gc.collect()
    earlier = limits.children()
    monkeypatch.setitem(globals(), "children", lambda: [p for p in limits.children() if p not in earlier])


def noise(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def arena_of(*contents: bytes) -> Arena:
    """Memory with files without items."""
    arena = Arena([(len(content), []) for content in contents])
    for index, content in enumerate(contents):
        arena.image(index)[0][:] = content
    return arena


def never() -> None:
    pass


def ignore(nbytes: int) -> None:
    pass


def write(writer: WriterProcess, arena: Arena, *paths) -> list[FileRecord]:
    writer.begin(arena, [*map(str, paths)], None)
    return writer.finish(ignore, never)


def pid() -> int:
    """Of the one writer that there is."""
    (only,) = children()
    return only


@pytest.fixture
def writer():
    assert not children()
    writer = WriterProcess(patience=30.0)
    yield writer
    writer.close()
    assert not children()


def test_an_arena_has_its_files_on_pages_one_after_the_other():
    arena = arena_of(noise(1), noise(mmap.PAGESIZE), noise(mmap.PAGESIZE + 1), b"", noise(7))
    assert [start // mmap.PAGESIZE for start, _, _ in arena.images] == [0, 1, 2, 4, 4]
    assert all(start % mmap.PAGESIZE == 0 for start, _, _ in arena.images)
    for start, size, _ in arena.images:
        assert arena.memory[start : start + size].numpy().tobytes() == noise(size)


def test_an_arena_is_shared_by_its_descriptor_with_a_table_of_its_files():
    arena = Arena([(100, [(64, 8, 20, 80)]), (5, [])])
    arena.memory[70] = 123
    start, nbytes = arena.table
    assert json.loads(os.pread(arena.descriptor, nbytes, start)) == [
        [0, 100, [[64, 8, 20, 80]]],
        [mmap.PAGESIZE, 5, []],
    ]
    assert os.fstat(arena.descriptor).st_size == arena.nbytes == start + nbytes
    assert os.pread(arena.descriptor, 1, 70) == bytes([123])


def test_nothing_is_left_of_an_arena_that_is_let_go():
    gc.collect()  # what earlier tests left
    with open("/proc/self/maps") as maps:
        before = maps.read().count("veofunc-checkpoint")
    arena = arena_of(noise(10))
    descriptor, view = arena.descriptor, arena.memory[:5]
    os.fstat(descriptor)
    del arena
    gc.collect()
    assert view.numpy().tobytes() == noise(10)[:5]
    del view
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    with open("/proc/self/maps") as maps:
        assert maps.read().count("veofunc-checkpoint") == before


def test_several_arenas_are_written_again_and_again(writer, tmp_path):
    arenas = [arena_of(noise(10_000), noise(3)), arena_of(noise(9_000_000))]
    for turn in range(2):
        for number, arena in enumerate(arenas):
            paths = [tmp_path / f"{turn}_{number}_{index}" for index in range(len(arena.images))]
            contents = [noise(size) for _, size, _ in arena.images]
            assert write(writer, arena, *paths) == [FileRecord(len(c), crc32(c)) for c in contents]
            assert [path.read_bytes() for path in paths] == contents


def test_what_is_written_is_what_the_memory_holds_by_then(writer, tmp_path):
    arena = arena_of(noise(10))
    write(writer, arena, tmp_path / "before")
    arena.memory.copy_(torch.zeros_like(arena.memory[:1]).expand(arena.nbytes))
    write(writer, arena, tmp_path / "after")
    assert (tmp_path / "before").read_bytes() == noise(10)
    assert (tmp_path / "after").read_bytes() == bytes(10)


def test_every_byte_is_told_of_as_it_is_written(writer, tmp_path):
    written = []
    writer.begin(arena_of(noise(9_000_000), noise(5)), [f"{tmp_path}/a", f"{tmp_path}/b"], None)
    writer.finish(written.append, never)
    assert sum(written) == 9_000_005


def test_a_file_that_cannot_be_written_is_named_and_the_next_save_works(writer, tmp_path):
    arena = arena_of(noise(10))
    with pytest.raises(OSError, match=rf"No such file.*{tmp_path}/nowhere/file"):
        write(writer, arena, tmp_path / "nowhere" / "file")
    assert write(writer, arena, tmp_path / "file") == [FileRecord(10, crc32(noise(10)))]


def test_a_writer_killed_while_idle_is_started_again(writer, tmp_path):
    arena = arena_of(noise(10))
    write(writer, arena, tmp_path / "before")
    os.kill(pid(), signal.SIGKILL)
    os.waitid(os.P_PID, pid(), os.WEXITED | os.WNOWAIT)
    assert write(writer, arena, tmp_path / "after") == [FileRecord(10, crc32(noise(10)))]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_writer_killed_while_writing_fails_one_save(name, writer, tmp_path):
    arena = arena_of(noise(60_000))
    writer.begin(arena, [f"{tmp_path}/before"], SLOW)
    killed = []

    def kill(nbytes: int) -> None:
        os.kill(pid(), signal.Signals[name])
        killed.append(nbytes)

    with pytest.raises(ChildProcessError, match=f"was killed by {name} while it was writing"):
        writer.finish(kill, never)
    assert killed
    assert write(writer, arena, tmp_path / "after") == [FileRecord(60_000, crc32(noise(60_000)))]


def test_a_writer_that_hangs_is_given_up_after_a_while(tmp_path):
    writer, arena = WriterProcess(patience=0.1), arena_of(noise(10))
    os.kill(pid(), signal.SIGSTOP)
    writer.begin(arena, [f"{tmp_path}/before"], None)
    with pytest.raises(TimeoutError, match=r"no progress in 0\.1 s"):
        writer.finish(ignore, never)
    assert not children()
    writer.close()


def test_a_slow_writer_is_no_writer_that_hangs(tmp_path):
    writer = WriterProcess(patience=1.0)
    writer.begin(arena_of(noise(1000)), [f"{tmp_path}/file"], 400.0)  # 2.5 s
    assert writer.finish(ignore, never) == [FileRecord(1000, crc32(noise(1000)))]
    writer.close()


def test_what_a_tick_raises_ends_the_writing_at_once(writer, tmp_path):
    arena, ticks = arena_of(noise(60_000)), []

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 3:
            raise KeyError("another rank failed")

    writer.begin(arena, [f"{tmp_path}/before"], SLOW)
    with pytest.raises(KeyError, match="another rank failed"):
        writer.finish(ignore, tick)
    assert not children()
    assert write(writer, arena, tmp_path / "after") == [FileRecord(60_000, crc32(noise(60_000)))]


def test_restarts_leave_no_process_and_no_descriptor(writer, tmp_path):
    arena = arena_of(noise(10))
    write(writer, arena, tmp_path / "first")
    before = os.listdir("/proc/self/fd")
    for number in range(20):
        os.kill(pid(), signal.SIGKILL)
        os.waitid(os.P_PID, pid(), os.WEXITED | os.WNOWAIT)
        write(writer, arena, tmp_path / str(number))
        assert len(children()) == 1
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_closing_twice_is_closing_once_and_writing_starts_another(writer, tmp_path):
    writer.close()
    writer.close()
    assert not children()
    assert write(writer, arena_of(noise(10)), tmp_path / "file") == [FileRecord(10, crc32(noise(10)))]


def test_a_stopped_writer_is_closed(writer):
    os.kill(pid(), signal.SIGSTOP)
    writer.close()
    assert not children()


def test_a_writer_that_is_let_go_ends():
    writer = WriterProcess(patience=30.0)
    assert children()
    del writer
    gc.collect()
    assert not children()


def test_an_interrupt_from_the_keyboard_does_not_reach_the_writer(writer):
    assert os.getsid(pid()) != os.getsid(0)
