"""Recomputation inside blocks against the same model without it: equal bit for bit, and less memory."""

import contextlib
import dataclasses
import gc
import itertools
import random
import threading
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
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
    residual_in_place,
    step,
    steps,
    sums,
    transformer,
)
from veofunc import policies as p


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
    **{f"random {seed}": random_fates(seed) for seed in range(6)},
}


@pytest.mark.filterwarnings("ignore:offload moved nothing", "ignore:policy .* asks for names")
@pytest.mark.parametrize("body", BODIES)
def test_two_steps_leave_the_same_bits_under_every_policy(body):
    """Outputs, gradients, buffers, and the random numbers drawn after forward and after backward."""
    model = Model(BODIES[body], BODIES[body])
    plain = steps(model, model)
    assert_equal(plain, steps(model, model))
    for name, policy in POLICIES.items():
        fn = recomputing(model, policy, keep=300 if name == "random 3" else 0)
        assert_equal(plain, steps(fn, model), name)
        assert_books_balance(fn)


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


class Memory(TorchDispatchMode):
    """Bytes of the storages that operations made, while they live, and the names of the operations."""

    def __init__(self, model):
        super().__init__()
        self.storages = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.live, self.peak, self.ops = 0, 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops[func._schema.name.removeprefix("aten::")] += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _note(self, storage):
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._ended, storage._cdata, storage.nbytes())

    def _ended(self, address, nbytes):
        self.storages.discard(address)
        self.live -= nbytes


def measured(model, fn, x):
    """Bytes held between forward and backward, the most in backward, and operations of each pass."""
    model.zero_grad()
    with Memory(model) as memory:
        loss = fn(x.clone().requires_grad_()).sum()
        held, forward = memory.live, memory.ops
        memory.ops, memory.peak = Counter(), 0
        loss.backward()
        gradients = sum(parameter.nbytes for parameter in model.parameters())
    return held, memory.peak - gradients, forward, memory.ops


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


class Elsewhere(CloneStore):
    """Keeps its clones where no operation of PyTorch made them."""

    def put(self, tensor):
        slot = super().put(tensor)
        slot.content = torch.from_numpy(slot.content.numpy().copy())
        return slot


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
        for _ in range(3000):
            x = (x * 1.0001).sin()
        return x

    model = Model(chain)
    plain = step(model, model)
    fn = recomputing(model)
    x = INPUT.clone().requires_grad_()
    with Memory(model) as memory:
        out = fn(x)
        memory.ops.clear()
        out.sum().backward()
    assert memory.ops["sin"] == 3000 - 1 + 0 * sums(fn)["recomputed"]
    assert_equal(plain, step(fn, model))
    del out
    gc.disable()
    try:
        fn(INPUT.clone().requires_grad_())  # dropped: as deep as it is long
    finally:
        gc.enable()
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
@pytest.mark.filterwarnings("ignore:offload moved nothing", "ignore:policy .* asks for names")
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


def test_a_dropped_graph_frees_everything_at_once():
    model = Model(transformer, mlp_body)
    for policy in POLICIES.values():
        fn = recomputing(model, policy)
        for end in ("dropped", "half", "whole"):
            gc.collect()
            gc.disable()
            try:
                x = INPUT.clone().requires_grad_()
                with Memory(model) as memory, contextlib.suppress(UserWarning):
                    out = fn(x)
                    if end == "whole":
                        out.sum().backward()
                    elif end == "half":
                        torch.autograd.grad(out.sum(), model.layers[1].w, allow_unused=True)
                    del out, x
                    assert memory.live - gradient_bytes(model) == 0
                model.zero_grad()
            finally:
                gc.enable()
        assert_books_balance(fn)


def gradient_bytes(model):
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
