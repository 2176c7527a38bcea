"""How tensors lie in memory: layouts, views of storages, and what wrappers are made of."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import veofunc as vf
from tests.offload.layouts import DTYPES, LAYOUTS, bytes_of, numbers
from tests.offload.table import CloneStore
from veofunc import policies as p
from veofunc.offload.layout import Layout, Parts, View, emptied, is_plain


def shown(tensor):
    """How often each byte of its storage is shown, element by element."""
    view = View.of(tensor)
    shows = Counter()
    for index in itertools.product(*map(range, view.shape)):
        start = view.offset + sum(i * stride for i, stride in zip(index, view.stride, strict=True))
        shows.update(range(start * tensor.element_size(), (start + 1) * tensor.element_size()))
    return shows


# Layouts.


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "overlapping"])
def test_bytes_of_a_layout_are_those_that_the_tensor_touches(layout):
    for dtype in (torch.float32, torch.int8, torch.complex128):
        tensor = LAYOUTS[layout](numbers(dtype))
        assert Layout.of(tensor).nbytes == len(shown(tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_rebuilds_what_it_took_to_the_host(layout):
    tensor = LAYOUTS[layout](numbers(torch.float32))
    host = Layout.of(tensor).to_host(tensor)
    assert (host.dtype, host.shape) == (torch.uint8, (Layout.of(tensor).nbytes,))
    rebuilt = Layout.of(tensor).rebuild(host)
    assert torch.equal(rebuilt, tensor)
    assert rebuilt.stride() == tensor.stride()
    assert rebuilt.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layout_rebuilds_every_dtype(dtype):
    tensor = numbers(dtype).t()
    rebuilt = Layout.of(tensor).rebuild(Layout.of(tensor).to_host(tensor))
    assert (rebuilt.dtype, rebuilt.stride()) == (tensor.dtype, tensor.stride())
    assert bytes_of(rebuilt) == bytes_of(tensor)


# Views.

VIEWS = {
    **LAYOUTS,
    "every third, repeated": lambda t: t.view(-1)[::3].unsqueeze(1).expand(8, 3),
    "all but the last": lambda t: t.view(-1)[:-1],
    "conjugate": lambda t: torch.view_as_complex(t.view(12, 2)).conj(),
    "imaginary part of a conjugate": lambda t: torch.view_as_complex(t.view(12, 2)).conj().imag,
    "another dtype": lambda t: t.view(torch.int16),
    "permuted": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
    "size 1": lambda t: t.view(1, 24, 1),
    "no elements": lambda t: t[:0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_shows_the_storage_as_the_tensor_did(view):
    tensor = VIEWS[view](numbers(torch.float32))
    again = View.of(tensor).on(tensor.untyped_storage())
    assert again.tolist() == tensor.tolist()
    assert (again.dtype, again.stride(), again.storage_offset()) == (
        tensor.dtype,
        tensor.stride(),
        tensor.storage_offset(),
    )
    assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert tensor.numel() == 0 or again.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_knows_how_far_it_reaches_and_whether_it_covers_the_storage(view):
    tensor = VIEWS[view](numbers(torch.float32))
    nbytes, shows = tensor.untyped_storage().nbytes(), shown(tensor)
    assert View.of(tensor).end == max(shows, default=-1) + 1
    is_lazy = tensor.is_conj() or tensor.is_neg()
    assert View.of(tensor).covers(nbytes) is (shows == Counter(range(nbytes)) and not is_lazy)


def test_every_small_view_covers_exactly_what_it_shows_once_each():
    flat = torch.zeros(4, dtype=torch.int8)
    found = 0
    for shape in itertools.product(range(5), repeat=2):
        for stride in itertools.product(range(5), repeat=2):
            span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            if 0 in shape or span <= 4:
                tensor = flat.as_strided(shape, stride)
                covers = shown(tensor) == Counter(range(4))
                assert View.of(tensor).covers(4) is covers, (shape, stride)
                found += covers
    assert found > 3


# What is plain.


class Tagged(torch.Tensor):
    pass


def in_vmap(what):
    seen = []
    torch.vmap(lambda t: seen.append(what(t)) or t)(torch.ones(2, 3))
    return seen[0]


def in_inference_mode():
    with torch.inference_mode():
        return torch.ones(3)


PLAIN = {
    "tensor": (lambda: torch.ones(3), True),
    "parameter": (lambda: nn.Parameter(torch.ones(3)), True),
    "buffer": (lambda: nn.Buffer(torch.ones(3)), True),
    "view": (lambda: torch.ones(4, 4)[1:, ::2], True),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), True),
    "no elements": (lambda: torch.ones(0, 3), False),
    "no memory": (lambda: torch.ones(3, device="meta"), False),
    "sparse": (lambda: torch.eye(3).to_sparse(), False),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), False),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), False),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), False),
    "jagged": (lambda: jagged(torch.ones(5, 2)), False),
    "subclass": (lambda: torch.ones(3).as_subclass(Tagged), False),
    "wrapper": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), False),
    "made in inference mode": (in_inference_mode, False),
    "zeros without memory": (lambda: torch._efficientzerotensor(3), False),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning", "ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:DeprecationWarning")
def test_plain_is_what_has_elements_of_its_own(kind):
    make, plain = PLAIN[kind]
    assert is_plain(make()) is plain


def test_batched_tensors_are_not_plain():
    assert in_vmap(is_plain) is False


# Wrappers.


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5]))


def nested_twice():
    inner = [TwoTensor(torch.full((2, 3), i), torch.full((2, 3), i + 0.5)) for i in (1.0, 2.0)]
    return TwoTensor(*inner)


WRAPPERS = {
    "two": (lambda: TwoTensor(torch.ones(2, 3), torch.zeros(2, 3)), 2),
    "two of two": (nested_twice, 4),
    "views": (lambda: TwoTensor(torch.ones(3, 2).t(), torch.zeros(3, 2).t()), 2),
    "jagged": (lambda: jagged(torch.arange(10.0).view(5, 2)), 1),
}


def inner_tensors(tensor):
    if type(tensor) is torch.Tensor:
        return [tensor]
    return [t for name in tensor.__tensor_flatten__()[0] for t in inner_tensors(getattr(tensor, name))]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_parts_of_a_wrapper_make_it_again(kind):
    make, num_parts = WRAPPERS[kind]
    wrapper = make()
    parts = Parts.of(wrapper)
    assert len(parts.tensors) == num_parts
    assert all(is_plain(tensor) for tensor in parts.tensors)
    again = parts.together([tensor.clone() for tensor in parts.tensors])
    assert type(again) is type(wrapper)
    assert (again.shape, again.dtype) == (wrapper.shape, wrapper.dtype)
    for one, other in zip(inner_tensors(again), inner_tensors(wrapper), strict=True):
        assert torch.equal(one, other)


def test_parts_of_a_plain_tensor_are_itself():
    tensor = torch.ones(2, 3)[:, 1]
    parts = Parts.of(tensor)
    assert parts.tensors == [tensor] and parts.tensors[0] is tensor
    assert parts.together([tensor]) is tensor


class Waiting(torch.Tensor):
    """Stands for a result that is on its way. Whoever looks into it would wait."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    def trigger_wait(self):
        raise AssertionError("waited")

    def __tensor_flatten__(self):
        raise AssertionError("looked into")

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        raise AssertionError("made again")

    __torch_dispatch__ = None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3).as_subclass(Tagged),
        lambda: TwoTensor(torch.ones(0), torch.ones(0)),
        lambda: TwoTensor(torch.ones(3, device="meta"), torch.ones(3, device="meta")),
    ],
    ids=["sparse", "subclass", "wrapper without elements", "wrapper without memory"],
)
def test_what_cannot_be_taken_apart_has_no_parts(make):
    assert Parts.of(make()).tensors == []


