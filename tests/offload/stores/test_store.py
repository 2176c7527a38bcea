"""Stores give back what they were given."""

import itertools

import pytest
import torch

import veofunc as vf
from tests.offload.layouts import DTYPES, LAYOUTS, bytes_of, numbers
from veofunc.offload.layout import Layout

# The temporary directory may be on a file system without direct I/O.
pytestmark = pytest.mark.filterwarnings("ignore:no direct I/O:UserWarning")


def stores(directory):
    return [vf.DiskStore(directory), vf.HostStore()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gives_back_values_strides_dtype_and_device(layout, tmp_path):
    tensor = LAYOUTS[layout](numbers(torch.float32))
    for store in stores(tmp_path):
        restored = store.put(tensor).get()
        assert torch.equal(restored, tensor)
        assert restored.shape == tensor.shape
        assert restored.stride() == tensor.stride()
        assert (restored.dtype, restored.device) == (tensor.dtype, tensor.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded rows", "0-dim"])
def test_gives_back_every_dtype_bit_for_bit(dtype, layout, tmp_path):
    tensor = LAYOUTS[layout](numbers(dtype))
    for store in stores(tmp_path):
        restored = store.put(tensor).get()
        assert restored.dtype == dtype
        assert restored.stride() == tensor.stride()
        assert bytes_of(restored) == bytes_of(tensor)


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
def test_never_moves_more_bytes_than_the_tensor_touches(layout):
    tensor = LAYOUTS[layout](numbers(torch.float32))
    everywhere = itertools.product(*map(range, tensor.shape))
    touched = {tensor[index].data_ptr() for index in everywhere}
    assert Layout.of(tensor).nbytes == 4 * len(touched)


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
