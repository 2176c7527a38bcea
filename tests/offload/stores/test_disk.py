"""`DiskStore` gives back what it was given, in whatever state that is, and leaves nothing behind.

What holds for every store is in `test_store.py`. Its traffic between memory and file is in
`test_traffic.py`; the file alone in `test_diskfile.py`.
"""

import contextlib
import errno
import fcntl
import gc
import itertools
import math
import os
import resource
import threading
import warnings

import pytest
import torch

import veofunc as vf
from tests.limits import largest_file
from tests.offload.layouts import DTYPES, LAYOUTS, bytes_of, numbers
from tests.offload.stores.disk import (
    counted,
    crowd_out,
    failing,
    held,
    io_threads,
    open_files,
    settle,
    size_of_file,
)

MIB = 1 << 20

# The temporary directory may be on a file system without direct I/O.
pytestmark = pytest.mark.filterwarnings("ignore:no direct I/O:UserWarning")


def got_at_once(directory, tensor, monkeypatch):
    return vf.DiskStore(directory).put(tensor).get()


def got_while_it_is_written(directory, tensor, monkeypatch):
    with held(monkeypatch, "pwrite") as gate:
        slot = vf.DiskStore(directory, direct=False).put(tensor)
        gate.reached.wait()
        return slot.get()


def got_from_its_buffer(directory, tensor, monkeypatch):
    store = vf.DiskStore(directory)
    slot = store.put(tensor)
    settle(store)
    return slot.get()


def got_from_the_disk(directory, tensor, monkeypatch):
    store = vf.DiskStore(directory, inflight_bytes=0)
    slot = store.put(tensor)
    settle(store)
    with counted(monkeypatch, "preadv") as reads:
        restored = slot.get()
    assert len(reads) == 1
    return restored


def got_through_the_page_cache(directory, tensor, monkeypatch):
    return vf.DiskStore(directory, inflight_bytes=0, direct=False).put(tensor).get()


def got_read_ahead(directory, tensor, monkeypatch):
    store = vf.DiskStore(directory, inflight_bytes=MIB)
    slot = store.put(tensor)
    crowd_out(store)
    with counted(monkeypatch, "preadv") as reads:
        slot.prefetch()
        settle(store)
        assert len(reads) == 1
        restored = slot.get()
    assert len(reads) == 1
    return restored


def got_again(directory, tensor, monkeypatch):
    slot = vf.DiskStore(directory).put(tensor)
    slot.get().zero_()
    return slot.get()


WAYS = [
    got_at_once,
    got_while_it_is_written,
    got_from_its_buffer,
    got_from_the_disk,
    got_through_the_page_cache,
    got_read_ahead,
    got_again,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_strides_dtype_and_device_come_back(layout, way, tmp_path, monkeypatch):
    tensor = LAYOUTS[layout](numbers(torch.float32))
    restored = way(tmp_path, tensor, monkeypatch)
    assert torch.equal(restored, tensor)
    assert restored.shape == tensor.shape
    assert restored.stride() == tensor.stride()
    assert (restored.dtype, restored.device) == (tensor.dtype, tensor.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, tmp_path, monkeypatch):
    for way, layout in itertools.product(WAYS, ["contiguous", "transposed", "expanded rows", "0-dim"]):
        tensor = LAYOUTS[layout](numbers(dtype))
        restored = way(tmp_path, tensor, monkeypatch)
        assert restored.dtype == dtype
        assert restored.stride() == tensor.stride()
        assert bytes_of(restored) == bytes_of(tensor)


@pytest.mark.parametrize("way", WAYS)
def test_lazy_conjugates_and_negatives_come_back_with_their_values(way, tmp_path, monkeypatch):
    z = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).view(2, 3)
    for tensor in (z.conj(), z.conj().imag, z.conj().t(), z.mH):
        assert tensor.is_conj() or tensor.is_neg()
        restored = way(tmp_path, tensor, monkeypatch)
        assert restored.tolist() == tensor.tolist()
        assert restored.stride() == tensor.stride()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (1,), (1024,), (1025,), (3, 70_000)])