def test_a_result_on_its_way_is_never_looked_into():
    assert hasattr(AsyncCollectiveTensor, "trigger_wait")  # by this it is known
    assert Parts.of(Waiting((2, 3))).tensors == []


@pytest.mark.parametrize("kind", ["plain", *WRAPPERS])
def test_an_emptied_alias_gives_up_memory_and_goes_on_counting_changes(kind):
    tensor = torch.ones(2, 3) if kind == "plain" else WRAPPERS[kind][0]()
    storages = [StorageWeakRef(part.untyped_storage()) for part in Parts.of(tensor).tensors]
    alias, version = tensor.detach(), tensor._version
    emptied(alias)
    tensor.mul_(2)
    assert alias._version == tensor._version == version + 1
    assert not any(storage.expired() for storage in storages)
    del tensor
    assert all(storage.expired() for storage in storages)


# Wrappers as activations.


def two(scale=1.0):
    return TwoTensor(torch.linspace(0, 1, 12).view(3, 4) * scale, torch.linspace(1, 2, 12).view(3, 4) * scale)


def weight():
    return torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


def body(x, w):
    y = (x @ w).sin()
    return (y.t().exp() @ y).tanh()


def offloaded(fn, policy=p.everything, **options):
    return vf.offload(fn, policy, store=CloneStore(), **options)


