"""The bytes around a tensor that make it one item of a `.distcp` file.

`torch.distributed.checkpoint` stores each piece of a tensor as `torch.save` would, a ZIP archive, at
some place of a file. What stands before and after the values depends on dtype and shape alone, but for
two copies of their CRC-32; so it is made once, and no save repeats it.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any
from zlib import crc32

import torch

__all__ = ["ALIGNMENT", "PIECE_BYTES", "Item", "item", "pieces"]

ALIGNMENT = 64  # bytes: of an item in its file, and of the values in their item
PIECE_BYTES = (
    128 << 20
)  # larger tensors are split: a ZIP entry ends at 4 GiB, and a checksum comes before its data


@dataclass(frozen=True)
class Item:
    """What surrounds the values of a piece.

    Attributes:
        before: bytes before the values; their CRC-32, little-endian, goes to `before[crc_before:]`.
        after: bytes after the values; their CRC-32 also goes to `after[crc_after:]`.
        crc_before: where in `before`.
        crc_after: where in `after`.
    """

    before: bytes
    after: bytes
    crc_before: int
    crc_after: int


@lru_cache(maxsize=4096)
def item(dtype: torch.dtype, shape: tuple[int, ...]) -> Item:
    """The surroundings of a contiguous tensor on the CPU."""
    nbytes = prod(shape) * dtype.itemsize
    head = [_Entry("archive/data.pkl", _pickled(dtype, shape)), _Entry("archive/byteorder", b"little")]
    values = _Entry("archive/data/0", b"", nbytes)
    tail = _Entry("archive/version", b"3\n")
    before, places = b"", []
    for entry in head:
        places.append(len(before))
        before += entry.header() + entry.content
    places.append(len(before))
    header = values.header(pad=-(len(before) + len(values.header())) % ALIGNMENT)
    crc_before = len(before) + _Entry.CRC_IN_HEADER
    before += header
    places.append(len(before) + nbytes)
    after = tail.header() + tail.content
    directory = [e.listing(place) for e, place in zip([*head, values, tail], places, strict=True)]
    crc_after = len(after) + sum(map(len, directory[:2])) + _Entry.CRC_IN_LISTING
    start, size = len(before) + nbytes + len(after), sum(map(len, directory))
    after += b"".join(directory) + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 4, 4, size, start, 0)
    return Item(before, after, crc_before, crc_after)


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes of at most `PIECE_BYTES` that tile `shape`, in the order of its memory."""
    for axis, size in enumerate(shape):
        row = prod(shape[axis + 1 :]) * itemsize
        if row * size <= PIECE_BYTES or row <= PIECE_BYTES:
            break
    else:
        axis, size, row = 0, 1, itemsize
    if prod(shape) * itemsize <= PIECE_BYTES:
        yield (0,) * len(shape), shape
        return
    num_rows = PIECE_BYTES // row
    outer = shape[:axis]
    for index in range(prod(outer)):
        above = []
        for length in reversed(outer):
            index, place = divmod(index, length)
            above.insert(0, place)
        for start in range(0, size, num_rows):
            offsets = (*above, start, *[0] * (len(shape) - axis - 1))
            yield offsets, (*[1] * axis, min(num_rows, size - start), *shape[axis + 1 :])


@dataclass(frozen=True)
class _Entry:
    """An uncompressed entry of a ZIP archive."""

    name: str
    content: bytes
    nbytes: int | None = None  # of content that is not here

    CRC_IN_HEADER = 14
    CRC_IN_LISTING = 16

    def header(self, pad: int = 0) -> bytes:
        """The local header; `pad` bytes (none, or at least 4) lie in its extra field."""
        if 0 < pad < 4:
            pad += ALIGNMENT
        extra = struct.pack("<2sH", b"FB", pad - 4) + b"Z" * (pad - 4) if pad else b""
        fields = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0, 0, 0, 0, *self._sums(), len(self.name), len(extra))
        return fields + self.name.encode() + extra

    def listing(self, place: int) -> bytes:
        """The line of the central directory for an entry at `place`."""
        sums = self._sums()
        fields = struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, 0, 0, 0, 0, *sums, len(self.name), 0, 0, 0, 0, 0, place
        )
        return fields + self.name.encode()

    def _sums(self) -> tuple[int, int, int]:
        size = len(self.content) if self.nbytes is None else self.nbytes
        return crc32(self.content), size, size


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What `torch.save` pickles for a contiguous tensor: how to rebuild it from its storage."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Rebuilt(dtype, shape))
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.description if isinstance(obj, _Storage) else None


@dataclass(frozen=True)
class _Storage:
    description: tuple[Any, ...]


class _Rebuilt:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]):
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self.shape, device="meta").stride()
        numel = prod(self.shape)
        untyped = self.dtype in torch.storage._new_dtypes()  # without a storage class of their own
        kind = torch.UntypedStorage if untyped else _storage_class(self.dtype)
        size = numel * self.dtype.itemsize if untyped else numel
        storage = _Storage(("storage", kind, "0", "cpu", size))
        args = (storage, 0, self.shape, strides, False, OrderedDict())
        if untyped:
            return torch._utils._rebuild_tensor_v3, (*args, self.dtype)
        return torch._utils._rebuild_tensor_v2, args


def _storage_class(dtype: torch.dtype) -> type:
    return getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