def test_every_size_comes_back(shape, way, tmp_path, monkeypatch):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if way is not got_read_ahead or tensor.nbytes < MIB:
        restored = way(tmp_path, tensor, monkeypatch)
        assert torch.equal(restored, tensor)
        assert restored.shape == tensor.shape


@pytest.mark.parametrize("way", WAYS)
def test_works_under_another_default_device(way, tmp_path, monkeypatch):
    tensor = torch.arange(4.0)
    with torch.device("meta"):
        restored = way(tmp_path, tensor, monkeypatch)
    assert torch.equal(restored, tensor)


def test_what_was_put_in_inference_mode_comes_back_for_any_use(tmp_path):
    tensor, store = torch.arange(4.0), vf.DiskStore(tmp_path)
    with torch.inference_mode():
        slot = store.put(tensor)
    restored = slot.get()
    assert not restored.is_inference()
    restored.add_(1)
    assert restored.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("show", "numel"),
    {
        "contiguous": (lambda t: t, 4 * 6000),
        "transposed": (lambda t: t.t(), 4 * 6000),
        "slice": (lambda t: t[:, 2000:4000], 4 * 2000),
        "expanded rows": (lambda t: t[:1].expand(9, 6000), 6000),
        "expanded columns": (lambda t: t.view(-1, 1).expand(-1, 50), 4 * 6000),
        "expanded scalar": (lambda t: t[0, 0].expand(300, 500), 1),
    }.values(),
)
def test_only_what_the_tensor_touches_is_moved(show, numel, tmp_path, monkeypatch):
    tensor = show(torch.arange(4 * 6000.0).view(4, 6000))
    store = vf.DiskStore(tmp_path, direct=False)
    with counted(monkeypatch, "pwrite") as writes:
        slot = store.put(tensor)
        settle(store)
    assert 4 * numel <= sum(writes) < 4 * numel + 4096
    assert torch.equal(slot.get(), tensor)


@pytest.mark.parametrize("way", [got_from_its_buffer, got_from_the_disk, got_read_ahead])
def test_what_comes_back_is_the_memory_that_it_was_read_into(way, tmp_path, monkeypatch):
    restored = way(tmp_path, torch.arange(6.0).view(2, 3).t(), monkeypatch)
    assert restored.data_ptr() % 4096 == 0
    restored.mul_(2).requires_grad_()
    (restored**2).sum().backward()
    assert restored.grad.tolist() == [[0, 12], [4, 16], [8, 20]]


def test_the_value_at_the_time_of_put_comes_back_and_each_time_as_a_new_tensor(tmp_path):
    tensor = torch.arange(4.0)
    slot = vf.DiskStore(tmp_path).put(tensor)
    tensor.zero_()
    copies = [slot.get() for _ in range(3)]
    copies[0].zero_()
    slot.get().zero_()
    assert copies[1].tolist() == copies[2].tolist() == slot.get().tolist() == [0, 1, 2, 3]


def test_a_restored_tensor_outlives_slot_store_and_what_is_put_after_it(tmp_path):
    store = vf.DiskStore(tmp_path, inflight_bytes=MIB)
    slot = store.put(torch.arange(1000.0))
    settle(store)
    restored = slot.get()
    del slot
    for i in range(20):
        store.put(torch.full((1 << 17,), float(i)))
    crowd_out(vf.DiskStore(tmp_path, inflight_bytes=MIB))
    del store
    gc.collect()
    assert torch.equal(restored, torch.arange(1000.0))


def test_takes_what_is_in_host_memory(tmp_path):
    assert vf.DiskStore(tmp_path).accepts(torch.ones(3))
    assert isinstance(vf.DiskStore(tmp_path), vf.Store)


# Options.


@pytest.mark.parametrize("value", [-1, True, False, 1.0, 1e9, math.nan, math.inf, "1", None])
def test_a_number_of_bytes_is_an_int_of_at_least_zero(value, tmp_path):
    with pytest.raises(ValueError, match=rf"inflight_bytes must be an int >= 0 \(bytes\), got {value!r}"):
        vf.DiskStore(tmp_path, inflight_bytes=value)


@pytest.mark.parametrize("bits", [60, 63, 64, 200])
def test_more_memory_than_there_is_is_refused(bits, tmp_path):
    nbytes = 1 << bits
    match = f"inflight_bytes must be no more bytes than .*, got {nbytes}: there is no stretch of {nbytes}"
    with pytest.raises(ValueError, match=match):
        vf.DiskStore(tmp_path, inflight_bytes=nbytes)


