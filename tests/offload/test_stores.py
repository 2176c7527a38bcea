"""Stores give back what they were given, and the disk store leaves nothing behind."""

import contextlib
import errno
import gc
import itertools
import os
import resource
import threading

import pytest
import torch

import veofunc as vf
from tests.limits import largest_file
from veofunc.offload.layout import Layout

FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8]
OTHERS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
]
COMPLEX = [torch.complex64, torch.complex128]

# Every way to lie in memory that a saved tensor comes with.
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "slice": lambda t: t[1:3],
    "column": lambda t: t[:, 2],
    "every second": lambda t: t[:, ::2],
    "offset": lambda t: t.view(-1)[5:],
    "expanded rows": lambda t: t[:1].expand(7, 6),
    "expanded columns": lambda t: t[:, :1].expand(4, 50),
    "expanded scalar": lambda t: t[0, 0].expand(3, 5),
    "new dimension": lambda t: t.unsqueeze(1).expand(4, 3, 6),
    "size 1 with stride 0": lambda t: t.as_strided((1, 6), (0, 1)),
    "overlapping": lambda t: t.as_strided((3, 4), (1, 1)),
    "0-dim": lambda t: t[1, 1],
    "chunk": lambda t: t.chunk(3, dim=-1)[1],
    "channels_last": lambda t: t.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
}


def stores(directory):
    return [vf.DiskStore(directory), vf.HostStore()]


def numbers(dtype):
    """24 different values (as far as the dtype has them) as a matrix [4, 6]."""
    values = torch.arange(-4, 20).view(4, 6)
    if dtype in FLOAT8 or dtype == torch.bool or not dtype.is_signed:
        values = values.abs()
    return values.float().to(dtype) if dtype.is_floating_point else values.to(dtype)


def same_bytes(a, b):
    return bytes(a.contiguous().view(-1).view(torch.uint8)) == bytes(
        b.contiguous().view(-1).view(torch.uint8)
    )


def open_file(directory):
    """The one nameless file that this process has open in `directory`, as a path."""
    links = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links[f"/proc/self/fd/{number}"] = os.readlink(f"/proc/self/fd/{number}")
    (found,) = [path for path, target in links.items() if target.startswith(f"{directory}/")]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gives_back_values_strides_dtype_and_device(layout, tmp_path):
    tensor = LAYOUTS[layout](numbers(torch.float32))
    for store in stores(tmp_path):
        restored = store.put(tensor).get()
        assert torch.equal(restored, tensor)
        assert restored.shape == tensor.shape
        assert restored.stride() == tensor.stride()
        assert (restored.dtype, restored.device) == (tensor.dtype, tensor.device)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS + COMPLEX, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded rows", "0-dim"])
def test_gives_back_every_dtype_bit_for_bit(dtype, layout, tmp_path):
    tensor = LAYOUTS[layout](numbers(dtype))
    for store in stores(tmp_path):
        restored = store.put(tensor).get()
        assert restored.dtype == dtype
        assert restored.stride() == tensor.stride()
        assert same_bytes(restored, tensor)


def test_gives_back_nan_payloads_infinities_and_minus_zero_bit_for_bit(tmp_path):
    bits = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800000, -0x80000000, 1], dtype=torch.int32)
    for store in stores(tmp_path):
        assert torch.equal(store.put(bits.view(torch.float32)).get().view(torch.int32), bits)


def test_gives_back_lazy_conjugates_and_negatives_with_their_values(tmp_path):
    z = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).view(2, 3)
    for store in stores(tmp_path):
        for tensor in (z.conj(), z.conj().imag, z.conj().t(), z.mH):
            assert tensor.is_conj() or tensor.is_neg()
            restored = store.put(tensor).get()
            assert restored.tolist() == tensor.tolist()
            assert restored.stride() == tensor.stride()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "overlapping"])
