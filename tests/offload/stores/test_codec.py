"""Codecs keep their promise: errors within the bounds, and nothing wrong that looks right."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import veofunc as vf
from veofunc.offload.stores.codec import check_codec, put_coded

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
LEAST = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149, torch.float64: -1074}


class Kept:
    """A slot of a store that keeps tensors as they are, and knows what it was given."""

    def __init__(self, tensor):
        self.tensor, self.num_prefetched = tensor.detach(), 0

    def prefetch(self):
        self.num_prefetched += 1

    def get(self):
        return self.tensor


def coded(tensor, codec):
    """What comes back for `tensor`, and the parts that the store was given."""
    parts = []

    def put(part):
        parts.append(Kept(part))
        return parts[-1]

    return put_coded(put, tensor, codec).get(), [part.tensor for part in parts]


def half_a_unit(y, dtype):
    """Half a unit in the last place of `y`, exactly."""
    exponent = math.frexp(float(y))[1] - BITS[dtype]
    return Fraction(2) ** (max(exponent, LEAST[dtype]) - 1)


def bound_of_int8(row, y, dtype):
    """The module's promise, in exact arithmetic, for an element of `row` that came back as `y`."""
    wide = dtype is torch.float64
    absmax = max(abs(x) for x in row)
    step = max(absmax, 127 * Fraction(2) ** (-1022 if wide else -126)) / 254
    return step + 3 * absmax * Fraction(2) ** (-53 if wide else -24) + half_a_unit(y, dtype)


def bound_of_bfloat16(x, dtype):
    size = abs(x)
    if size < Fraction(2) ** -126:
        return Fraction(2) ** -133
    return size / 257 + (size * Fraction(2) ** -24 if dtype is torch.float64 else 0)


def values(dtype):
    greatest = torch.finfo(dtype).max
    width = 64 if dtype is torch.float64 else 32
    return st.floats(-greatest, greatest, width=width) | st.floats(-4, 4, width=width)


