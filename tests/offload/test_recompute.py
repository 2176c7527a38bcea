"""Recomputation inside blocks against the same model without it: equal bit for bit, and less memory."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import re
import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import veofunc as vf
from tests.offload.bodies import (
    BODIES,
    INPUT,
    Block,
    CloneStore,
    Model,
    assert_books_balance,
    assert_equal,
    program,
    residual_in_place,
    step,
    steps,
    sums,
    transformer,
)
from tests.offload.memory import Elsewhere, Memory, measured
from veofunc import policies as p

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "offload moved nothing",
        "policy .* asks for names",
        "blocks= has no effect",
        "The .grad attribute of a Tensor",  # of PyTorch's compiler
    )
]


def recomputing(fn, policy=p.recompute, **options):
    return vf.offload(fn, policy, **{"store": CloneStore(), "blocks": "layers.*", **options})


def random_fates(seed):
    """Another fate for each tensor; with odd seeds also for tensors that look alike."""

    def policy(saved):
        index = saved.index if seed % 2 else None
        return random.Random(f"{seed} {saved.op} {saved.shape} {index}").choice(list(vf.Fate))

    return policy


POLICIES = {
    "recompute": p.recompute,
    "matmuls": p.matmuls,
    "matmuls offloaded": p.any_of(p.matmuls, p.not_(p.matmuls)),
    "rest offloaded": p.first_of(p.recompute, p.everything),
    "only these": p.first_of(p.names(save=["mixed"], offload=["up"]), p.nothing),
    "all but these": p.first_of(p.names(recompute=["mixed", "up"]), p.larger_than(100)),
    "operation": lambda saved: vf.Fate.RECOMPUTE if saved.op in ("gelu", "mul", "sin") else vf.Fate.OFFLOAD,
    "size": lambda saved: vf.Fate.RECOMPUTE if saved.nbytes > 100 else vf.Fate.KEEP,
    "path": lambda saved: vf.Fate.RECOMPUTE if saved.path.startswith("layers.1") else vf.Fate.OFFLOAD,
    **{f"random {seed}": random_fates(seed) for seed in range(4)},
}


@pytest.mark.parametrize("body", BODIES)
def test_a_step_leaves_the_same_bits_under_every_policy(body):
    """Outputs, gradients, buffers, and the random numbers drawn after forward and after backward."""
    model = Model(BODIES[body], BODIES[body])
    plain = steps(model, model, num_steps=1)
    assert_equal(plain, steps(model, model, num_steps=1))
    for name, policy in POLICIES.items():
        fn = recomputing(model, policy, keep=300 if name == "random 3" else 0)
        assert_equal(plain, steps(fn, model, num_steps=1), name)
        assert_books_balance(fn)


def test_random_programs_give_the_same_bits_or_the_same_error():
    outcomes = Counter()
    for seed in range(60):
        model = Model(program(seed), program(-seed))
        plain = result_or_error(model, model)
        for policy in (p.recompute, random_fates(seed), random_fates(seed + 1)):
            fn = recomputing(model, policy)
            result = result_or_error(fn, model)
            assert isinstance(plain, str) == isinstance(result, str), (seed, plain, result)
            outcomes["wrong" if isinstance(plain, str) else "right"] += 1
            if isinstance(plain, list):
                assert_equal(plain, result, seed)
                assert_books_balance(fn)
                outcomes["recomputed"] += sums(fn)["recomputed"]
    assert outcomes["right"] > outcomes["wrong"] > 0
    assert outcomes["recomputed"] > 500


def result_or_error(fn, model):
    try:
        return step(fn, model)
    except RuntimeError as error:
        return str(error)


# Bodies that save nothing else than what they are given, or what is made of what is lost.
NOT_RECOMPUTABLE = {
    "argument_changed_in_place": "its argument was changed",
    "argument_changed_out_of_autograds_sight": "its argument was changed",
    "parameters_exchanged": "what its parameter was is gone",
    "returns_its_argument": "nothing that it makes is needed",
}


@pytest.mark.parametrize("body", BODIES)
def test_what_can_be_recomputed_is(body):
    model = Model(BODIES[body], BODIES[body])
    fn = recomputing(model)
    step(fn, model)
    assert (sums(fn)["recomputed"] == 0) == (body in NOT_RECOMPUTABLE)


@pytest.mark.parametrize("policy", ["recompute", "rest offloaded", "random 1"])
@pytest.mark.parametrize("store", [vf.DiskStore, lambda directory: CloneStore()], ids=["disk", "own"])
def test_works_with_read_ahead_from_any_store(policy, store, tmp_path):
    model = Model(transformer, residual_in_place, transformer)
    plain = steps(model, model)
    for prefetch in (0, 100, 64 << 20):
        fn = recomputing(model, POLICIES[policy], store=store(tmp_path), prefetch=prefetch)
        assert_equal(plain, steps(fn, model))
        assert_books_balance(fn)


# Memory.


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def mlp_body(m, x):
    h = x
    for _ in range(3):
        h = F.gelu(m.up(m.norm(h))).sigmoid()
        h = m.dropout(m.down(h))
    return x + h


LARGE = torch.randn(512, 8, generator=torch.Generator().manual_seed(2))


def test_holds_no_more_than_checkpointing_each_block_and_no_more_than_a_block_beside_it_in_backward():
    model = Model(*[mlp_body] * 4)
    plain_held, plain_peak, _, _ = measured(model, model, LARGE)
    held, peak, _, _ = measured(model, recomputing(model), LARGE)
    for i, layer in enumerate(model.layers):
        model.layers[i] = Checkpointed(layer)
    checkpoint_held, checkpoint_peak, _, _ = measured(model, model, LARGE)
    assert held <= checkpoint_held < 0.3 * plain_held
    assert peak <= checkpoint_peak < 0.6 * plain_peak
    one_block = (plain_held - held) / 4
    assert peak <= held + 1.5 * one_block


def test_offloading_the_rest_leaves_next_to_nothing():
    model = Model(*[mlp_body] * 4)
    plain_held, *_ = measured(model, model, LARGE)
    held, *_ = measured(model, recomputing(model, POLICIES["rest offloaded"], store=Elsewhere()), LARGE)
    assert held < 0.1 * plain_held


def test_a_replay_holds_each_value_until_its_last_use_only():
    def chain(m, x):
        h = x
        for _ in range(30):
            h = (h + 1) * 2  # neither saves anything
        return h.sin()

    model = Model(chain)
    held, peak, _, _ = measured(model, recomputing(model), LARGE)
    plain_held, plain_peak, _, _ = measured(model, model, LARGE)
    assert held <= plain_held
    assert peak <= plain_peak + 2 * LARGE.nbytes


# Operations.


def test_kept_products_are_not_computed_again():
    model = Model(mlp_body, transformer)
    _, _, _, plain = measured(model, model, INPUT)
    for policy in ("matmuls", "matmuls offloaded"):
        _, _, _, ops = measured(model, recomputing(model, POLICIES[policy], store=Elsewhere()), INPUT)
        again = ops - plain
        assert not [op for op in again if "mm" in op or op.startswith("_scaled_dot_product")]
        assert again["gelu"] and again["native_layer_norm"]


def test_only_what_leads_to_saved_tensors_runs_again_and_only_once():
    model = Model(mlp_body)
    _, _, forward, plain = measured(model, model, INPUT)
    _, _, _, ops = measured(model, recomputing(model), INPUT)
    again = ops - plain
    # Nobody saves the result of the last linear layer; the last dropout saves its mask only.
    assert again["addmm"] == forward["addmm"] - 1 == 5
    assert again["gelu"] == forward["gelu"] == 3
    assert again["sigmoid"] == forward["sigmoid"] == 3
    assert again["bernoulli_"] == forward["bernoulli_"] == 3
    assert again["add"] == 0


@pytest.mark.parametrize("body", ["batch_norm", "batch_norm_in_evaluation"])
def test_batch_norms_run_again_and_leave_their_statistics_alone(body):
    model = Model(BODIES[body])
    _, _, forward, plain = measured(model, model, INPUT)
    mean = model.layers[0].batch_norm.running_mean.clone()
    fn = recomputing(model)
    out = fn(INPUT.clone().requires_grad_()).sum()
    after_forward = [buffer.clone() for buffer in model.buffers()]
    out.backward()
    assert_equal(after_forward, list(model.buffers()))
    is_same = torch.equal(mean, model.layers[0].batch_norm.running_mean)
    assert is_same == (body == "batch_norm_in_evaluation")
    _, _, _, ops = measured(model, fn, INPUT)
    assert (ops - plain)["native_batch_norm"] == forward["native_batch_norm"] > 0


class InstanceNorm(nn.InstanceNorm1d):
    def forward(self, x):
        return super().forward(x[..., None].expand(*x.shape, 3)).sum(-1)


class FunctionalNorm(nn.BatchNorm1d):
    """Passes views of its statistics, which are no buffers."""

    def forward(self, x):
        mean, variance = self.running_mean.view(2, 4).flatten(), self.running_var.view(-1)
        return F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, 0.5)


class ScaledNorm(nn.BatchNorm1d):
    """Reads statistics that the block makes."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        mean, variance = self.running_mean * 1.5, self.running_var.exp()
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False)


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "momentum of 1": lambda: nn.BatchNorm1d(8, momentum=1.0),
    "without weights": lambda: nn.BatchNorm1d(8, affine=False),
    "instance norm": lambda: InstanceNorm(8, affine=True, track_running_stats=True),
    "as a function": lambda: FunctionalNorm(8),
    "scaled": lambda: ScaledNorm(8),
}
PASSES = {
    "another call": lambda fn, model, x: (fn(x), model.train(), fn(5 * x + 3))[0],
    "another call without recomputation": lambda fn, model, x: (fn(x), model.train(), model(5 * x + 3))[0],
    "without gradient": lambda fn, model, x: (fn(x), model.train(), torch.no_grad()(fn)(5 * x + 3))[0],
    "there and back": lambda fn, model, x: (fn(x), model.train(), fn(x + 3), model.eval(), fn(x))[0],
    "both differentiated": lambda fn, model, x: fn(x) + (model.train(), fn(5 * x + 3))[1],
}


