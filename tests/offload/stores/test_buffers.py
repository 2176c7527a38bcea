"""Buffers lie on pages, are used again, and are heard of when the last tensor over them dies."""

import mmap

import pytest
import torch

from veofunc.offload.stores.buffers import Buffers, shown, shown_until
from veofunc.offload.stores.space import PAGE


@pytest.fixture
def mapped(monkeypatch):
    """Bytes of every stretch of memory that is mapped during the test."""
    sizes = []

    class Counted(mmap.mmap):
        def __new__(cls, fileno, length, **kwargs):
            sizes.append(length)
            return super().__new__(cls, fileno, length, **kwargs)

    monkeypatch.setattr(mmap, "mmap", Counted)
    return sizes


def address(buffer):
    return shown(buffer, 1).data_ptr()


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 100_000])
def test_a_buffer_is_whole_pages(nbytes):
    buffers = Buffers(1 << 20)
    for buffer in (buffers.take(10), buffers.take(nbytes), buffers.extra(nbytes)):
        assert address(buffer) % PAGE == len(buffer.pages) % PAGE == 0
    assert len(buffer.pages) == max(nbytes + -nbytes % PAGE, PAGE)


def test_one_stretch_is_mapped_for_all_of_them(mapped):
    buffers = Buffers(10 * PAGE)
    for i in range(100):
        taken = [buffers.take(nbytes) for nbytes in (PAGE, 3 * PAGE + i, 2 * PAGE)]
        for buffer in taken:
            buffers.give(buffer)
    assert mapped == [10 * PAGE]
    buffers.give(buffers.extra(5))
    assert mapped == [10 * PAGE, PAGE]


def test_buffers_do_not_overlap():
    buffers = Buffers(4 * PAGE)
    taken = [buffers.take(PAGE) for _ in range(4)]
    assert buffers.take(1) is None
    for i, buffer in enumerate(taken):
        shown(buffer, PAGE).fill_(i)
    assert [set(shown(buffer, PAGE).tolist()) for buffer in taken] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize(("capacity", "nbytes"), [(0, 0), (5000, 4500), (8192, 8193)])
def test_what_never_fits_is_known(capacity, nbytes):
    assert not Buffers(capacity).can_hold(nbytes)
    assert Buffers(capacity).take(nbytes) is None
    assert Buffers(8192).can_hold(8192)


@pytest.mark.parametrize("capacity", [1 << 60, 1 << 80])
def test_a_stretch_that_cannot_be_had_is_an_error(capacity):
    with pytest.raises(ValueError, match=f"there is no stretch of {capacity} bytes of memory"):
        Buffers(capacity)


def test_the_end_of_the_last_tensor_over_a_buffer_is_heard():
    heard = []
    buffer = Buffers(PAGE).take(12)
    tensor = shown_until(buffer, 12, lambda: heard.append("ended")).view(torch.float32)
    tensor.copy_(torch.tensor([1.0, 2.0, 3.0]))
    view = tensor[1:]
    del tensor
    assert heard == []
    assert view.tolist() == [2.0, 3.0]
    assert shown(buffer, 12).view(torch.float32).tolist() == [1.0, 2.0, 3.0]
    del view
    assert heard == ["ended"]


def test_a_tensor_outlives_the_buffers_that_it_is_in():
    buffers = Buffers(PAGE)
    tensor = shown_until(buffers.take(4), 4, lambda: None).fill_(7)
    del buffers
    assert tensor.tolist() == [7, 7, 7, 7]