@st.composite
def matrices(draw, dtype):
    row = st.lists(values(dtype), min_size=13, max_size=13)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=3)), dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_int8_is_within_its_bound(dtype, data):
    matrix = data.draw(matrices(dtype))
    restored, parts = coded(matrix, torch.int8)
    assert parts[0].dtype == torch.int8
    for row, row_restored in zip(matrix.tolist(), restored.tolist(), strict=True):
        exact = [Fraction(x) for x in row]
        for x, y in zip(exact, row_restored, strict=True):
            assert math.isfinite(y)
            assert abs(Fraction(y) - x) <= bound_of_int8(exact, y, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bfloat16_is_within_its_bound(dtype, data):
    matrix = data.draw(matrices(dtype))
    restored, _ = coded(matrix, torch.bfloat16)
    greatest = Fraction(torch.finfo(torch.bfloat16).max)
    for x, y in zip(matrix.flatten().tolist(), restored.flatten().tolist(), strict=True):
        if abs(Fraction(x)) <= greatest:
            assert abs(Fraction(y) - Fraction(x)) <= bound_of_bfloat16(Fraction(x), dtype)
        else:
            assert y == math.copysign(math.inf, x) or abs(Fraction(y)) == greatest


def test_the_bounds_are_reached():
    """So no smaller ones could be promised."""
    restored, _ = coded(torch.tensor([1 + 2.0**-8]), torch.bfloat16)
    assert Fraction(restored.item()) == 1  # off by x / 257
    row = torch.tensor([[254.0, *[1.0] * 7]])  # half way between 0 and the step, 2
    restored, _ = coded(row, torch.int8)
    assert (restored - row).abs().max() == 1 == 254 / 254


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", ["greatest", "least normal", "least", "zero"])
def test_int8_is_within_its_bound_at_the_ends_of_a_dtype(dtype, scale):
    limits = torch.finfo(dtype)
    size = {"greatest": limits.max, "least normal": limits.tiny, "least": 2.0 ** LEAST[dtype], "zero": 0.0}[
        scale
    ]
    matrix = (torch.linspace(-1, 1, 33, dtype=torch.float64) * size).to(dtype)[None]
    (restored,) = coded(matrix, torch.int8)[0].tolist()
    exact = [Fraction(x) for x in matrix[0].tolist()]
    for x, y in zip(exact, restored, strict=True):
        assert math.isfinite(y)
        assert abs(Fraction(y) - x) <= bound_of_int8(exact, y, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_comes_back_as_nan_and_leaves_the_others_alone(dtype, wrong):
    matrix = torch.ones(3, 8, dtype=dtype)
    matrix[1, 5] = wrong
    restored, _ = coded(matrix, torch.int8)
    assert restored[1].isnan().all()
    assert (restored[[0, 2]] == 1).all()


def test_what_is_not_finite_stays_so_in_bfloat16():
    restored, _ = coded(torch.tensor([1.0, math.inf, -math.inf, math.nan, 1e300]), torch.bfloat16)
    assert str(restored.tolist()) == "[1.0, inf, -inf, nan, inf]"


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "every second": lambda t: t[:, ::2],
    "offset": lambda t: t[1:, 1:],
    "expanded rows": lambda t: t[:1].expand(50, 8),
    "new dimension": lambda t: t.unsqueeze(1).expand(6, 5, 8),
    "permuted": lambda t: t.view(2, 3, 8).permute(1, 2, 0).unsqueeze(0),
    "negative": lambda t: torch._neg_view(t),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_dtype_come_back_and_repetition_is_not_stored(layout, codec, dtype):
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor = LAYOUTS[layout](matrix)
    restored, parts = coded(tensor, codec)
    assert restored.stride() == tensor.stride()
    assert (restored.shape, restored.dtype) == (tensor.shape, tensor.dtype)
    assert torch.allclose(restored, tensor, atol=0.02, rtol=0.01)
    assert sum(part.untyped_storage().nbytes() for part in parts) <= matrix.nbytes


@pytest.mark.parametrize(
    ("tensor", "codec"),
    [
        (torch.arange(8), torch.int8),
        (torch.ones(8, dtype=torch.bool), torch.int8),
        (torch.randn(8).to(torch.float8_e5m2), torch.int8),
        (torch.randn(8, dtype=torch.complex64), torch.int8),
        (torch.randn(8, dtype=torch.float16), torch.bfloat16),
        (torch.randn(8, dtype=torch.bfloat16), torch.bfloat16),
        (torch.randn(4, 4, dtype=torch.bfloat16), torch.int8),
        (torch.randn(4, 1), torch.int8),
        (torch.randn(4, 1).expand(4, 9), torch.int8),
        (torch.randn(()), torch.int8),
        (torch.randn(8), None),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else str(value),
)
def test_what_would_not_become_smaller_is_kept_exactly(tensor, codec):
    restored, (part,) = coded(tensor, codec)
    assert part.dtype == tensor.dtype
    assert restored.tolist() == tensor.tolist()


def test_a_tensor_takes_as_many_bytes_as_promised():
    tensor = torch.randn(100, 256)
    assert sum(part.nbytes for part in coded(tensor, torch.bfloat16)[1]) == tensor.nbytes / 2
    assert sum(part.nbytes for part in coded(tensor, torch.int8)[1]) == tensor.nbytes / 4 + 100 * 4


@pytest.mark.parametrize("codec", [torch.bfloat16, torch.int8], ids=str)
def test_prefetch_reaches_every_part(codec):
    parts = []
    slot = put_coded(lambda part: parts.append(Kept(part)) or parts[-1], torch.randn(8), codec)
    slot.prefetch()
    assert [part.num_prefetched for part in parts] == [1] * len(parts)


def test_prefetch_is_as_optional_as_in_any_slot():
    class Bare:
        def __init__(self, tensor):
            self.get = lambda: tensor

    slot = put_coded(Bare, torch.ones(8), torch.int8)
    slot.prefetch()
    assert slot.get().tolist() == [1] * 8


@pytest.mark.parametrize("codec", [torch.bfloat16, torch.int8], ids=str)
def test_the_tensor_is_left_as_it_was_and_has_no_graph(codec):
    tensor = torch.randn(2, 8, requires_grad=True)
    before = tensor.detach().clone()
    restored, parts = coded(tensor, codec)
    assert torch.equal(tensor.detach(), before) and tensor._version == 0
    assert not restored.requires_grad and not any(part.requires_grad for part in parts)


@pytest.mark.parametrize("codec", [torch.float32, "int8", 8, True])
def test_an_unknown_codec_is_refused(codec):
    with pytest.raises(ValueError, match=r"codec must be torch\.bfloat16, torch\.int8 or None, got"):
        check_codec(codec)


@pytest.mark.parametrize("codec", [torch.bfloat16, torch.int8])
def test_both_stores_take_a_codec(codec, tmp_path):
    tensor = torch.randn(5, 64)
    for store in (vf.DiskStore(tmp_path, codec=codec), vf.HostStore(codec=codec)):
        assert f"codec={codec}" in repr(store)
        restored = store.put(tensor).get()
        assert restored.dtype == tensor.dtype
        assert not torch.equal(restored, tensor)
        torch.testing.assert_close(restored, tensor, rtol=0, atol=float(tensor.abs().max()) / 100)
    with pytest.raises(ValueError, match=r"codec must be torch.bfloat16, torch.int8 or None"):
        vf.DiskStore(tmp_path, codec=torch.float16)
