"""The laws that every transform keeps, checked for every row of the table."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

import veofunc as vf
from tests.laws.subject import make_batch, make_functional_loss, make_loss, make_model, sums
from tests.laws.table import TRANSFORMS, mean_of_counted
from tests.no_sync import NoSync

CHECKPOINTING = (None, "reentrant", "non-reentrant")
ROWS = pytest.mark.parametrize("row", TRANSFORMS, ids=lambda row: row.name)
OBSERVING = pytest.mark.parametrize("row", [r for r in TRANSFORMS if r.observes], ids=lambda row: row.name)
ORDERS = tuple(itertools.permutations(TRANSFORMS))


def compose(rows, fn, model, directory):
    for row in rows:
        fn = row.wrap(fn, model, directory)
    return fn


def step(fn, model, batch):
    """(out, obs, gradients by name) of one forward and backward with a fixed RNG."""
    torch.manual_seed(7)
    model.zero_grad()
    returned = fn(batch)
    out, obs = returned if isinstance(returned, tuple) else (returned, TensorDict())
    out.sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return out.detach(), obs, grads


def plain_step(row, model, batch):
    """(out, gradients) without the transform: what its output must be, from the plain token losses."""
    loss_fn = make_loss(model)
    out, _, grads = step(lambda batch: row.out(loss_fn(batch), batch), model, batch)
    return out, grads


def assert_same(a, b):
    """Bit-equal, structure included."""
    leaves_a, spec_a = torch.utils._pytree.tree_flatten(a)
    leaves_b, spec_b = torch.utils._pytree.tree_flatten(b)
    assert spec_a == spec_b
    for x, y in zip(leaves_a, leaves_b, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def hooks_on(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


@ROWS
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_transparency(row, checkpointing, tmp_path):
    model, batch = make_model(checkpointing), make_batch()
    out, obs, grads = step(row.wrap(make_loss(model), model, tmp_path), model, batch)
    assert_same((out, grads), plain_step(row, model, batch))
    assert tuple(obs.keys()) == ((row.observes,) if row.observes else ())


@OBSERVING
def test_additivity(row, tmp_path):
    model = make_model().eval()
    fn = row.wrap(make_loss(model), model, tmp_path)
    a, b = make_batch(1, rows=3), make_batch(2, rows=2)
    obs_a, obs_b, both = fn(a)[1], fn(b)[1], fn(torch.cat([a, b]))[1]
    for total in (obs_a + obs_b, 0 + obs_a + obs_b, sum([obs_a, obs_b])):
        assert sums(total).keys() == sums(both).keys()
        for key, leaf in sums(total).items():
            if leaf.is_floating_point():
                torch.testing.assert_close(leaf, sums(both)[key])
            else:
                assert torch.equal(leaf, sums(both)[key]), key


@OBSERVING
def test_observations_are_detached_and_own_their_memory(row, tmp_path):
    model = make_model()
    _, obs = row.wrap(make_loss(model), model, tmp_path)(make_batch())
    leaves = list(sums(obs).values())
    assert not any(leaf.requires_grad for leaf in leaves)
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)


@ROWS
def test_purity(row, tmp_path):
    model, batch = make_model(), make_batch()
    loss_fn = make_loss(model)
    state, given, fields = model.state_dict(), batch.clone(), set(vars(model))
    before = {name: tensor.clone() for name, tensor in state.items()}
    fn = row.wrap(loss_fn, model, tmp_path)
    first, second = step(fn, model, batch), step(fn, model, batch)
    assert_same(first, second)
    assert_same(dict(model.state_dict()), before)
    assert (batch == given).all()
    assert hooks_on(model) == 0
    assert set(vars(model)) == fields and not vars(loss_fn)


@ROWS
def test_nothing_is_left_after_an_exception(row, tmp_path):
    model, batch = make_model(), make_batch()
    fn = row.wrap(make_loss(model), model, tmp_path)
    expected = step(fn, model, batch)
    broken = model.layers[1].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fn(batch)
    broken.remove()
    assert hooks_on(model) == 0
    x = torch.ones(2, requires_grad=True)
    assert x.exp().grad_fn._raw_saved_result.__class__.__name__ == "SavedTensor"  # no hook is active
    assert_same(step(fn, model, batch), expected)


def train(wrap, checkpointing):
    """(parameters, losses, sums) after three steps of training what `wrap` makes of a new model's loss."""
    model = make_model(checkpointing)
    fn = wrap(make_loss(model), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, total = [], 0
    for seed in range(3):
        loss, obs, _ = step(fn, model, make_batch(seed))
        optimizer.step()
        losses.append(loss)
        total = total + obs
    return {name: p.detach() for name, p in model.named_parameters()}, losses, total


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_order(checkpointing, tmp_path):
    runs = [
        train(lambda fn, model, order=order: compose(order, fn, model, tmp_path), checkpointing)
        for order in ORDERS
    ]
    for parameters, losses, total in runs[1:]:
        assert_same((parameters, losses), runs[0][:2])
        assert_same({name: total[name] for name in sorted(total.keys())}, dict(sorted(runs[0][2].items())))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(row.name for row in order))