@pytest.mark.parametrize("value", [0, 1, "yes", math.nan])
def test_direct_is_a_boolean_or_none(value, tmp_path):
    with pytest.raises(ValueError, match=f"direct must be True, False or None.*, got {value!r}"):
        vf.DiskStore(tmp_path, direct=value)


def test_options_are_keywords(tmp_path):
    with pytest.raises(TypeError, match="positional"):
        vf.DiskStore(tmp_path, 0)


def test_prints_as_what_one_would_type(tmp_path):
    assert repr(vf.DiskStore(tmp_path)) == f"DiskStore({str(tmp_path)!r})"
    store = vf.DiskStore(tmp_path, inflight_bytes=7, direct=False)
    assert repr(store) == f"DiskStore({str(tmp_path)!r}, inflight_bytes=7, direct=False)"


# Direct I/O.


@pytest.fixture
def without_direct_io(monkeypatch):
    set_flags = fcntl.fcntl

    def refuse(file, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def is_direct(directory):
    (path,) = open_files(directory)
    return bool(fcntl.fcntl(int(os.path.basename(path)), fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.filterwarnings("default:no direct I/O:UserWarning")
@pytest.mark.usefixtures("without_direct_io")
def test_a_file_system_without_direct_io_is_used_after_one_warning_that_says_what_it_costs(tmp_path):
    message = f"no direct I/O to files in {tmp_path}: .* page cache, which takes memory .* direct=False"
    with pytest.warns(UserWarning, match=message) as warned:
        store = vf.DiskStore(tmp_path)
        slot = store.put(torch.arange(3))
        settle(store)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert slot.get().tolist() == [0, 1, 2]


@pytest.mark.usefixtures("without_direct_io")
def test_a_file_system_without_direct_io_is_an_error_if_it_must_be_direct(tmp_path):
    with pytest.raises(OSError, match=f"no direct I/O to files in {tmp_path}") as raised:
        vf.DiskStore(tmp_path, direct=True)
    assert raised.value.errno == errno.EINVAL


def test_the_file_is_direct_if_it_can_be_and_may_be(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            store = vf.DiskStore(tmp_path, direct=True)
        except OSError:
            pytest.skip("no direct I/O on this file system")
        assert is_direct(tmp_path)
        store = vf.DiskStore(tmp_path)
        assert is_direct(tmp_path)
        store = vf.DiskStore(tmp_path, direct=False)
        assert not is_direct(tmp_path)
        assert store.put(torch.arange(3)).get().tolist() == [0, 1, 2]


# The file.


def test_the_directory_is_made_and_no_name_is_left_in_it(tmp_path):
    directory = tmp_path / "new" / "deep"
    store = vf.DiskStore(directory)
    slot = store.put(torch.ones(1000))
    settle(store)
    assert os.listdir(directory) == []
    assert "(deleted)" in os.readlink(open_files(directory)[0])
    assert slot.get().sum() == 1000


def test_a_directory_that_cannot_be_made_raises_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        vf.DiskStore(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        vf.DiskStore(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("path", "kind", "cause"),
    [
        ("file", FileExistsError, "File exists"),
        ("file/below", NotADirectoryError, "Not a directory"),
        ("/proc/cannot/be/made", FileNotFoundError, "No such file or directory"),
        ("/proc", FileNotFoundError, "No such file or directory"),
        ("", FileNotFoundError, "No such file or directory"),
        ("n" * 300, OSError, "File name too long"),
    ],
)
def test_a_directory_that_cannot_be_used_is_named_with_cause_and_remedy(path, kind, cause, tmp_path):
    (tmp_path / "file").write_text("")
    directory = os.path.join(tmp_path, path) if path else path
    with pytest.raises(OSError, match="must be a directory") as raised:
        vf.DiskStore(directory)
    assert type(raised.value) is kind
    assert raised.value.errno == raised.value.__cause__.errno
    assert f"directory={directory!r} must be a directory" in str(raised.value)
    assert f": {cause}; choose another" in str(raised.value)


def test_the_file_is_closed_and_the_threads_end_with_the_last_slot(tmp_path):
    others = io_threads()
    store = vf.DiskStore(tmp_path)
    assert set(io_threads()) <= set(others)  # none before they are needed
    slot = store.put(torch.ones(10))
    threads = set(io_threads()) - set(others)
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)
    del store
    assert slot.get().sum() == 10
    del slot
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert open_files(tmp_path) == []


def test_threads_end_though_a_write_failed_and_nobody_was_told(tmp_path, monkeypatch):
    others = io_threads()
    with failing(monkeypatch, "pwrite", errno.EIO):
        store = vf.DiskStore(tmp_path, direct=False)
        failed = store.put(torch.ones(10))
        settle(store)
        failed.prefetch()
    threads = set(io_threads()) - set(others)
    del store, failed
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_the_file_does_not_grow_from_step_to_step(tmp_path):
    store = vf.DiskStore(tmp_path, inflight_bytes=MIB)
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for step in range(50):
        numels = torch.randint(1, 100_000, (20,), generator=generator).tolist()
        slots = [store.put(torch.full((n,), float(step + i))) for i, n in enumerate(numels)]
        assert all(slot.get()[-1] == step + i for i, slot in reversed(list(enumerate(slots))))
        del slots
        sizes.append(size_of_file(tmp_path))
    assert set(sizes) == {16 * MIB}


def test_thousands_of_slots_need_one_file_descriptor(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        store = vf.DiskStore(tmp_path, inflight_bytes=MIB)
        slots = [store.put(torch.full((3,), float(i))) for i in range(3000)]
        assert all(slot.get().tolist() == [i, i, i] for i, slot in enumerate(slots))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Errors.


def test_a_full_disk_raises_in_put_and_what_is_there_stays_good(tmp_path):
    store = vf.DiskStore(tmp_path)
    message = f"cannot offload 1048576 bytes to a file in {tmp_path}: File too large"
    with largest_file(MIB):
        first = store.put(torch.ones(1 << 17))
        for _ in range(2):
            with pytest.raises(OSError, match=message) as raised:
                store.put(torch.full((1 << 18,), 2.0))
            assert raised.value.errno == errno.EFBIG
            assert isinstance(raised.value.__cause__, OSError)
        assert first.get().sum() == 1 << 17
        del first
        assert store.put(torch.full((1 << 18,), 2.0)).get().sum() == 2 << 18


@pytest.fixture(params=[errno.EIO, errno.ENOSPC])
def code(request):
    return request.param


def test_a_failed_write_raises_once_at_the_next_put_and_nothing_is_lost(code, tmp_path, monkeypatch):
    store = vf.DiskStore(tmp_path)
    with failing(monkeypatch, "pwrite", code):
        slots = [store.put(torch.full((1000,), 0.0))]
        settle(store)
        message = f"cannot offload 4096 bytes to a file in {tmp_path}: {os.strerror(code)}"
        with pytest.raises(OSError, match=message) as raised:
            store.put(torch.ones(3))
        assert raised.value.errno == raised.value.__cause__.errno == code
        assert slots[0].get()[999] == 0
        assert slots[0].get()[999] == 0
    with counted(monkeypatch, "pwrite") as writes:
        slots.append(store.put(torch.full((1000,), 1.0)))
        settle(store)
    assert writes == [4096, 4096]  # what had failed, too
    crowd_out(store)
    assert [slot.get()[999] for slot in slots] == [0, 1]


def test_a_failed_write_raises_once_when_its_tensor_is_got(code, tmp_path, monkeypatch):
    store = vf.DiskStore(tmp_path)
    with failing(monkeypatch, "pwrite", code):
        slot = store.put(torch.full((1000,), 7.0))
        settle(store)
    with pytest.raises(OSError, match=f"{tmp_path}: {os.strerror(code)}"):
        slot.get()
    assert slot.get()[999] == 7
    assert store.put(torch.ones(3)).get().sum() == 3


def test_a_failed_write_of_a_tensor_that_nobody_needs_is_forgotten(tmp_path, monkeypatch):
    store = vf.DiskStore(tmp_path)
    with failing(monkeypatch, "pwrite", errno.EIO):
        slot = store.put(torch.ones(1000))
        settle(store)
        del slot
    assert store.put(torch.ones(3)).get().sum() == 3


def test_a_disk_that_stays_full_raises_again_and_never_blocks(tmp_path, monkeypatch):
    store = vf.DiskStore(tmp_path, inflight_bytes=64 << 10)
    slots, num_raised = [], 0
    with failing(monkeypatch, "pwrite", errno.ENOSPC):
        for i in range(100):
            try:
                slots.append((i, store.put(torch.full((4096,), float(i)))))
            except OSError:
                num_raised += 1
        assert num_raised > 10
        assert len(slots) <= 2 * 4  # the buffers, and one more at a time
        settle(store)
        for i, slot in slots:
            with contextlib.suppress(OSError):
                slot.get()
            assert slot.get()[4095] == i
    while True:
        try:
            slots.append((-1, store.put(torch.full((4096,), -1.0))))
            break
        except OSError:  # said once more
            continue
    crowd_out(store)
    assert all(slot.get()[4095] == i for i, slot in slots)


def test_a_failed_read_raises_and_can_be_tried_again(tmp_path, monkeypatch):
    store = vf.DiskStore(tmp_path, inflight_bytes=MIB)
    slot = store.put(torch.ones(1000))
    crowd_out(store)
    with failing(monkeypatch, "preadv", errno.EIO):
        slot.prefetch()
        settle(store)
        for _ in range(2):
            message = f"cannot read 4096 bytes from a file in {tmp_path}: {os.strerror(errno.EIO)}"
            with pytest.raises(OSError, match=message):
                slot.get()
    assert slot.get().sum() == 1000


def test_a_tensor_that_cannot_be_copied_takes_nothing(tmp_path):
    store = vf.DiskStore(tmp_path, inflight_bytes=MIB)
    errors = []
    for _ in range(10):
        with pytest.raises((RuntimeError, NotImplementedError)) as raised:
            store.put(torch.empty(1 << 17, device="meta"))
        errors.append(raised.value)  # whose frames stay alive
    settle(store)
    assert store.put(torch.ones(1 << 18)).get().sum() == 1 << 18
    assert size_of_file(tmp_path) == 16 * MIB


# Processes and threads.


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
def test_a_fork_writes_into_a_file_of_its_own(tmp_path):
    store = vf.DiskStore(tmp_path)
    before, freed = store.put(torch.full((64,), 1.0)), store.put(torch.full((64,), 2.0))
    settle(store)
    restored = before.get()
    del freed  # both processes would use this block again
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            mine = store.put(torch.full((64,), 3.0))
            os.write(write_end, b"put")
            try:
                before.get()
            except RuntimeError as error:
                os.write(write_end, b" refused" if "before a fork" in str(error) else b" ?")
            before.prefetch()
            restored.fill_(5.0)
            settle(store)
            crowd_out(store)
            os.write(write_end, b" good" if mine.get().eq(3.0).all() else b" wrong")
            del before, restored
            os.write(write_end, b" done")
        os._exit(0)
    after = store.put(torch.full((64,), 4.0))
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"put refused good done"
    assert restored.eq(1.0).all()
    crowd_out(store)
    assert before.get().eq(1.0).all() and after.get().eq(4.0).all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
def test_a_fork_does_not_wait_for_a_lock_that_a_thread_of_its_parent_held(tmp_path):
    store = vf.DiskStore(tmp_path)
    slots = [store.put(torch.full((64,), float(i))) for i in range(2)]
    settle(store)
    restored = slots[0].get()
    with store._traffic:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                slots[1].prefetch()
                del slots, restored
                os._exit(0 if store.put(torch.ones(3)).get().sum() == 3 else 1)
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_share_a_store(tmp_path):
    store, start, wrong = vf.DiskStore(tmp_path, inflight_bytes=MIB), threading.Barrier(4), []

    def work(number):
        start.wait()
        for i in range(50):
            tensors = [torch.full((size,), float(1000 * number + i)) for size in (3, 50_000)]
            slots = [store.put(tensor) for tensor in tensors]
            if not all(torch.equal(slot.get(), tensor) for slot, tensor in zip(slots, tensors, strict=True)):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
