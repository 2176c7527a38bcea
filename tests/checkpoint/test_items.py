import io
import struct
import zipfile
from math import prod
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensors import DTYPES, bytes_of, random_bits
from veofunc.checkpoint import items
from veofunc.checkpoint.items import ALIGNMENT, Item, item, pieces

SHAPES = [(), (0,), (3,), (2, 0), (4, 5, 6)]

all_kinds = pytest.mark.parametrize(
    "tensor",
    [random_bits(dtype, shape) for dtype in DTYPES for shape in SHAPES],
    ids=lambda t: f"{t.dtype}{[*t.shape]}",
)


def archive_of(tensor: torch.Tensor) -> bytearray:
    """A whole item: what is around the values, the values, and their checksum in both places."""
    around, values = item(tensor.dtype, tuple(tensor.shape)), bytes_of(tensor)
    end = len(around.before) + len(values)
    content = bytearray(around.before + values + around.after)
    for place in (around.crc_before, end + around.crc_after):
        content[place : place + 4] = crc32(values).to_bytes(4, "little")
    return content


@all_kinds
def test_torch_loads_an_item_bit_for_bit(tensor):
    loaded = torch.load(io.BytesIO(archive_of(tensor)), weights_only=True)
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert loaded.stride() == tensor.stride()
    assert bytes_of(loaded) == bytes_of(tensor)


@all_kinds
def test_an_item_is_an_intact_archive_of_the_values(tensor):
    content = archive_of(tensor)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == bytes_of(tensor)
        for info in archive.infolist():  # what stands before an entry, which zipfile does not look at
            checksum, *sizes = struct.unpack_from("<3I", content, info.header_offset + 14)
            assert (checksum, sizes) == (info.CRC, [info.file_size] * 2)


@all_kinds
def test_an_item_has_the_entries_that_torch_save_cannot_do_without(tensor):
    saved = io.BytesIO()
    torch.save(tensor, saved)
    with zipfile.ZipFile(io.BytesIO(archive_of(tensor))) as ours, zipfile.ZipFile(saved) as theirs:
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name)


@all_kinds
def test_the_values_begin_at_a_multiple_of_the_alignment(tensor):
    assert len(item(tensor.dtype, tuple(tensor.shape)).before) % ALIGNMENT == 0
    assert ALIGNMENT == 64


def test_a_changed_value_does_not_match_its_checksum():
    tensor = random_bits(torch.float32, (3,))
    content = archive_of(tensor)
    content[len(item(torch.float32, (3,)).before)] ^= 1
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() == "archive/data/0"


def test_the_surroundings_are_made_once():
    assert item(torch.float32, (7, 7)) is item(torch.float32, (7, 7))
    assert isinstance(item(torch.float32, (7, 7)), Item)


@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    most=st.integers(16, 300),
)
def test_pieces_tile_any_shape_once_in_the_order_of_memory(shape, itemsize, most):
    places = torch.arange(prod(shape)).view(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "PIECE_BYTES", most)
        boxes = [*pieces(shape, itemsize)]
    covered = []
    for offsets, sizes in boxes:
        assert prod(sizes) * itemsize <= most
        part = places[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
        assert part.shape == sizes
        covered += part.reshape(-1).tolist()
    assert covered == list(range(prod(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_small_enough_is_one_piece(shape):
    assert [*pieces(shape, 4)] == [((0,) * len(shape), shape)]


def test_no_piece_is_smaller_than_it_must_be(monkeypatch):
    monkeypatch.setattr(items, "PIECE_BYTES", 100)  # two rows of 10 values of 4 bytes
    assert [sizes for _, sizes in pieces((5, 10), 4)] == [(2, 10), (2, 10), (1, 10)]