def test_never_moves_more_bytes_than_the_tensor_touches(layout, tmp_path):
    tensor = LAYOUTS[layout](numbers(torch.float32))
    everywhere = itertools.product(*map(range, tensor.shape))
    touched = {tensor[index].data_ptr() for index in everywhere}
    nbytes = 4 * len(touched)
    assert Layout.of(tensor).nbytes == nbytes
    slot = vf.DiskStore(tmp_path).put(tensor)
    assert os.stat(open_file(tmp_path)).st_size == nbytes
    assert torch.equal(slot.get(), tensor)


def test_gives_back_the_value_at_the_time_of_put_and_each_time_a_new_tensor(tmp_path):
    for store in stores(tmp_path):
        tensor = torch.arange(4.0)
        slot = store.put(tensor)
        tensor.zero_()
        slot.get().zero_()
        assert slot.get().tolist() == [0, 1, 2, 3]


def test_works_under_another_default_device_and_dtype(tmp_path):
    for store in stores(tmp_path):
        tensor = torch.arange(4.0)
        with torch.device("meta"):
            restored = store.put(tensor).get()
        assert restored.device == tensor.device
        assert torch.equal(restored, tensor)


def test_disk_store_takes_what_is_in_host_memory(tmp_path):
    assert vf.DiskStore(tmp_path).accepts(torch.ones(3))
    assert isinstance(vf.DiskStore(tmp_path), vf.Store)


def test_disk_store_makes_its_directory_and_leaves_no_name_in_it(tmp_path):
    directory = tmp_path / "new" / "deep"
    store = vf.DiskStore(directory)
    slot = store.put(torch.ones(1000))
    assert os.listdir(directory) == []
    assert "(deleted)" in os.readlink(open_file(directory))
    assert slot.get().sum() == 1000


def test_disk_store_prints_as_what_one_would_type(tmp_path):
    assert repr(vf.DiskStore(tmp_path)) == f"DiskStore({str(tmp_path)!r})"


def test_disk_store_closes_its_file_with_the_last_slot(tmp_path):
    store = vf.DiskStore(tmp_path)
    slot = store.put(torch.ones(10))
    del store
    gc.collect()
    assert slot.get().sum() == 10
    del slot
    gc.collect()
    with pytest.raises(ValueError, match="not enough values"):
        open_file(tmp_path)


def test_disk_store_uses_space_again(tmp_path):
    store = vf.DiskStore(tmp_path)
    held = store.put(torch.ones(50))
    for i in range(50):
        slots = [store.put(torch.full((100,), float(10 * i + j))) for j in range(4)]
        assert [int(slot.get()[0]) - 10 * i for slot in slots] == [0, 1, 2, 3]
        del slots
    assert os.stat(open_file(tmp_path)).st_size == 200 + 4 * 400
    assert held.get().sum() == 50


def test_disk_store_does_not_grow_with_the_number_of_different_sizes(tmp_path):
    """As when every batch has another length."""
    store = vf.DiskStore(tmp_path)
    for num_tokens in range(1, 200):
        slots = [store.put(torch.full((num_tokens,), float(j))) for j in range(3)]
        assert [int(slot.get()[0]) for slot in slots] == [0, 1, 2]
        del slots
    assert os.stat(open_file(tmp_path)).st_size <= 3 * 4 * 199


def test_disk_store_never_gives_out_space_in_use(tmp_path):
    """Random puts and deaths, each slot checked against a copy."""
    generator = torch.Generator().manual_seed(0)
    store, alive = vf.DiskStore(tmp_path), {}
    for step in range(600):
        size = int(torch.randint(1, 6, (), generator=generator))
        tensor = torch.randn(size, generator=generator)
        alive[step] = (tensor, store.put(tensor))
        if torch.rand((), generator=generator) < 0.6:
            del alive[list(alive)[int(torch.randint(len(alive), (), generator=generator))]]
        if step % 50 == 0:
            assert all(torch.equal(slot.get(), tensor) for tensor, slot in alive.values())
    assert all(torch.equal(slot.get(), tensor) for tensor, slot in alive.values())