@pytest.mark.parametrize("policy", ["recompute", "rest offloaded"])
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_changed_in_training_before_backward_do_not_reach_a_replay_in_evaluation(
    norm, passes, policy
):
    model = Model(lambda m, x: m.down(m.up(m.the_norm(x @ m.w)).tanh()))
    model.layers[0].the_norm = NORMS[norm]()

    def two_passes(fn):
        model.eval()
        return lambda x: PASSES[passes](fn, model, x)

    plain = steps(two_passes(model), model, num_steps=1)
    fn = recomputing(model, POLICIES[policy])
    assert_equal(plain, steps(two_passes(fn), model, num_steps=1))
    assert sums(fn)["recomputed"] > 0


def test_a_copy_of_the_statistics_is_counted_as_what_is_held_to_recompute_others():
    model = Model(lambda m, x: m.batch_norm(x @ m.w).sin()).eval()
    fn = recomputing(model)
    fn(INPUT)
    plan = vf.plan_offload(model, p.recompute, store=CloneStore(), blocks="layers.*")(INPUT)
    assert plan.count == {event: sums(fn)[event] for event in plan.count}
    assert plan.bytes == {event: sums(fn, "bytes")[event] for event in plan.bytes}
    copies = [tensor for tensor in plan.tensors if tensor.saved.shape == (8,) and not tensor.is_fixed]
    assert len(copies) == 2


