"""A private file gives back what it was given, reserves its space in time, and says why it cannot."""

import errno
import fcntl
import mmap
import os

import pytest

from tests.limits import largest_file
from tests.offload.stores.disk import failing, open_files, size_of_file
from veofunc.offload.stores.diskfile import PrivateFile
from veofunc.offload.stores.space import PAGE

MIB = 1 << 20


def pages(content=b""):
    """The content in page-aligned memory, with zeros up to the end of its last page."""
    memory = mmap.mmap(-1, max(len(content) + -len(content) % PAGE, PAGE))
    memory[: len(content)] = content
    return memoryview(memory)


@pytest.fixture(params=["direct", "buffered"])
def file(request, tmp_path):
    file = PrivateFile(str(tmp_path))
    if request.param == "direct" and not file.go_direct():
        pytest.skip("no direct I/O on this file system")
    return file


def flags_of(path):
    return fcntl.fcntl(int(os.path.basename(path)), fcntl.F_GETFL)


def test_what_was_written_is_read(file):
    contents = [os.urandom(n) for n in (1, PAGE, 3 * PAGE, 100_000)]
    starts = [file.take(len(content)) for content in contents]
    for start, content in zip(starts, contents, strict=True):
        file.write(pages(content), start)
    for start, content in zip(starts, contents, strict=True):
        target = pages(bytes(len(content)))
        file.read(target, start)
        assert bytes(target[: len(content)]) == content


def test_direct_is_direct(tmp_path):
    file = PrivateFile(str(tmp_path))
    (path,) = open_files(tmp_path)
    assert not flags_of(path) & os.O_DIRECT
    if not file.go_direct():
        pytest.skip("no direct I/O on this file system")
    assert file.is_direct
    assert flags_of(path) & os.O_DIRECT