def test_all_orders_train_as_the_plain_loss_does(order, tmp_path):
    def plain(fn, model):
        return lambda batch: mean_of_counted(fn(batch), batch)

    parameters, losses, _ = train(lambda fn, model: compose(order, fn, model, tmp_path), None)
    assert_same((parameters, losses), train(plain, None)[:2])


@ROWS
def test_recompute(row, tmp_path):
    batch = make_batch()
    results = []
    for checkpointing in CHECKPOINTING:
        model = make_model(checkpointing)
        results.append(step(row.wrap(make_loss(model), model, tmp_path), model, batch))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@ROWS
def test_torch_func(row, tmp_path):
    model, batch = make_model().eval(), make_batch()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def objective(params, batch):
        returned = row.wrap(make_functional_loss(model), model, tmp_path)(params, batch)
        out, obs = returned if isinstance(returned, tuple) else (returned, TensorDict())
        return out.sum(), obs

    grads, (value, obs) = vf.grad_and_value(objective, has_aux=True)(params, batch)
    by_torch = torch.func.grad_and_value(objective, has_aux=True)
    if not row.under_torch_func:
        with pytest.raises(RuntimeError, match=r"veofunc\.grad_and_value"):
            by_torch(params, batch)
        return
    torch_grads, (torch_value, torch_obs) = by_torch(params, batch)
    assert_same((grads, value, obs), (torch_grads, torch_value, torch_obs))
    rows = torch.stack([batch[:2], batch[2:]])
    _, (_, per_half) = torch.func.vmap(by_torch, in_dims=(None, 0))(params, rows)
    for half in range(2):
        _, (_, alone) = by_torch(params, rows[half])
        for key, leaf in sums(alone).items():
            torch.testing.assert_close(sums(per_half)[key][half], leaf)


def test_a_monitor_over_recomputed_blocks_counts_once_under_torch_func(tmp_path):
    model, batch = make_model().eval(), make_batch()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def objective(offloads, outside):
        fn = make_functional_loss(model)
        blocks = {"model": model, "store": vf.DiskStore(tmp_path), "blocks": "layers.*"}
        wraps = [lambda fn: vf.monitor_router(fn, model=model)]
        if offloads:
            wraps.insert(outside, lambda fn: vf.offload(fn, vf.policies.everything, **blocks))
        for wrap in wraps:
            fn = wrap(fn)

        def loss(params, batch):
            out, obs = fn(params, batch)
            return out.sum(), obs

        return loss

    expected = torch.func.grad_and_value(objective(False, 0), has_aux=True)(params, batch)
    for outside in (0, 1):
        assert_same(
            torch.func.grad_and_value(objective(True, outside), has_aux=True)(params, batch), expected
        )


@ROWS
@pytest.mark.filterwarnings("ignore:little is gained in a compiled region")
def test_compile(row, tmp_path):
    model, batch = make_model().eval(), make_batch()
    expected = step(row.wrap(make_loss(model), model, tmp_path), model, batch)
    outside = torch.compile(row.wrap(make_loss(model), model, tmp_path), backend="aot_eager")
    inside = row.wrap(torch.compile(make_loss(model), backend="aot_eager"), model, tmp_path)
    for compiled in (outside, inside):
        torch.compiler.reset()
        for _ in range(2):  # compiling, and compiled
            out, obs, grads = step(compiled, model, batch)
            torch.testing.assert_close((out, grads), (expected[0], expected[2]))
            for key, leaf in sums(expected[1]).items():
                torch.testing.assert_close(sums(obs)[key], leaf)


@ROWS
def test_no_synchronisation(row, tmp_path):
    model, batch = make_model(), make_batch()
    fn = row.wrap(make_loss(model), model, tmp_path)
    step(fn, model, batch)  # a first call may look closer
    with NoSync():
        step(fn, model, batch)
        with pytest.raises(AssertionError):  # the check can fail
            batch["tokens"][batch["tokens"] > 2]


@ROWS
def test_threads(row, tmp_path):
    model = make_model().eval()
    batches = [make_batch(seed) for seed in range(8)]
    fn = row.wrap(make_loss(model), model, tmp_path)

    def call(batch):
        returned = fn(batch)
        out, obs = returned if isinstance(returned, tuple) else (returned, TensorDict())
        grads = torch.autograd.grad(out.sum(), list(model.parameters()))
        return out.detach(), obs, grads

    expected = [call(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for got, right in zip(pool.map(call, batches * 4), expected * 4, strict=True):
            assert_same(got, right)
    assert hooks_on(model) == 0