def test_disk_store_holds_thousands_of_slots_with_one_file_descriptor(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        store = vf.DiskStore(tmp_path)
        slots = [store.put(torch.full((3,), float(i))) for i in range(6000)]
        assert all(slot.get().tolist() == [i, i, i] for i, slot in enumerate(slots))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_disk_raises_with_path_and_cause_and_what_is_there_stays_good(tmp_path):
    store = vf.DiskStore(tmp_path)
    message = f"cannot offload 1048576 bytes to a file in {tmp_path}: File too large"
    with largest_file(1 << 20):
        first = store.put(torch.ones(1 << 17))
        with pytest.raises(OSError, match=message) as raised:
            store.put(torch.full((1 << 18,), 2.0))
        assert raised.value.errno == errno.EFBIG
        assert isinstance(raised.value.__cause__, OSError)
        assert first.get().sum() == 1 << 17
        del first
        assert store.put(torch.full((1 << 18,), 2.0)).get().sum() == 2 << 18


def test_a_file_that_lost_its_end_raises_with_the_directory(tmp_path):
    slot = vf.DiskStore(tmp_path).put(torch.ones(100))
    os.truncate(open_file(tmp_path), 40)
    with pytest.raises(OSError, match=f"offload file in {tmp_path} ended at 40 bytes"):
        slot.get()


def test_a_directory_that_cannot_be_made_raises_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        vf.DiskStore(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        vf.DiskStore(tmp_path / "file" / "below")


def test_writes_and_reads_that_stop_early_go_on(tmp_path, monkeypatch):
    """The kernel may write or read less than it was asked for, and for more than 2 GiB always does."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: pwrite(file, content[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:5]], offset))
    store = vf.DiskStore(tmp_path)
    tensors = [torch.randn(33), torch.randn(4, 5).t(), torch.ones((), dtype=torch.bool)]
    slots = [store.put(tensor) for tensor in tensors]
    assert all(torch.equal(slot.get(), tensor) for slot, tensor in zip(slots, tensors, strict=True))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_device_raises_with_the_directory(tmp_path, monkeypatch, code):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    store = vf.DiskStore(tmp_path)
    slot = store.put(torch.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        patch.setattr(os, "preadv", fail)
        for act in (lambda: store.put(torch.ones(3)), slot.get):
            with pytest.raises(OSError, match=f"{tmp_path}: {os.strerror(code)}") as raised:
                act()
            assert raised.value.errno == code
    assert slot.get().sum() == 3


def test_threads_share_a_disk_store(tmp_path):
    store, start, wrong = vf.DiskStore(tmp_path), threading.Barrier(4), []

    def work(number):
        start.wait()
        for i in range(100):
            tensors = [torch.full((size,), float(1000 * number + i)) for size in (3, 50)]
            slots = [store.put(tensor) for tensor in tensors]
            if not all(torch.equal(slot.get(), tensor) for slot, tensor in zip(slots, tensors, strict=True)):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
def test_a_fork_writes_into_a_file_of_its_own(tmp_path):
    store = vf.DiskStore(tmp_path)
    before, freed = store.put(torch.full((64,), 1.0)), store.put(torch.full((64,), 2.0))
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
            os.write(write_end, b" good" if mine.get().eq(3.0).all() else b" wrong")
        os._exit(0)
    after = store.put(torch.full((64,), 4.0))
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"put refused good"
    assert before.get().eq(1.0).all() and after.get().eq(4.0).all()


def test_an_interrupted_write_gives_its_block_back(tmp_path, monkeypatch):
    store = vf.DiskStore(tmp_path)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put(torch.ones(8))
    assert store.put(torch.full((8,), 2.0)).get().tolist() == [2.0] * 8
    assert os.fstat(store._file.file.fileno()).st_size == 32