@pytest.mark.parametrize("refused", ["fcntl", "pwrite"])
def test_a_file_system_without_direct_io_is_found_out(refused, tmp_path, monkeypatch):
    file, set_flags = PrivateFile(str(tmp_path)), fcntl.fcntl

    def refuse(file, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(file, command, flags)

    if refused == "fcntl":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
        assert file.go_direct() is False
    else:
        with failing(monkeypatch, "pwrite", errno.EINVAL):
            assert file.go_direct() is False
    assert not file.is_direct
    assert not flags_of(open_files(tmp_path)[0]) & os.O_DIRECT
    file.write(pages(b"abc"), file.take(3))


def test_a_file_that_cannot_be_written_at_all_is_an_error(tmp_path, monkeypatch):
    with (
        failing(monkeypatch, "pwrite", errno.ENOSPC),
        pytest.raises(OSError, match=f"cannot write to a file in {tmp_path}: No space left") as raised,
    ):
        PrivateFile(str(tmp_path)).go_direct()
    assert raised.value.errno == errno.ENOSPC


def test_space_is_reserved_in_steps_that_grow_with_the_file(tmp_path):
    file, sizes = PrivateFile(str(tmp_path)), []
    for _ in range(25):
        file.take(40 * MIB)
        sizes.append(size_of_file(tmp_path) // MIB)
    steps = [b - a for a, b in zip([0, *sizes], sizes, strict=False) if b > a]
    assert steps == [40, 40, 80, 160, 256, 256, 256]
    assert os.stat(open_files(tmp_path)[0]).st_blocks * 512 >= sizes[-1] * MIB


def test_the_file_is_no_larger_than_what_was_in_use_at_once(file, tmp_path):
    for nbytes in range(PAGE, 200 * PAGE, PAGE):  # sizes that never come again
        for start in [file.take(nbytes) for _ in range(3)]:
            file.give(start, nbytes)
    assert size_of_file(tmp_path) == 16 * MIB


def test_what_the_disk_has_room_for_is_given_though_not_for_a_whole_step(file, tmp_path):
    with largest_file(MIB):
        assert file.take(MIB // 2) == 0
        assert size_of_file(tmp_path) == MIB // 2
        assert file.take(MIB // 2) == MIB // 2


def test_a_full_disk_raises_before_anything_is_written_and_takes_nothing(file, tmp_path):
    message = f"cannot offload 1048577 bytes to a file in {tmp_path}: File too large"
    with largest_file(MIB):
        for _ in range(2):
            with pytest.raises(OSError, match=message) as raised:
                file.take(MIB + 1)
            assert raised.value.errno == errno.EFBIG
            assert isinstance(raised.value.__cause__, OSError)
        assert file.take(MIB) == 0
    assert file.take(MIB + 1) == MIB


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_reserves_nothing_will_do(code, file, tmp_path, monkeypatch):
    with failing(monkeypatch, "posix_fallocate", code):
        starts = [file.take(PAGE) for _ in range(3)]
    file.write(pages(b"abc"), starts[2])
    assert size_of_file(tmp_path) == 3 * PAGE
    target = pages()
    file.read(target, starts[2])
    assert bytes(target[:3]) == b"abc"


def in_parts(monkeypatch, of_write, of_read):
    """Has each call move no more than those bytes: the kernel may, and for more than 2 GiB always does."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, rest, at: pwrite(fd, rest[:of_write], at))
    monkeypatch.setattr(os, "preadv", lambda fd, rest, at: preadv(fd, [rest[0][:of_read]], at))


@pytest.mark.parametrize("pages_at_once", [1, 2])
def test_writes_and_reads_that_stop_early_go_on(pages_at_once, file, monkeypatch):
    content, target = os.urandom(5 * PAGE), pages(bytes(5 * PAGE))
    in_parts(monkeypatch, pages_at_once * PAGE, pages_at_once * PAGE)
    file.write(pages(content), file.take(len(content)))
    file.read(target, 0)
    assert bytes(target) == content


def test_without_direct_io_they_may_stop_anywhere(tmp_path, monkeypatch):
    file, content, target = PrivateFile(str(tmp_path)), os.urandom(5 * PAGE), pages(bytes(5 * PAGE))
    in_parts(monkeypatch, 1000, 777)
    file.write(pages(content), file.take(len(content)))
    file.read(target, 0)
    assert bytes(target) == content


def test_with_direct_io_what_stops_within_a_page_goes_on_at_its_start(tmp_path, monkeypatch):
    file, content, target = PrivateFile(str(tmp_path)), os.urandom(5 * PAGE), pages(bytes(5 * PAGE))
    if not file.go_direct():
        pytest.skip("no direct I/O on this file system")
    pwrite, starts = os.pwrite, []

    def stops_early(fd, rest, at):
        starts.append(at)
        count = pwrite(fd, rest, at)
        return PAGE + 1000 if count > 2 * PAGE else count

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", stops_early)
        file.write(pages(content), file.take(len(content)))
        patch.setattr(os, "pwrite", lambda fd, rest, at: 1000)
        with pytest.raises(OSError, match=f"ended at {5 * PAGE} bytes"):  # rather than for ever
            file.write(pages(), file.take(PAGE))
    assert starts == [0, PAGE, 2 * PAGE, 3 * PAGE]
    file.read(target, 0)
    assert bytes(target) == content


def test_a_file_that_lost_its_end_raises_with_the_directory(file, tmp_path):
    file.write(pages(b"a" * 3 * PAGE), file.take(3 * PAGE))
    os.truncate(open_files(tmp_path)[0], PAGE + 40)
    with pytest.raises(OSError, match=f"offload file in {tmp_path} ended at 4[01]"):
        file.read(pages(bytes(3 * PAGE)), 0)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_of_the_device_name_directory_and_cause(code, file, tmp_path, monkeypatch):
    with failing(monkeypatch, "pwrite", code), failing(monkeypatch, "preadv", code):
        for move, problem in ((file.write, "offload"), (file.read, "read")):
            message = f"cannot {problem} {PAGE} bytes .* {tmp_path}: {os.strerror(code)}"
            with pytest.raises(OSError, match=message) as raised:
                move(pages(), 0)
            assert raised.value.errno == raised.value.__cause__.errno == code


def test_it_has_no_name_and_is_closed_when_nobody_has_it(tmp_path):
    file = PrivateFile(str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert len(open_files(tmp_path)) == 1
    del file
    assert open_files(tmp_path) == []
