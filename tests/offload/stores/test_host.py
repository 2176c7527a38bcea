"""`HostStore`: what it takes, what it costs, and what it refuses.

How its copies run beside the computation is in `test_ferry.py`, which memory they use in `test_arena.py`.
"""

import math
import warnings

import pytest
import torch

import veofunc as vf
from veofunc.offload.stores.ferry import MemoryOrder

NO_ACCELERATOR = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="host memory can be page-locked where there is an accelerator"
)


class AnywhereStore(vf.HostStore):
    """Takes tensors in host memory for those of an accelerator."""

    def accepts(self, tensor):
        return True


def test_takes_only_what_is_elsewhere():
    assert not vf.HostStore().accepts(torch.ones(3))
    assert vf.HostStore().accepts(torch.ones(3, device="meta"))
    assert isinstance(vf.HostStore(), vf.Store)


@pytest.mark.parametrize("name", ["cache_bytes", "inflight_bytes"])
@pytest.mark.parametrize("value", [-1, True, False, 1.0, 1e9, math.nan, math.inf, "1", None])
def test_a_number_of_bytes_is_an_int_of_at_least_zero(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be an int >= 0 \(bytes\), got {value!r}"):
        vf.HostStore(**{name: value})


@pytest.mark.parametrize("value", [0, 1, "yes", math.nan])
def test_switches_are_booleans(value):
    with pytest.raises(ValueError, match=f"pin must be True, False or None.*, got {value!r}"):
        vf.HostStore(pin=value)
    with pytest.raises(ValueError, match=f"sync must be True or False, got {value!r}"):
        vf.HostStore(sync=value)
    with pytest.raises(ValueError, match="sync must be True or False, got None"):
        vf.HostStore(sync=None)


@pytest.mark.parametrize("value", [torch.float16, torch.float32, torch.uint8, "int8", 8, int])
def test_a_codec_is_one_that_exists(value):
    with pytest.raises(ValueError, match=r"codec must be torch\.bfloat16, torch\.int8 or None, got"):
        vf.HostStore(codec=value)


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        vf.HostStore(True)


def test_prints_as_what_one_would_type():
    assert repr(vf.HostStore()) == "HostStore()"
    assert repr(vf.HostStore(pin=False, cache_bytes=0)) == "HostStore(pin=False, cache_bytes=0)"
    store = vf.HostStore(inflight_bytes=7, sync=True, codec=torch.int8)
    assert repr(store) == "HostStore(inflight_bytes=7, sync=True, codec=torch.int8)"


@NO_ACCELERATOR
@pytest.mark.parametrize("sync", [False, True])
def test_memory_that_cannot_be_pinned_is_an_error_if_it_must_be(sync):
    with pytest.raises(RuntimeError, match=r"cannot page-lock 1048576 bytes of host memory: \w"):
        AnywhereStore(pin=True, sync=sync).put(torch.ones(3))


@NO_ACCELERATOR
@pytest.mark.parametrize("sync", [False, True])
def test_memory_that_cannot_be_pinned_is_pageable_after_one_warning(sync):
    store = AnywhereStore(sync=sync)
    with pytest.warns(
        UserWarning, match="cannot page-lock.*goes on with pageable memory.*pin=False"
    ) as warned:
        slots = [store.put(torch.full((3,), float(i))) for i in range(3)]
    assert len(warned) == 1
    assert [slot.get()[0] for slot in slots] == [0, 1, 2]


def test_memory_that_need_not_be_pinned_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AnywhereStore(pin=False).put(torch.ones(3)).get().sum() == 3


def test_the_value_at_the_time_of_put_comes_back_as_a_new_tensor_each_time():
    tensor = torch.arange(4.0)
    slot = vf.HostStore().put(tensor)
    tensor.zero_()
    slot.get().zero_()
    assert slot.get().tolist() == [0, 1, 2, 3]


def test_with_a_codec_less_memory_is_used_and_values_are_near():
    tensor = torch.randn(64, 1 << 16, generator=torch.Generator().manual_seed(0))
    for codec, share in ((torch.bfloat16, 2), (torch.int8, 4)):
        store = vf.HostStore(codec=codec)
        slot = store.put(tensor)
        used = store._pageable._arena.nbytes
        assert used <= 1.3 * tensor.nbytes / share
        restored = slot.get()
        assert restored.dtype == torch.float32
        assert 0 < (restored - tensor).abs().max() < 0.05


MATRIX = torch.arange(24.0).view(4, 6)


DENSE = {
    "contiguous": MATRIX,
    "transposed": MATRIX.t(),
    "slice": MATRIX[1:3],
    "offset": MATRIX.view(-1)[5:],
    "expanded rows": MATRIX[:1].expand(7, 6),
    "expanded scalar": MATRIX[0, 0].expand(3, 5),
    "permuted": MATRIX.view(2, 3, 4).permute(2, 0, 1),
    "size 1 with stride 0": MATRIX.as_strided((1, 6), (0, 1)),
    "0-dim": MATRIX[2, 3],
}


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE)
def test_what_lies_densely_in_memory_is_flattened_and_rebuilt_without_a_copy(tensor):
    order = MemoryOrder.of(tensor)
    flat = order.flatten(tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    rebuilt = order.rebuild(flat)
    assert rebuilt.data_ptr() == tensor.data_ptr()
    assert rebuilt.stride() == tensor.stride()
    assert torch.equal(rebuilt, tensor)


@pytest.mark.parametrize("tensor", [MATRIX[:, ::2], MATRIX[:, 1:3], MATRIX.t()[::2], MATRIX[:, 2]])
def test_gaps_are_not_moved(tensor):
    order = MemoryOrder.of(tensor)
    flat = order.flatten(tensor)
    assert flat.numel() == 4 * tensor.numel()
    rebuilt = order.rebuild(flat)
    assert rebuilt.stride() == tensor.stride()
    assert torch.equal(rebuilt, tensor)
