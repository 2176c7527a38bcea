"""The levels of transforms, and what is wrapped at them."""

from typing import ClassVar

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from veofunc.levels import (
    alive,
    get_unwrapped,
    in_forward_mode,
    is_functorch_wrapped_tensor,
    is_last,
    level,
    num_vmaps,
    plain_of,
    requires_grad,
)


def test_levels_are_counted_from_one():
    seen = []

    def inner(x):
        seen.append((level(), num_vmaps()))
        return x.sum()

    vmap(grad(inner))(torch.ones(2, 3))
    assert (seen, level(), num_vmaps()) == ([(2, 1)], 0, 0)


def test_wrappers_are_taken_off_to_the_plain_tensor():
    x, seen = torch.ones(2, 3), []

    def inner(y):
        seen.append((tuple(y.shape), plain_of(y).shape, plain_of(y).untyped_storage()._cdata))
        assert requires_grad(y)
        assert requires_grad(get_unwrapped(y)) is False
        return y.sum()

    vmap(grad(inner))(x)
    assert seen == [((3,), x.shape, x.untyped_storage()._cdata)]
    assert plain_of(x) is x


def test_whether_any_level_requires_grad():
    x, seen = torch.ones(3, requires_grad=True), []

    def inner(y, z):
        seen.extend([requires_grad(y), requires_grad(z), z.requires_grad])
        return y.sum()

    grad(inner)(torch.ones(3), x)
    assert seen == [True, True, False]
    assert requires_grad(x)
    assert not requires_grad(x.detach())


def test_a_wrapper_is_alive_until_its_transform_ends():
    kept = []

    def outer(x):
        grad(lambda y: kept.append(y) or y.sum())(x)
        assert alive(kept[0]) is not kept[0]
        assert is_functorch_wrapped_tensor(alive(kept[0]))
        kept.append(x)
        assert alive(x) is x
        return x.sum()

    grad(outer)(torch.ones(3))
    assert not is_functorch_wrapped_tensor(alive(kept[0]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own use of it
def test_forward_mode():
    seen = []
    jvp(lambda x: seen.append(in_forward_mode()) or x, (torch.ones(1),), (torch.ones(1),))
    with torch.autograd.forward_ad.dual_level():
        seen.append(in_forward_mode())
    assert seen == [True, True]
    assert not in_forward_mode()


class Look(torch.autograd.Function):
    """Notes in backward whether the pass is the last one."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        Look.seen.append(is_last(*ctx.saved_tensors))
        return grad


def test_only_the_pass_that_ends_a_level_is_the_last():
    x = torch.ones(3)
    Look.seen.clear()
    grad(lambda x: Look.apply(x).sum())(x)
    assert Look.seen == [True]
    Look.seen.clear()
    vjp(lambda x: Look.apply(x).sum(), x)[1](torch.ones(()), retain_graph=False)
    torch.autograd.grad(Look.apply(y := x.clone().requires_grad_()).sum(), y)
    grad(lambda x: torch.autograd.grad(Look.apply(x).sum(), x, create_graph=True)[0].sum() + x.sum())(x)
    assert Look.seen == [False, False, False]