def test_no_module_and_no_hook_of_the_user_runs_again():
    calls = Counter()
    model = Model(transformer)
    model.layers[0].up.register_forward_hook(lambda module, args, out: calls.update(["hook"]))
    original = model.layers[0].body
    model.layers[0].body = lambda m, x: calls.update(["body"]) or original(m, x)
    step(recomputing(model), model)
    assert calls == {"hook": 1, "body": 1}


def test_a_chain_of_thousands_of_operations_is_replayed_once_without_recursion():
    def chain(m, x):
        for _ in range(1500):
            x = (x * 1.0001).sin()
        return x

    model = Model(chain)
    plain = step(model, model)
    fn = recomputing(model)
    with Memory(model) as memory:
        result = step(fn, model)
    assert_equal(plain, result)
    assert memory.ops["sin"] == 1500 + 1 + 1499  # forward, and what leads to the last product
    fn(INPUT.clone().requires_grad_())  # dropped: as deep as it is long
    assert_books_balance(fn)


# Graphs.


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_graphs_go_backward_in_any_order(order):
    model = Model(transformer, residual_in_place)
    parameters = [parameter for _, parameter in sorted(model.named_parameters()) if used(parameter, model)]
    fn = recomputing(model, POLICIES["matmuls offloaded"])

    def gradients(fn, order):
        torch.manual_seed(4)
        outs = [fn(INPUT + i).sum() for i in range(3)]
        by_graph = {i: torch.autograd.grad(outs[i], parameters) for i in order}
        return [gradient for i in range(3) for gradient in by_graph[i]]

    assert_equal(gradients(model, range(3)), gradients(fn, order))
    assert_books_balance(fn)


