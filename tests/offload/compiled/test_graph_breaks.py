"""Offloading what several compiled regions save."""

import pytest
import torch
from torch import nn

import veofunc as vf

pytestmark = [  # PyTorch's compiler hears them from PyTorch itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(me, x):  # it need not be called self
        return me.linear(x).tanh()


class Picking(nn.Module):
    """Breaks the graph: how many rows are left only a run can tell."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[x.sum(-1) > -8]
        return x


@pytest.fixture
def model():
    torch.compiler.reset()
    torch.manual_seed(0)
    yield Picking()
    torch.compiler.reset()


def gradients(fn, model):
    model.zero_grad()
    fn(torch.linspace(-1, 1, 40).view(5, 8)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_hooks_are_not_compiled_between_two_regions(model, tmp_path):
    compiled = torch.compile(model, backend="aot_eager")
    plain = gradients(compiled, model)
    fn = vf.offload(compiled, vf.policies.everything, store=vf.DiskStore(tmp_path))
    assert all(map(torch.equal, gradients(fn, model), plain))
    assert fn.stats()["count", "moved"] > 0


def test_blocks_compiled_one_by_one_have_their_paths(model, tmp_path):
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    plain = gradients(model, model)
    moved = {}
    for glob in ("layers.*", "layers.[01]"):
        fn = vf.offload(model, vf.policies.in_modules(glob), store=vf.DiskStore(tmp_path))
        assert all(map(torch.equal, gradients(fn, model), plain))
        moved[glob] = int(fn.stats()["count", "moved"])
    assert moved["layers.*"] > moved["layers.[01]"] > 0
