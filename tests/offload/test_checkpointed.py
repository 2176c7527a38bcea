"""Blocks inside regions of `torch.utils.checkpoint`: the policy holds for what these compute again."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import veofunc as vf
from tests.offload.bodies import (
    INPUT,
    CloneStore,
    Model,
    assert_books_balance,
    assert_equal,
    residual_in_place,
    step,
    sums,
    transformer,
)
from tests.offload.memory import Elsewhere, measured
from veofunc import policies as p

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("offload moved nothing", "policy .* asks for names")
]


def offloaded(fn, policy, **options):
    return vf.offload(fn, policy, **{"store": CloneStore(), "blocks": "layers.*", **options})


def selective():
    def products(ctx, op, *args, **kwargs):
        wanted = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(products)


def non_reentrant(fn, x, **options):
    return checkpoint(fn, x, use_reentrant=False, **options)


def reentrant(fn, x):
    return checkpoint(fn, x, use_reentrant=True)


def mlp(m, x):
    h = x
    for _ in range(3):
        h = m.down(F.gelu(m.up(m.norm(h))).sigmoid())
    return x + h


REGIONS = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "without check of shapes": lambda fn, x: non_reentrant(fn, x, determinism_check="none"),
    "selective": lambda fn, x: non_reentrant(fn, x, context_fn=selective),
    "nested": lambda fn, x: non_reentrant(lambda x: non_reentrant(fn, x.sin()).cos(), x),
    "nested twice": lambda fn, x: non_reentrant(
        lambda x: non_reentrant(lambda x: non_reentrant(fn, x).sin(), x.sin()).cos(), x
    ),
    "reentrant in non-reentrant": lambda fn, x: non_reentrant(lambda x: reentrant(fn, x.sin()).cos(), x),
    "non-reentrant in reentrant": lambda fn, x: reentrant(lambda x: non_reentrant(fn, x.sin()).cos(), x),
}
POLICIES = {
    "recompute": p.recompute,
    "matmuls": p.matmuls,
    "rest offloaded": p.first_of(p.recompute, p.everything),
    "everything": p.everything,
    "names": p.names(save=["mixed"], offload=["up"]),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("region", REGIONS)
def test_blocks_inside_a_region_are_bit_equal_under_every_policy(region, early_stop):
    model = Model(transformer)

    def around(fn):
        return lambda x: REGIONS[region](fn, x * model.layers[0].v).sin()

    with set_checkpoint_early_stop(early_stop):
        plain = step(around(model), model)
        functions = {name: offloaded(model, policy) for name, policy in POLICIES.items()}
        for name, fn in functions.items():
            assert_equal(plain, step(around(fn), model), name)
    gc.collect()
    for fn in functions.values():
        assert_books_balance(fn)


@pytest.mark.parametrize("region", [region for region in REGIONS if region != "selective"])
def test_a_retained_graph_goes_backward_again(region):
    model = Model(residual_in_place, mlp)
    parameters = [model.layers[0].w, model.layers[1].up.weight]

    def gradients(fn):
        torch.manual_seed(1)
        out = REGIONS[region](fn, INPUT * model.layers[0].v).sum()
        model.zero_grad()
        for retain in (True, True, False):
            out.backward(retain_graph=retain)
        return [parameter.grad.clone() for parameter in parameters]

    plain = gradients(model)
    for name, policy in POLICIES.items():
        assert_equal(plain, gradients(offloaded(model, policy)), name)


@pytest.mark.parametrize("early_stop", [True, False])
def test_stats_count_the_pass_that_holds_what_it_saves(early_stop):
    """The first pass of a region saves nothing but what enters it, which is not governed inside."""
    model = Model(transformer, residual_in_place)
    alone = offloaded(model, POLICIES["everything"])
    step(alone, model)
    fn = offloaded(model, POLICIES["everything"])
    out = non_reentrant(fn, INPUT * model.layers[0].v)
    assert sums(fn)["packed"] == 0
    with set_checkpoint_early_stop(early_stop):
        out.sum().backward()
    assert sums(fn)["moved"] == sums(alone)["moved"] > 0
    assert sums(fn)["restored"] == sums(fn)["moved"] + sums(fn)["deduplicated"]


LARGE = torch.randn(512, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("policy", ["recompute", "matmuls", "rest offloaded", "everything"])
@pytest.mark.parametrize("region", ["reentrant", "non-reentrant", "nested"])
def test_memory_is_saved_while_a_region_is_computed_again(region, policy):
    model = Model(*[mlp] * 4)
    run = REGIONS[region]
    plain_held, plain_peak, _, _ = measured(model, lambda x: run(model, x), LARGE)
    fn = offloaded(model, POLICIES[policy], store=Elsewhere())
    held, peak, _, _ = measured(model, lambda x: run(fn, x), LARGE)
    assert held <= plain_held
    assert peak < (0.8 if policy == "matmuls" else 0.5) * plain_peak


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_enters_a_region_inside_a_block_is_governed(use_reentrant):
    def body(m, x):
        return checkpoint(lambda x: mlp(m, x), (x + 1) * 2, use_reentrant=use_reentrant)

    model = Model(*[body] * 4)
    plain_held, _, _, _ = measured(model, model, LARGE)
    fn = offloaded(model, POLICIES["rest offloaded"], store=Elsewhere())
    held, _, _, _ = measured(model, fn, LARGE)
    assert held < 0.6 * plain_held
    # What a reentrant region returns no tape has seen made.
    assert sums(fn)["recomputed"] == 4
    assert_equal(step(model, model), step(fn, model))


def test_an_exception_while_a_region_is_computed_again_passes_and_leaves_nothing():
    model, calls = Model(transformer, residual_in_place), []

    def fails(module, args, out):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("in the second pass")

    fn = offloaded(model, POLICIES["everything"])
    handle = model.layers[1].register_forward_hook(fails)
    out = non_reentrant(fn, INPUT * model.layers[0].v)
    with set_checkpoint_early_stop(False), pytest.raises(KeyError, match="in the second pass"):
        out.sum().backward()
    handle.remove()
    del out
    gc.collect()
    assert_books_balance(fn)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
