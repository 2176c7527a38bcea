"""What a block may not do under `torch.func`: what recomputation from its tensors would get wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import grad, vmap

from tests.offload.functional.blockwise import (
    Offloaded,
    Returns,
    assert_equal,
    assert_untouched,
    check,
    randn,
    squares,
)


class Plain:
    """No pytree."""

    def __init__(self, hidden):
        self.hidden = hidden


kept = []


def keeps_in_attribute(self, x):
    self.aux = (x * self.weight).mean()
    return x.sin()


def keeps_in_a_new_list(self, x):
    self.aux = [x.mean()]
    return x.sin()


def keeps_in_an_object(self, x):
    self.aux = Plain((x * self.weight).mean())
    return x.sin()


def keeps_an_input(self, x):
    kept.append(x)
    return x.sin()


def keeps_outside(self, x):
    kept.append(x.exp())
    return x.sin()


def keeps_what_it_wrote_into(self, x):
    kept.append(torch.zeros(3, dtype=x.dtype))
    kept[-1][:2] = x[0, :2]
    return x.sin()


def keeps_what_it_changed(self, x):
    y = x.exp()
    with torch.no_grad():
        y.mul_(2)
    kept.append(y)
    return x.sin()


def changes_input(self, x):
    return x.add_(1).sin()


def changes_parameter(self, x):
    with torch.no_grad():
        self.weight.add_(1)
    return x.sin()


def replaces_parameter(self, x):
    self.weight = nn.Parameter(self.weight.detach() + 1)
    return x.sin()


def adds_buffer(self, x):
    self.register_buffer("mean", x.detach().mean(), persistent=False)
    return x.sin()


table = torch.zeros(3, dtype=torch.float64)


def changes_a_constant(self, x):
    table.add_(1)
    return x.sin()


def moves_statistics(self, x):
    return nn.functional.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), training=True)


@pytest.mark.parametrize(
    "what, why",
    [
        (keeps_in_attribute, "keeps a tensor that depends on its inputs, as its attribute 'aux'"),
        (keeps_in_a_new_list, "keeps a tensor that depends on its inputs, as its attribute 'aux'"),
        (keeps_in_an_object, r"lets out a tensor of shape \[\]"),
        (keeps_an_input, r"lets out a tensor of shape \[2, 3\]"),
        (keeps_outside, r"lets out a tensor of shape \[2, 3\]"),
        (keeps_what_it_wrote_into, r"lets out a tensor of shape \[3\]"),
        (keeps_what_it_changed, r"lets out a tensor of shape \[2, 3\]"),
        (lambda self, x: Plain(x.sin()), "in an object that is no pytree"),
        (changes_input, "changes its inputs, parameters or buffers in place"),
        (changes_parameter, "changes its inputs, parameters or buffers in place"),
        (replaces_parameter, "replaces its parameters or buffers"),
        (adds_buffer, "replaces its parameters or buffers"),
        (changes_a_constant, "changes a tensor in place that is not its own"),
        (moves_statistics, "moves the running statistics"),
        (lambda self, x: (x.sin(), x[0]), "returns a view of an input"),
        (lambda self, x: x.view(-1), "returns a view of an input"),
        (lambda self, x: x.sin().chunk(3, -1), "two views of one tensor"),
        (lambda self, x: self.weight.view(3, 1), "returns a view of an input"),
    ],
)
def test_a_block_that_is_no_function_of_its_tensors_is_refused(what, why):
    block = Returns(what)
    loss = lambda x: squares(block(x * 1)) * 1.0  # noqa: E731
    kept.clear()
    with pytest.raises(
        RuntimeError, match=f"block 'layers.0' under torch.func: it .*{why}.* Use veofunc.grad"
    ):
        grad(Offloaded(loss, [block]))(randn(2, 3))
    assert_untouched(block)


@pytest.mark.parametrize("where", ["attribute", "list"])
def test_what_a_block_keeps_may_be_free_of_gradients_but_not_of_a_batch(where):
    def keeps_index(self, x):
        if where == "attribute":
            self.index = x.argmax()
        else:
            kept.append(x.argmax())
        return x.sin()

    block = Returns(keeps_index)
    offloaded = Offloaded(lambda x: block(x).sum(), [block])
    kept.clear()
    grad(offloaded)(randn(3))
    index = block.index if where == "attribute" else kept[0]
    assert index == randn(3).argmax()
    with pytest.raises(RuntimeError, match=r"keeps a tensor that depends|lets out a tensor"):
        vmap(grad(offloaded))(randn(2, 3))
    assert where == "list" or block.index is index


def test_what_only_a_cycle_keeps_is_not_let_out():
    def cyclic(self, x):
        cycle = [x.exp()]
        cycle.append(cycle)
        return (x * self.weight * cycle[0]).sin()

    check(cyclic)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "vmap"])
def test_a_tensor_that_is_transformed_but_no_input_is_refused(transform, order):
    block = Returns(lambda self, x: x * self.side)

    def loss(x, side):
        block.side = side.sin()
        return block(x).sum()

    offloaded = Offloaded(loss, [block])
    x, side = randn(2, 3), randn(2, 3, seed=1)
    by = grad(offloaded) if transform == "vmap" else grad(offloaded, argnums=(0, 1))
    by = by if transform == "grad" else vmap(by)
    if order == 2:
        by = grad(lambda x, side, by=by: squares(by(x, side)))
    with pytest.raises(RuntimeError, match=r"reads a tensor of shape .* that torch.func transforms"):
        by(x, side)


def test_a_tensor_of_an_outer_vmap_is_refused_where_the_block_has_another_batch():
    block = Returns(lambda self, x: x * self.side)

    def loss(x, side):
        block.side = side
        return block(x).sum()

    x = randn(2, 3)
    inner = lambda side: vmap(grad(Offloaded(loss, [block])), (0, None))(x, side)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"reads a tensor of shape \[3\] that torch.func transforms"):
        vmap(inner)(randn(2, 3, seed=1))


def test_a_tensor_that_requires_grad_but_is_no_input_is_refused():
    weight = nn.Parameter(randn(3, 3))
    block = Returns(lambda self, x: (x @ weight.mT).sin())
    with pytest.raises(
        RuntimeError, match=r"reads a tensor of shape \[3, 3\] that requires grad.*pass it as an arg"
    ):
        grad(Offloaded(lambda x: block(x).sum(), [block]))(randn(2, 3))


def test_random_numbers_under_a_vmap_that_batches_no_input_are_refused():
    block = nn.Dropout(0.5)
    offloaded = Offloaded(lambda x, y: (block(x) * y).sum(), [block])
    with pytest.raises(RuntimeError, match=r"draws random numbers under a vmap that none of its inputs"):
        vmap(grad(offloaded), (None, 0), randomness="different")(randn(3), randn(2, 3))


def test_batch_norm_in_training_is_refused_and_in_eval_mode_exact():
    block = nn.BatchNorm1d(3).double()
    x = randn(4, 3)
    loss = lambda x: block(x).pow(3).sum()  # noqa: E731
    mean = block.running_mean.clone()
    with pytest.raises(RuntimeError, match="moves the running statistics"):
        grad(Offloaded(loss, [block]))(x)
    assert torch.equal(block.running_mean, mean)
    assert_equal(grad(Offloaded(loss, [block.eval()]))(x), grad(loss)(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "wrapped", "in place"])
def test_compiled_blocks_are_refused(how):
    block = nn.Sequential(nn.Linear(3, 3))
    if how == "script":
        block = torch.jit.script(block)
    elif how == "wrapped":
        block[0] = torch.compile(block[0], backend="eager")
    else:
        block[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match="it is compiled, or a module in it"):
        grad(Offloaded(lambda x: block(x).sum(), [block]))(torch.ones(3))


def test_fsdp_blocks_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(RuntimeError, match=r"sharded by FSDP.*veofunc\.grad_and_value"):
            grad(Offloaded(lambda x: model(x).sum(), [model]))(torch.ones(2))
    finally:
        dist.destroy_process_group()