def used(parameter, model):
    model.zero_grad()
    model(INPUT).sum().backward()
    return parameter.grad is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_retained_graphs_go_backward_again_and_again(policy):
    model = Model(transformer, residual_in_place)
    fn = recomputing(model, POLICIES[policy])
    x = INPUT.clone().requires_grad_()

    def gradients(fn):
        torch.manual_seed(4)
        out = fn(x)
        return [
            *(torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(3)),
            torch.autograd.grad(out[0].sum(), x, retain_graph=True)[0],
            torch.autograd.grad(out.sum(), x)[0],
        ]

    assert_equal(gradients(model), gradients(fn))
    s = sums(fn)
    assert s["live"] == 0 and s["restored"] == s["moved"] + s["deduplicated"]


def test_each_pass_over_a_retained_graph_replays_once():
    model = Model(mlp_body)
    fn = recomputing(model)
    x = INPUT.clone().requires_grad_()
    with Memory(model) as memory:
        out = fn(x).sum()
        counts = []
        for _ in range(3):
            memory.ops.clear()
            torch.autograd.grad(out, x, retain_graph=True)
            counts.append(memory.ops["gelu"])
    assert counts == [3, 3, 3]


def test_second_and_third_derivatives_are_equal():
    model = Model(transformer, BODIES["attention_by_hand"]).double()
    x = INPUT.double().requires_grad_()
    parameters = [model.layers[0].w, model.layers[1].qkv.weight]

    def derivatives(fn):
        torch.manual_seed(4)
        model.eval()
        (first,) = torch.autograd.grad(fn(x).pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        return [first.detach(), second.detach(), *torch.autograd.grad(second.sum(), parameters)]

    model = Model(BODIES["attention_by_hand"], mlp_body).double()
    parameters = [model.layers[0].qkv.weight, model.layers[1].up.weight]
    for policy in ("recompute", "matmuls offloaded", "random 1"):
        fn = recomputing(model, POLICIES[policy])
        assert_equal(derivatives(model), derivatives(fn))
        assert_books_balance(fn)


def test_derivatives_agree_with_finite_differences():
    model = Model(BODIES["attention_by_hand"], BODIES["complex_numbers"]).double().eval()
    fn = recomputing(model, POLICIES["rest offloaded"])
    x = INPUT.double().requires_grad_()
    assert torch.autograd.gradcheck(fn, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, x, fast_mode=True)


def test_saved_tensors_may_be_looked_at():
    model = Model(mlp_body)
    fn = recomputing(lambda x: model.layers[0](x).exp(), model=model)
    out = fn(INPUT.clone().requires_grad_())
    nodes = [out.grad_fn]
    for node in nodes:
        nodes.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    gelus = [node for node in nodes if node.name().startswith("Gelu")]
    first = [node._saved_self for node in gelus]
    assert all(torch.equal(a, node._saved_self) for a, node in zip(first, gelus, strict=True))
    assert len(gelus) == 3


@pytest.mark.parametrize("policy", ["recompute", "matmuls offloaded", "random 1"])
def test_a_graph_frees_everything_as_soon_as_it_is_gone(policy):
    model = Model(transformer, mlp_body)
    fn = recomputing(model, POLICIES[policy])
    gc.collect()
    gc.disable()
    try:
        for end in ("dropped", "half", "whole"):
            model.zero_grad()
            with Memory(model) as memory:
                out = fn(INPUT.clone().requires_grad_()).sum()
                if end == "half":
                    torch.autograd.grad(out, model.layers[1].up.weight)
                elif end == "whole":
                    out.backward()
                assert memory.live > 0
                del out
                gradients = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
                assert memory.live == sum(gradients)
            assert_books_balance(fn)
    finally:
        gc.enable()


def test_no_cycle_is_left_for_the_garbage_collector():
    model = Model(transformer, BODIES["gradient_taken_inside"])
    fn = recomputing(model, POLICIES["rest offloaded"])
    step(fn, model)
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        step(fn, model)
        fn(INPUT.clone().requires_grad_())
        gc.collect()
        # Among the compiler's options, of which each change makes a class, there may be one of ours.
        ours = {type(thing) for thing in gc.garbage if type(thing).__module__.startswith("veofunc")}
        assert {kind.__module__ for kind in ours} <= {"veofunc.offload.compiled.partition"}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# Changes after the block.


CHANGES = {
    "argument": lambda model, x, out: x.detach().add_(1),
    "parameter": lambda model, x, out: model.layers[0].up.weight.detach().add_(1),
    "saved result": lambda model, x, out: model.saved.detach().add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_block_of_what_a_replay_reads_raises(change):
    class Keeping(Model):
        def forward(self, x):
            self.saved = self.layers[0](x)
            return self.saved

    model = Keeping(lambda m, x: F.gelu(m.up(m.norm(x) + 1)).exp())
    fn = recomputing(model)
    x = INPUT.clone()
    out = fn(x)
    CHANGES[change](model, x, out)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        out.sum().backward()


def with_power_iteration(m, x):
    if not hasattr(m, "normed"):
        m.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return m.normed(x).tanh()


def with_average(m, x):
    h = x @ m.w
    with torch.no_grad():
        m.average.lerp_(h.mean(0), 0.1)
    return (h - m.average).tanh()


def with_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(m.down(m.up(x)))


def twice(layer, x):
    return layer(x) + layer(2 * x)


def residual(layer, x):
    h = x * 1
    h += layer(h)
    return h


STARTS = {
    "power iteration": (with_power_iteration, twice, "[8]"),
    "average": (with_average, twice, "[8]"),
    "residual under autocast": (with_autocast, residual, "[4, 8]"),
    "scratch": (
        lambda m, x: (x @ m.w + m.scratch).sin().exp(),
        lambda layer, x: sum(layer(x) + 0 * layer.scratch.fill_(i).sum() for i in range(2)),
        "[4, 8]",
    ),
}


@pytest.mark.parametrize("policy", ["recompute", "rest offloaded"])
@pytest.mark.parametrize("kind", STARTS)
def test_a_change_of_what_only_a_replay_reads_says_so_and_what_to_do(kind, policy):
    body, around, shape = STARTS[kind]
    model = Model(body)
    model.layers[0].scratch = torch.ones(4, 8)
    model.layers[0](INPUT)

    def run(x):
        return around(model.layers[0], x)

    plain = steps(run, model, num_steps=1)
    match = rf"{re.escape(shape)} is at .* in backward block 'layers.0' is computed again from it: do not"
    with pytest.raises(RuntimeError, match=match):
        steps(recomputing(run, POLICIES[policy], model=model), model, num_steps=1)
    for followed in (p.everything, lambda saved: vf.Fate.KEEP):  # the advice
        assert_equal(plain, steps(recomputing(run, followed, model=model), model, num_steps=1))


def test_a_change_of_what_autograd_saved_is_told_as_without_blocks():
    model = Model(lambda m, x: (x @ m.w).exp() * 2)
    fn = recomputing(model, p.everything)
    out = fn(INPUT.clone().requires_grad_())
    model.layers[0].w.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"\[8, 8\] is at .* Clone it before changing it"):
        out.sum().backward()


def test_a_change_after_the_block_of_what_no_replay_reads_is_none_of_its_business():
    model = Model(lambda m, x: x + (x @ m.w).sin().cos())
    change = torch.ones(4, 8)

    def body(x):
        h = model.layers[0](x)
        h += change
        return h.mul_(2)

    fn = recomputing(body, model=model)
    assert_equal(step(body, model), step(fn, model))
    assert sums(fn)["recomputed"] > 0


def test_a_graph_outlives_other_steps_on_the_same_parameters():
    """Parameters that no replay reads may change; what was computed from the old ones is kept."""
    model = Model(lambda m, x: (x @ m.w).sin().cos() + m.v)
    fn = recomputing(model, p.matmuls)
    out = fn(INPUT)
    (expected,) = torch.autograd.grad(model(INPUT).sum(), model.layers[0].w)
    with torch.no_grad():
        model.layers[0].v.add_(1)
    (gradient,) = torch.autograd.grad(out.sum(), model.layers[0].w)
    assert torch.equal(gradient, expected)


# Surroundings that are different in backward.


def test_backward_may_run_on_another_thread_and_with_other_defaults():
    names = ("transformer", "double_and_half_precision", "random_numbers", "autocast")
    model = Model(*(BODIES[name] for name in names))
    x = INPUT.clone().requires_grad_()

    def gradients(fn):
        torch.manual_seed(4)
        out = fn(x).sum()
        found = []

        def work():
            with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
                found.extend(torch.autograd.grad(out, [x, model.layers[0].qkv.weight]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return [*found, torch.get_rng_state()]

    plain = gradients(model)
    for policy in ("recompute", "matmuls offloaded", "random 1"):
        assert_equal(plain, gradients(recomputing(model, POLICIES[policy])), policy)


def test_another_default_dtype_in_backward_raises():
    model = Model(lambda m, x: (x * torch.rand(4, 8)).sin())
    out = recomputing(model)(INPUT.clone().requires_grad_())
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match=r"float64.*in forward it was.*float32"):
            out.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_that_share_a_graph_each_get_its_gradients():
    model = Model(mlp_body, BODIES["attention_by_hand"]).eval()
    fn = recomputing(model, POLICIES["rest offloaded"])
    x = INPUT.clone().requires_grad_()
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    out, found, start = fn(x).sum(), [], threading.Barrier(4)

    def work():
        start.wait()
        for _ in range(10):
            found.extend(torch.autograd.grad(out, x, retain_graph=True))

    run_in_threads([work] * 4)
    assert len(found) == 40
    assert all(torch.equal(gradient, plain) for gradient in found)


def test_threads_that_run_one_model_at_once_do_not_see_each_other():
    model = Model(mlp_body, BODIES["chunks_changed_in_place"]).eval()
    fn = recomputing(model, POLICIES["matmuls offloaded"])
    inputs = [(INPUT + i).requires_grad_() for i in range(4)]
    plain = [torch.autograd.grad(model(x).sum(), x)[0] for x in inputs]
    found, start = {}, threading.Barrier(4)

    def work(i):
        start.wait()
        found[i] = [torch.autograd.grad(fn(inputs[i]).sum(), inputs[i])[0] for _ in range(5)]

    run_in_threads([functools.partial(work, i) for i in range(4)])
    assert all(torch.equal(gradient, plain[i]) for i in range(4) for gradient in found[i])
    assert_books_balance(fn)


def run_in_threads(works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# What a model may do.


class Results(nn.Module):
    """Returns all sorts of things."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.block = kind, Block(mlp_body)

    def forward(self, x):
        return self.kind(self.block(x), x)


@dataclasses.dataclass
class Pair:
    hidden: torch.Tensor
    name: str


RESULTS = {
    "dictionary": (lambda out, x: {"hidden": out, "other": None}, lambda result: result["hidden"]),
    "data class": (lambda out, x: Pair(out, "x"), lambda result: result.hidden),
    "view of its result": (lambda out, x: (out[:2], out[2:]), lambda result: result[0]),
    "its argument beside": (lambda out, x: [x, out], lambda result: result[1] * result[0]),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_block_may_return_anything(kind):
    make, take = RESULTS[kind]
    model = Model(mlp_body)
    model.layers[0] = Results(make)
    fn = recomputing(lambda x: take(model.layers[0](x * 2)).sin(), model=model)
    plain = step(lambda x: take(model.layers[0](x * 2)).sin(), model)
    assert_equal(plain, step(fn, model))
    assert sums(fn)["recomputed"] > 0


def test_hooks_on_tensors_see_the_same_gradients():
    model, seen = Model(mlp_body, transformer), []

    def body(x):
        h = model.layers[0](x)
        h.register_hook(lambda gradient: seen.append(gradient.clone()))
        h.retain_grad()
        out = model.layers[1](h)
        out.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
        return out

    step(body, model)
    plain, seen[:] = seen[:], []
    step(recomputing(body, model=model), model)
    assert_equal(plain, seen)


def test_an_exception_in_a_block_that_its_parent_catches_leaves_right_paths_and_no_recording():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(fails), Block(refuses), Block(mlp_body)])
            self.layers[1].register_forward_pre_hook(lambda module, args: refuses(module, args[0]))
            self.after = Block(lambda m, x: x.exp().exp())

        def forward(self, x):
            x = x * 2
            for layer in self.layers:
                with contextlib.suppress(KeyError):
                    x = layer(x.sin())
            return self.after(x)

    def fails(m, x):
        m.norm(x * m.v)
        raise KeyError("in its forward")

    def refuses(m, x):
        raise KeyError("in a hook before ours")

    told = []

    def note(saved):
        told.append((saved.path, saved.op, saved.recomputable))
        return p.recompute(saved)

    model = Parent()
    fn = recomputing(model, note)
    assert_equal(step(model, model), step(fn, model))
    assert told.count(("", "mul", False)) == 3  # what the parent takes the sines of
    assert {path for path, _, recomputable in told if recomputable} >= {"layers.2.norm", "layers.2.up"}
    assert not any(recomputable for path, _, recomputable in told if path in ("", "after"))
    gc.collect()
    assert_books_balance(fn)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_does_nothing_where_nothing_is_saved(mode):
    model = Model(mlp_body).eval()
    fn = recomputing(model)
    with mode():
        assert torch.equal(fn(INPUT), model(INPUT))
    assert sums(fn)["packed"] == 0


def test_a_block_that_is_called_again_and_again_and_by_itself():
    def recursive(m, x):
        return mlp_body(m, x) if x[0, 0] > 100 else m(x + 200) * x.sin()

    model = Model(mlp_body, recursive)

    def body(x):
        for layer in (*model.layers, *model.layers):
            x = layer(x).sigmoid()
        return x

    fn = recomputing(body, model=model)
    assert_equal(step(body, model), step(fn, model))
    assert_books_balance(fn)


@pytest.mark.parametrize("inner", ["recompute", "matmuls offloaded", "random 1"])
@pytest.mark.parametrize("outer", ["recompute", "random 2", "rest offloaded"])
def test_calls_in_calls_are_equal(inner, outer):
    class Outer(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.parts = nn.ModuleList(Model(transformer, BODIES["relu_in_place"]) for _ in "12")
            self.layers = nn.ModuleList(Block(self.body) for _ in self.parts)
            self.functions = [wrap(part) for part in self.parts]

        def body(self, block, x):
            return self.functions[block is self.layers[1]](block.norm(x).sin()).cos()

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Outer(lambda part: part)
    plain = step(model, model)
    fn = recomputing(model, POLICIES[outer])
    model.functions = [recomputing(part, POLICIES[inner]) for part in model.parts]
    assert_equal(plain, step(fn, model))
    for function in (fn, *model.functions):
        assert_books_balance(function)


# Names and paths.


@pytest.mark.parametrize(
    ("policy", "fate"),
    [
        (p.names(save=["mixed"], offload=["up"]), "moved"),
        (p.names(save=["mixed"], recompute=["up"]), "recomputed"),
        (p.names(save=["up"], offload=["mixed"]), "kept"),
    ],
    ids=repr,
)
def test_names_decide_within_blocks(policy, fate):
    model, told = Model(transformer), []

    def note(saved):
        told.append((saved.name, policy(saved).name.lower()))
        return policy(saved)

    fn = recomputing(model, note)
    assert_equal(step(model, model), step(fn, model))
    fates = {"moved": "offload", "recomputed": "recompute", "kept": "keep"}
    assert [decided for name, decided in told if name == "up"][-1] == fates[fate]
    assert sums(fn)[fate] > 0


def test_what_is_named_to_be_kept_is_not_computed_again_for_what_follows():
    def body(m, x):
        return vf.checkpoint_name(m.down(m.up(x).sigmoid()), "mlp").add(1).exp().add(1).sin()

    model = Model(body)
    _, _, _, plain = measured(model, model, INPUT)
    for policy, num_products in [
        (p.recompute, 2),
        (p.names(save=["mlp"]), 1),  # of which the sigmoid is taken
        (p.names(offload=["mlp"]), 1),
    ]:
        fn = recomputing(model, policy, store=Elsewhere())
        _, _, _, ops = measured(model, fn, INPUT)
        assert (ops - plain)["exp"] == 1
        assert (ops - plain)["addmm"] == num_products, policy


# What cannot be repeated.


def test_an_operation_that_gives_something_else_the_second_time_raises():
    sizes = iter([3, 5])

    @torch.library.custom_op("veofunc_tests::fickle", mutates_args=())
    def fickle(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(next(sizes))

    model = Model(lambda m, x: x * fickle(x.detach()).sin().sum() + (x @ m.w).sin().cos())
    out = recomputing(model)(INPUT.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"recomputation of veofunc_tests\.fickle\.default gave a tensor"):
        out.sum().backward()


def test_memory_that_was_freed_raises():
    model = Model(lambda m, x: (x + m.v).sin())
    frozen = torch.ones(4, 8)
    model.layers[0].body = lambda m, x: (x + frozen).sin()
    out = recomputing(model)(INPUT.clone().requires_grad_())
    frozen.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"reads a tensor of shape \[4, 8\] whose memory was freed"):
        out.sum().backward()


def test_a_block_whose_parts_free_their_parameters_is_computed_part_by_part():
    """As FSDP does with the parts of a block: in backward only one of them has its parameters at a time."""
    model = Model(lambda m, x: m.down(m.up(m.norm(x)).sigmoid()).sin().add(1).sin())
    plain = step(model, model)
    parts = {part: part.weight.detach().clone() for part in (model.layers[0].up, model.layers[0].down)}

    def gather(part):
        part.weight.untyped_storage().resize_(parts[part].nbytes)
        with torch.autograd._unsafe_preserve_version_counter(part.weight), torch.no_grad():
            part.weight.copy_(parts[part])

    def free(part):
        part.weight.untyped_storage().resize_(0)

    def after_forward(part, args, out):
        free(part)
        out.register_hook(lambda gradient: gather(part))

    for part in parts:
        part.register_forward_pre_hook(lambda part, args: gather(part))
        part.register_forward_hook(after_forward)
        part.weight.register_post_accumulate_grad_hook(lambda _, part=part: free(part))
        free(part)
    fn = recomputing(model)
    assert_equal(plain, step(fn, model))
    assert sums(fn)["recomputed"] > 0
