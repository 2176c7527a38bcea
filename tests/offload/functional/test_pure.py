"""What a block may do under `torch.func`: what it returns, and what it depends on beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.utils import _pytree as pytree

from tests.offload.functional.blockwise import (
    WIDTH,
    Chain,
    Mlp,
    MlpChain,
    Offloaded,
    Returns,
    assert_close,
    assert_equal,
    by_example,
    by_params,
    check,
    jacobian,
    randn,
    second,
    squares,
    subject_of,
    with_loss,
)

# What blocks return.


@dataclass
class Output:
    hidden: Tensor
    label: str


pytree.register_dataclass(Output)


def test_a_dataclass_that_is_a_pytree_may_be_returned():
    check(lambda self, x: Output((x * self.weight).sin(), "a"), lambda out: out.hidden.sum() * len(out.label))


def test_none_and_numbers_may_be_returned():
    check(lambda self, x: (None, 3, (x * self.weight).sin()), lambda out: out[2].sum() * out[1])


def test_an_input_is_returned_as_the_same_object():
    def use(out):
        assert out[0] is out[1]
        return (out[0] * out[2]).sum()

    check(lambda self, x: (x, x, (x * self.weight).sin()), use)


def test_a_parameter_and_an_argument_that_is_a_parameter_may_be_returned():
    check(lambda self, x: (self.weight, (x * self.weight).sin()), lambda out: (out[0] * out[1]).sum())


def test_a_tensor_that_is_returned_twice_is_one_object():
    def twice(self, x):
        y = (x * self.weight).sin()
        return y, [y]

    def use(out):
        assert out[0] is out[1][0]
        return (out[0] * out[1][0]).sum()

    check(twice, use)


def test_outputs_that_have_no_gradient():
    def several(self, x):
        with torch.no_grad():
            free = x.exp() * self.weight
        return (x * self.weight).sin(), x.detach().exp(), free, x.argmax(-1), torch.arange(3)

    check(several, lambda out: sum((out[0] * o.sum()).sum() for o in out[1:]))


def test_only_outputs_without_a_gradient_are_used():
    offloaded = check(
        lambda self, x: ((x * self.weight).sin(), x.detach().exp()),
        lambda out: out[1].sum() + out[1].pow(2).mean() * 0,
    )
    assert offloaded.counts["moved"]


def test_outputs_may_be_changed_in_place():
    check(lambda self, x: (x * self.weight).sin(), lambda out: out.mul_(2).exp().sum())


def test_an_output_of_no_elements():
    check(lambda self, x: ((x * self.weight).sin(), x[:0]), lambda out: out[0].sum() + out[1].sum())


def test_the_same_tensor_twice_is_one_input():
    def same(self, x, y):
        assert x is y
        return (x * y * self.weight).sin()

    block = Returns(same)
    loss = lambda x: block(x, x).sum()  # noqa: E731
    offloaded = Offloaded(loss, [block])
    assert_equal(grad(offloaded)(randn(3)), grad(loss)(randn(3)))
    assert offloaded.counts["moved"] == 1


def test_a_block_may_run_transforms_itself():
    check(lambda self, x: vmap(lambda row: grad(lambda r: (r.sin() * self.weight).sum())(row))(x))


def test_a_block_may_use_an_autograd_function():
    class Double(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, weight):
            return x * weight * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight * 2, (grad * x * 2).sum(0)

    check(lambda self, x: Double.apply(x, self.weight).sin())


# What else the result depends on.


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(self.dropout(x))).sin()


class DroppingChain(Chain):
    def __init__(self):
        super().__init__([Dropping(), Dropping()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


def seeded(route, subject):
    """What `route` gives, and the next random number."""
    torch.manual_seed(3)
    return route(subject), torch.rand(())


@pytest.mark.parametrize(
    "route",
    [
        by_params,
        jacobian,
        second,
        lambda s: by_example(s, randomness="different"),
        lambda s: by_example(s, randomness="same"),
        lambda s: vmap(jacrev(s.loss, argnums=1), (None, 1), randomness="different")(s.params, s.xs),
        lambda s: jacrev(jacrev(s.of_bias))(s.bias),
        lambda s: torch.autograd.grad(s.loss(v := s.variables, s.x), list(v.values())),
        lambda s: grad(lambda p: squares(by_example(s.at(p), randomness="different")))(s.params),
        lambda s: vmap(lambda x: second(s.at(x=x)), randomness="different")(s.xs),
    ],
)
def test_dropout_is_the_same_when_a_block_runs_again_and_draws_once(route):
    model, subject = subject_of(DroppingChain)
    offloaded = Offloaded(subject.loss, model.layers)
    expected, next_number = seeded(route, subject)
    actual, next_number_of_ours = seeded(route, with_loss(subject, offloaded))
    assert_close(actual, expected)
    assert next_number_of_ours == next_number
    assert offloaded.counts["restored"] == offloaded.counts["moved"] > 0


def test_dropout_in_eval_mode():
    model, subject = subject_of(DroppingChain)
    model.eval()
    offloaded = Offloaded(subject.loss, model.layers)
    for route in (by_params, by_example):
        assert_equal(route(with_loss(subject, offloaded)), route(subject))


def test_other_random_numbers_the_second_time_are_refused():
    class Once(Mlp):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, training=not drawn))

    drawn, block = [], Once().double()

    def loss(x):
        y = block(x)
        drawn.append(True)
        return y.sum()

    with pytest.raises(RuntimeError, match="drew other random numbers when it ran again"):
        grad(Offloaded(loss, [block]))(randn(3, WIDTH))


def test_random_numbers_under_vmap_raise_by_default_as_without_offload():
    model, subject = subject_of(DroppingChain)
    for loss in (subject.loss, Offloaded(subject.loss, model.layers)):
        with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
            by_example(with_loss(subject, loss))


def test_autocast_is_as_it_was_when_a_block_runs_again():
    model, subject = subject_of(MlpChain)
    model.float()
    params, x = pytree.tree_map(Tensor.float, (subject.params, subject.x))

    def loss(params, x):
        with torch.autocast("cpu", torch.bfloat16):  # not in backward
            return functional_call(model, params, (x,)).float()

    expected = grad(loss)(params, x)
    assert_equal(grad(Offloaded(loss, model.layers))(params, x), expected)
    assert not torch.equal(
        expected["layers.0.up.weight"], grad(subject.loss)(params, x)["layers.0.up.weight"]
    )

    def outside(params, x):
        with torch.autocast("cpu", enabled=False):
            return functional_call(model, params, (x,))

    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(grad(Offloaded(outside, model.layers))(params, x), grad(outside)(params, x))


def test_a_block_runs_again_as_it_was_when_the_module_has_been_changed():
    model, subject = subject_of(MlpChain)
    one = torch.ones((), dtype=torch.float64)
    expected = vjp(model, subject.x)[1](one)
    _, pull_back = vjp(Offloaded(model, model.layers), subject.x)
    model.eval()
    model.layers[0].up = nn.Identity()
    model.layers[1].down.weight = nn.Parameter(torch.zeros(1))
    assert_equal(pull_back(one), expected)


@pytest.mark.parametrize("moves", [True, False])
def test_an_input_that_is_changed_in_place_later(moves):
    block = Returns(lambda self, x: (x * self.weight).sin())

    def loss(x):
        x = x * 1
        y = block(x)
        x.add_(1)
        return (y * x).sum()

    offloaded = Offloaded(loss, [block], decide=lambda *args: moves)
    if moves:  # the copy is what it was
        separate = lambda x: (block(x * 1) * (x + 1)).sum()  # noqa: E731
        assert_equal(grad(offloaded)(randn(3)), grad(separate)(randn(3)))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad(offloaded)(randn(3))


@pytest.mark.parametrize("where", ["parameter", "constant"])
def test_what_was_changed_in_place_since_is_refused(where):
    constant = randn(3)
    block = Returns(lambda self, x: (x * self.weight * constant).sin()).requires_grad_(False)
    _, pull_back = vjp(Offloaded(lambda x: block(x).sum(), [block]), randn(3))
    (block.weight if where == "parameter" else constant).add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place.*veofunc\.grad_and_value"):
        pull_back(torch.ones((), dtype=torch.float64))


def test_attributes_that_a_block_sets_are_set_once():
    class Counting(Mlp):
        num_calls, table, last = 0, None, ()

        def forward(self, x):
            self.num_calls += 1
            self.last = (self.num_calls, tuple(x.shape), x.argmax())
            if self.table is None:
                self.table = torch.arange(WIDTH, dtype=x.dtype)
            return super().forward(x) * self.table

    block = Counting().double()
    loss = lambda x: block(block(x)).sum()  # noqa: E731
    actual = grad(Offloaded(loss, [block]))(randn(3, WIDTH))
    assert block.num_calls == 2
    assert block.last[:2] == (2, (3, WIDTH))
    assert torch.equal(block.table, torch.arange(WIDTH, dtype=torch.float64))
    assert_equal(actual, grad(loss)(randn(3, WIDTH)))


def test_methods_and_functions_that_a_block_has_as_attributes():
    class Bound(Mlp):
        def __init__(self):
            super().__init__()
            self.apply_norm = self.own_norm
            self.forward = self.own_forward

        def own_norm(self, x):
            return self.norm(x)

        def own_forward(self, x):
            return self.down(self.up(self.apply_norm(x)).tanh())

    block = Bound().double()
    own = block.__dict__["forward"]
    params = {name: value.detach() for name, value in block.named_parameters()}
    loss = lambda p, x: functional_call(block, p, (x,)).pow(3).sum()  # noqa: E731
    x = randn(3, WIDTH)
    assert_equal(grad(Offloaded(loss, [block]))(params, x), grad(loss)(params, x))
    assert block.__dict__["forward"] is own


def test_hooks_of_inner_modules_run_once_with_tensors_that_a_monitor_may_detach():
    model, subject = subject_of(MlpChain)
    seen = []
    model.layers[0].up.register_forward_hook(lambda module, args, out: seen.append(out.detach().abs().max()))
    grad(Offloaded(subject.loss, model.layers))(subject.params, subject.x)
    inside = list(seen)
    subject.loss(subject.params, subject.x)
    assert seen[1:] == inside


def test_constants_from_elsewhere_may_be_read():
    table, other = randn(3), Returns(lambda self, x: self.weight * x).requires_grad_(False)
    loss_of = lambda self, x: (x * self.weight * table * other.weight).sin()  # noqa: E731
    check(loss_of)
    trained = Returns(None)  # detached, it is a constant too
    check(lambda self, x: (x * self.weight * trained.weight.detach()).sin())
