"""Who saves a tensor: a compiled region, or an operation outside of one."""

import functools

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from veofunc.offload.compiled.regions import Region, saving_region, why_little_gained

pytestmark = [  # PyTorch's compiler hears them from PyTorch itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.exp()


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


def saved_by(fn, *args, wrap=lambda hook: hook):
    """For each tensor that is saved, and is no parameter, the region that saves it."""
    found = []

    @torch.compiler.disable  # else it would be compiled with what calls it
    def pack(tensor):
        if tensor._base is None and not isinstance(tensor, nn.Parameter):
            found.append(saving_region())
        return tensor.detach()

    with saved_tensors_hooks(wrap(pack), lambda packed: packed):
        fn(*args)
    return found


X = torch.ones(3, 4)


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_compiled_model_saves_all_its_tensors(backend):
    model = Model()
    first = saved_by(torch.compile(model, backend=backend), X)
    assert len(first) > 2
    assert {region.module for region in first} == {model}
    assert len(set(first)) == 1


def test_a_model_that_was_compiled_in_place_saves_all_its_tensors():
    model = Model()
    model.compile(backend="aot_eager")
    assert {region.module for region in saved_by(model, X)} == {model}


def test_compiled_blocks_are_told_apart_though_they_share_a_region():
    model = Model()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    *inside, outside = saved_by(model, X.clone().requires_grad_())
    assert outside is None  # exp, in eager
    assert [region.module for region in dict.fromkeys(inside)] == list(model.layers)
    assert len({region.number for region in inside}) == 1


def test_a_compiled_method_belongs_to_its_module():
    model = Model()
    first = model.layers[0]
    first.forward = torch.compile(first.forward, backend="aot_eager")
    assert {region.module for region in saved_by(model, X) if region is not None} == {first}


def test_a_compiled_function_belongs_to_no_module():
    weight = torch.ones(4, requires_grad=True)
    compiled = torch.compile(lambda x: (x * weight).tanh(), backend="aot_eager")
    assert {region.module for region in saved_by(compiled, X)} == {None}


def test_different_regions_have_different_numbers():
    weight = torch.ones(4, requires_grad=True)
    first = torch.compile(lambda x: (x * weight).tanh(), backend="aot_eager")
    second = torch.compile(lambda x: (x * weight).exp(), backend="aot_eager")
    assert len({region.number for region in saved_by(lambda x: second(first(x)), X)}) == 2


def test_eager_operations_and_the_users_own_functions_are_no_region():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, 4, requires_grad=True)
    assert saved_by(lambda: Twice.apply(x.exp()).tanh()) == [None, None, None]


def test_operations_of_the_backend_eager_are_no_region():
    weight = torch.ones(4, requires_grad=True)
    compiled = torch.compile(lambda x: (x * weight).tanh(), backend="eager")
    assert set(saved_by(compiled, X)) == {None}


def test_a_wrapped_hook_still_sees_who_saves():
    def wrapped(hook):
        @functools.wraps(hook)
        def outer(tensor):
            return hook(tensor)

        return outer

    model = Model()
    found = saved_by(torch.compile(model, backend="aot_eager"), X, wrap=wrapped)
    assert {region.module for region in found} == {model}


def test_the_locals_of_a_caller_are_not_kept_alive():
    """Reading the local variables of a frame would keep the tensors in them until it ends."""
    weight = torch.ones(4, requires_grad=True)
    compiled = torch.compile(lambda x: (x * weight).tanh(), backend="aot_eager")
    gone = []

    class Caller(nn.Module):
        def forward(self, x):
            large = torch.ones(1000)
            storage = StorageWeakRef(large.untyped_storage())
            compiled(x)
            del large
            gone.append(storage.expired())

    assert {region.module for region in saved_by(Caller(), X)} == {None}
    assert gone == [True]


def test_little_is_gained_when_one_region_saved_what_was_moved():
    model = Region(0, None)
    assert "saved 3 of the 3 tensors that were moved" in why_little_gained({model: 3})
    assert "saved 3 of the 5 tensors that were moved" in why_little_gained({model: 3, None: 2})
    assert "saved 3 of the 3" in why_little_gained({model: 3, Region(1, None): 0})


def test_there_is_nothing_to_say_without_regions_or_with_several():
    first, second = Block(), Block()
    assert why_little_gained({}) is None
    assert why_little_gained({None: 5}) is None
    assert why_little_gained({Region(0, first): 3, Region(0, second): 3}) is None