def same(one, other):
    pairs = zip(inner_tensors(one), inner_tensors(other), strict=True)
    return type(one) is type(other) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("make", [two, lambda: TwoTensor(two(), two(3.0))], ids=["two", "two of two"])
def test_a_wrapper_is_moved_with_equal_gradients(make):
    plain, moved = weight(), weight()
    out = body(make(), plain)
    out.sum().backward()
    fn = offloaded(body)
    result = fn(make(), moved)
    result.sum().backward()
    assert same(result.detach(), out.detach())
    assert same(moved.grad, plain.grad)
    stats = fn.stats()
    assert stats["bytes", "kept"] == 0
    assert stats["bytes", "moved"] % len(inner_tensors(make())) == 0 < stats["bytes", "moved"]
    assert stats["bytes", "live"] == 0


def test_memory_of_a_moved_wrapper_is_freed():
    storages = []

    def watched(x, w):
        y = (x @ w).exp()
        storages.extend(StorageWeakRef(part.untyped_storage()) for part in (y.a, y.b))
        return y.mean()

    w = weight()
    kept = watched(two(), w)
    assert [storage.expired() for storage in storages] == [False, False]
    storages.clear()
    out = offloaded(watched)(two(), w)
    assert [storage.expired() for storage in storages] == [True, True]
    del kept, out


@pytest.mark.parametrize("policy", [p.everything, p.nothing])
@pytest.mark.parametrize(
    "change", [lambda y: y.mul_(2), lambda y: y.detach().add_(1), lambda y: y.t().zero_()]
)
def test_a_wrapper_changed_in_place_after_it_was_saved_raises(policy, change):
    def body(x, w):
        y = (x @ w).exp()
        out = y.sum()
        with torch.no_grad():
            change(y)
        return out

    out = offloaded(body, policy)(two(), weight())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("lengths", [{}, {"min_seqlen": 2, "max_seqlen": 3}], ids=["", "known lengths"])
def test_a_jagged_tensor_is_moved_with_equal_gradients_and_the_same_shape(lengths):
    """Its offsets stay: a tensor with other ones would have another shape."""

    def fn(values, w):
        x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5]), **lengths)
        y = F.linear(x, w).sin()
        return (y.exp() * x).values().tanh().sum()

    values, plain, moved = torch.linspace(0, 1, 20).view(5, 4), weight(), weight()
    fn(values, plain).backward()
    wrapped = offloaded(fn)
    wrapped(values, moved).backward()
    assert torch.equal(moved.grad, plain.grad)
    assert wrapped.stats()["count", "moved"] >= 3
    assert wrapped.stats()["bytes", "live"] == 0
