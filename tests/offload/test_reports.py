"""What users of other offload libraries reported, tried on ours: each test cites its report.

`ELSEWHERE` says which other tests show the rest, apart from what needs an accelerator.
"""

import random
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import veofunc as vf
from veofunc import policies as p

ELSEWHERE = {
    "test_offload.py": {
        "pytorch #146036, #141845, #122729: no hooks under torch.func": (
            "test_refuses_torch_func_with_the_name_of_what_works"
        ),
        "VeOmni PR #1127: offload inside of a checkpointed layer": (
            "test_offload_inside_a_checkpointed_region_is_bit_equal"
        ),
        "ms-swift PR #10157: strides of an alias": "test_views_of_one_tensor_give_bit_equal_gradients",
        "SSDTrain: one identity for q, k and v": "test_several_saved_views_of_one_tensor_stay_apart",
        "TRL PR #6241: a recycled address": (
            "test_a_recycled_address_is_not_taken_for_the_tensor_that_was_there"
        ),
        "TRL #4280, #4236: two graphs alive": "test_graphs_alive_at_once_go_backward_in_any_order",
        "TRL PR #5700: branches that never go backward": (
            "test_a_part_that_is_never_differentiated_is_dropped"
        ),
        "pytorch #158657, DeepSpeed #1201, torchtune #385: a disk": (
            "test_output_loss_and_gradients_are_bit_equal"
        ),
        "DeepSpeed PR #8388, pytorch PR #186396, sglang #22594: strides, offsets, repetition": (
            "test_moves_no_repetition_and_gives_back_the_strides"
        ),
        "unsloth-zoo PR #805: a pool made in inference mode": (
            "test_trains_after_a_first_use_in_inference_mode"
        ),
        "pytorch PR #189025: an output that holds itself": (
            "test_an_output_that_nobody_differentiates_dies_at_once"
        ),
        "hooks switch off the check of changes in place": (
            "test_a_saved_tensor_changed_in_place_raises_kept_or_moved"
        ),
        "the optimizer steps before backward": (
            "test_a_parameter_changed_by_the_optimizer_between_forward_and_backward_raises_as_without"
        ),
        "integers, masks, sparse tensors, subclasses": "test_every_saved_tensor_is_seen",
        "unpacked several times": "test_retained_graphs_go_backward_again_and_again",
        "read before backward": "test_saved_tensors_may_be_inspected_before_backward",
        "hooks belong to a thread": "test_two_calls_at_once_do_not_mix",
        "a hook left behind by an exception": (
            "test_an_exception_in_forward_leaves_no_hook_and_nothing_in_the_store"
        ),
        "MindSpeed-MM, VeOmni: a storage emptied under its other owners": (
            "test_tensors_that_the_user_holds_are_never_emptied"
        ),
        "VeOmni: a budget that drifts": "test_keep_is_the_same_for_each_of_several_graphs_alive",
    },
    "stores/test_ferry.py": {
        "TRL PR #7195: the stream is chosen too early": (
            "test_whatever_runs_when_all_see_the_right_values_and_nobody_writes_to_memory_of_another"
        ),
        "torchtune #1867, in HostStore": "test_gradients_are_the_same_however_late_the_copies_are",
        "verl PR #6193: host memory taken anew in each step": "test_the_second_step_takes_no_new_host_memory",
    },
    "stores/test_traffic.py": {
        "torchtune #1867, Megatron-LM #7398, in DiskStore": (
            "test_any_order_of_events_in_any_threads_gives_right_values"
        ),
    },
    "stores/test_disk.py": {
        "verl PR #6193: disk space taken anew in each step": "test_the_file_does_not_grow_from_step_to_step",
    },
    "functional/test_blockwise.py": {
        "pytorch PR #187316: offload under torch.func": (
            "test_first_order_results_are_bit_equal_and_every_count_adds_up"
        ),
    },
    "compiled/test_regions.py": {
        "pytorch #148222: a compiled region takes all it saved back at once": (
            "test_little_is_gained_when_one_region_saved_what_was_moved"
        ),
    },
    "stores/test_store.py": {
        "lazy conjugates and negatives": ("test_gives_back_lazy_conjugates_and_negatives_with_their_values"),
    },
}


@pytest.mark.parametrize("file", ELSEWHERE)
def test_what_is_tried_elsewhere_still_is(file):
    source = (Path(__file__).parent / file).read_text()
    assert [name for name in ELSEWHERE[file].values() if f"\ndef {name}(" not in source] == []


class LateStore:
    """Copies what it was given on a thread of its own: not before it is let, and then in any order."""

    def __init__(self, order=list):
        self.order, self.given = order, []
        self.asked = threading.Event()

    def accepts(self, tensor):
        return True

    def put(self, tensor):
        self.given.append(LateSlot(tensor, self.asked))
        return self.given[-1]

    def let(self):
        threading.Thread(target=lambda: [slot.copy() for slot in self.order(self.given)]).start()


class LateSlot:
    def __init__(self, tensor, asked):
        self.tensor, self.asked, self.copied = tensor, asked, threading.Event()

    def copy(self):
        self.tensor = self.tensor.clone()
        self.copied.set()

    def get(self):
        self.asked.set()
        assert self.copied.wait(timeout=60)
        return self.tensor.clone()


class PromptStore(LateStore):
    """Copies at once, and leaves its slots to those who have them."""

    def put(self, tensor):
        slot = super().put(tensor)
        self.given.pop().copy()
        return slot


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Tied(nn.Module):
    """Two layers between an embedding and a head with the same weight; the loss is taken in chunks."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.around_layer = self.around_chunk = lambda fn, *args: fn(*args)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = self.around_layer(layer, x)
        chunks = zip(x.chunk(3, dim=1), tokens[:, 1:].chunk(3, dim=1), strict=True)
        return sum(self.around_chunk(self.chunk_loss, *chunk) for chunk in chunks)

    def chunk_loss(self, x, labels):
        return F.cross_entropy(self.head(x).mT, labels, reduction="sum")


TOKENS = torch.arange(26).view(2, 13) % 20
CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(first, second):
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def count(fn, event):
    return int(fn.stats()["count", event])


# Copies that are not made yet.

ORDERS = {
    "in order": list,
    "newest first": lambda given: given[::-1],
    "shuffled": lambda given: random.Random(0).sample(given, len(given)),
}


# torchtune #1867
@pytest.mark.parametrize("order", ORDERS)
def test_a_store_may_copy_late_though_all_others_gave_the_tensor_up(model, order):
    expected = gradients(model, model(TOKENS))
    store = LateStore(ORDERS[order])
    fn = vf.offload(model, p.everything, store=store)
    loss = fn(TOKENS)
    taken = [torch.full(parameter.shape, float("nan")) for parameter in model.parameters() for _ in range(9)]
    taken += [torch.full((2, 12, width), float("nan")) for width in (8, 16) for _ in range(9)]
    store.let()
    assert_same(gradients(model, loss), expected)
    assert count(fn, "moved") == len(store.given) > 0 and taken


# Megatron-LM #7398
def test_backward_waits_for_a_copy_that_has_not_begun(model):
    expected = gradients(model, model(TOKENS))
    store, found = LateStore(), []
    fn = vf.offload(model, p.everything, store=store)
    loss = fn(TOKENS)
    backward = threading.Thread(target=lambda: found.extend(gradients(model, loss)))
    backward.start()
    assert store.asked.wait(timeout=60)
    assert count(fn, "restored") == 0
    store.let()
    backward.join(timeout=60)
    assert_same(found, expected)


# What comes back.


# TRL PR #7195
def test_labels_that_start_in_the_middle_of_their_storage_come_back(tmp_path):
    logits, tokens = torch.randn(11, 20, requires_grad=True), torch.arange(12)
    fn = vf.offload(F.cross_entropy, p.everything, store=vf.DiskStore(tmp_path))
    assert tokens[1:].storage_offset() == 1
    found, expected = (torch.autograd.grad(f(logits, tokens[1:]), logits) for f in (fn, F.cross_entropy))
    assert_same(found, expected)
    assert count(fn, "moved") >= 2  # the labels, and the logarithms of the probabilities


# torchtune #2456
def test_what_one_function_saves_on_several_devices_comes_back_on_each():
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0].clone()

        @staticmethod
        def backward(ctx, grad):
            devices.extend(tensor.device.type for tensor in ctx.saved_tensors)
            return grad, None, None

    w, devices = torch.ones(3, requires_grad=True), []
    others = torch.ones(3, device="meta"), torch.arange(3)
    fn = vf.offload(lambda: Save.apply(w * 1, *others), p.everything, store=PromptStore())
    fn().sum().backward()
    assert devices == ["cpu", "meta", "cpu"]
    assert count(fn, "moved") == 2


# torchtune #2683
def test_a_tensor_parallel_layer_has_bit_equal_gradients():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        layer, x = Layer(8), torch.randn(3, 8)
        plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(layer, init_device_mesh("cpu", (1,)), plan)
        expected = gradients(layer, layer(x).sum())
        fn = vf.offload(layer, p.in_modules("mlp"), store=PromptStore())
        assert_same(gradients(layer, fn(x).sum()), expected)
        assert count(fn, "moved") == count(fn, "restored") >= 3
    finally:
        dist.destroy_process_group()


# VeOmni's sync offload knows weights by their TBackward0, which activations have too.
def test_transposed_activations_are_governed_and_weights_of_no_kind_are():
    torch.manual_seed(0)
    model, told = nn.Sequential(nn.Conv1d(4, 5, 2), nn.LayerNorm(6), nn.Linear(6, 7)), []

    def note(saved):
        told.append(saved.shape)
        return vf.Fate.OFFLOAD

    def forward(x):
        h = model(x)[0]
        return h @ h.t()

    x = torch.randn(1, 4, 7, requires_grad=True)
    fn = vf.offload(forward, note, model=model, store=PromptStore())
    assert_same(gradients(model, fn(x).sum()), gradients(model, forward(x).sum()))
    assert (7, 5) in told
    assert not {tuple(parameter.shape) for parameter in model.parameters()} & set(told)


# Gradients inside of gradients.


class ChunkLoss(torch.autograd.Function):
    """Takes its gradients in forward, so that logits need not wait for backward."""

    @staticmethod
    def forward(ctx, loss_of, x, weight, labels):
        grads, loss = vf.grad_and_value(loss_of, argnums=(0, 1))(x, weight, labels)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad):
        return None, *[grad * saved for saved in ctx.saved_tensors], None


# VeOmni #964, #1004
def test_a_chunked_loss_may_take_its_gradients_in_forward(model):
    def loss_of(x, weight, labels):
        return F.cross_entropy((x @ weight.t()).mT, labels, reduction="sum")

    expected = gradients(model, model(TOKENS))
    model.around_chunk = lambda _, x, labels: ChunkLoss.apply(loss_of, x, model.head.weight, labels)
    plain = gradients(model, model(TOKENS))
    fn = vf.offload(model, p.everything, store=PromptStore())
    assert_same(gradients(model, fn(TOKENS)), plain)
    torch.testing.assert_close(plain, expected)
    assert count(fn, "moved") >= 6  # two gradients of each chunk


# unsloth-zoo PR #892
@pytest.mark.parametrize("kind", ["recompute", *CHECKPOINTS])
def test_a_weight_that_is_tied_and_used_in_chunks_gets_its_gradient_once(model, kind):
    expected = gradients(model, model(TOKENS))
    policy, options = p.everything, {}
    if kind == "recompute":
        policy, options = p.first_of(p.recompute, p.everything), {"blocks": "head"}
    else:
        model.around_layer = model.around_chunk = CHECKPOINTS[kind]
    fn = vf.offload(model, policy, store=PromptStore(), **options)
    torch.testing.assert_close(gradients(model, fn(TOKENS)), expected)
    assert_same(gradients(model, fn(TOKENS)), gradients(model, model(TOKENS)))


class Products(TorchDispatchMode):
    """Counts the products of matrices with an added bias: they are of forward passes."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


# pytorch #180874, #185015: MUST_CPU_OFFLOAD recomputes
@pytest.mark.parametrize(
    ("policy", "num_again"),
    [(p.everything, 0), (p.any_of(p.matmuls, p.not_(p.matmuls)), 0), (p.recompute, 2)],
    ids=["everything", "matmuls", "recompute"],
)
def test_what_is_offloaded_is_not_computed_again(model, policy, num_again):
    fn = vf.offload(model, policy, store=PromptStore(), blocks="layers.*")
    loss = fn(TOKENS)
    with Products() as products:
        loss.backward()
    assert products.num == num_again


# Nothing happens, and nothing is said.


# VeOmni #965, verl #3629, ArcticTraining #373
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_says_so_if_layers_that_checkpoint_themselves_leave_it_nothing(model, kind):
    model.around_layer = CHECKPOINTS[kind]
    fn = vf.offload(model, p.in_modules("layers.*.mlp"), store=PromptStore())
    with pytest.warns(UserWarning, match=r"offload moved nothing: \d+ tensors were saved, and policy in_mod"):
        loss = fn(TOKENS)
    assert_same(gradients(model, loss), gradients(model, model(TOKENS)))
    assert count(fn, "moved") == 0


# MaxText #4990
def test_says_which_names_nothing_was_given():
    w = torch.ones(3, requires_grad=True)
    fn = vf.offload(
        lambda: vf.checkpoint_name(w.exp(), "there").sin(),
        p.names(offload=["there", "absent"]),
        store=PromptStore(),
    )
    with pytest.warns(UserWarning, match="names that were not given: absent;"):
        fn()


# jax #23869
def test_says_which_names_were_given_to_what_is_never_saved():
    w = torch.ones(3, requires_grad=True)
    fn = vf.offload(
        lambda: vf.checkpoint_name(vf.checkpoint_name(w.exp(), "saved").sin() + 1, "residual"),
        p.names(offload=["saved", "residual"]),
        store=PromptStore(),
    )
    with pytest.warns(UserWarning, match="residual"):
        fn()


# jax PR #20015
def test_a_name_with_two_fates_is_refused():
    with pytest.raises(ValueError, match=r"got twice: \['x'\]"):
        p.names(save=["x"], offload=["x", "y"])


# NeMo-RL PR #2279
@pytest.mark.parametrize("blocks", [None, "layers.*"])
def test_a_forward_without_gradients_in_between_changes_nothing(model, blocks):
    policy = p.everything if blocks is None else p.first_of(p.recompute, p.everything)
    fn = vf.offload(model, policy, store=PromptStore(), keep=1000, blocks=blocks)
    expected, sums = gradients(model, model(TOKENS)), []
    for _ in range(3):
        assert_same(gradients(model, fn(TOKENS)), expected)
        sums.append(fn.stats()["count"])
        with torch.no_grad():
            fn(TOKENS)
    assert all((sums[i] == (i + 1) * sums[0]).all() for i in range(3))
    assert sums[0]["moved"] > 0


# TRL PR #5700
def test_a_hundred_steps_that_are_skipped_leave_nothing(model, tmp_path):
    fn = vf.offload(model, p.everything, store=vf.DiskStore(tmp_path))
    for _ in range(100):
        loss = fn(TOKENS) * float("nan")
        assert count(fn, "live") > 0
        del loss
        assert count(fn, "live") == int(fn.stats()["bytes", "live"]) == 0
    assert count(fn, "dropped") == count(fn, "moved") + count(fn, "deduplicated")


# Attributes of the context pass by all hooks.
def test_what_a_function_keeps_on_its_context_is_left_where_it_is():
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.detach()
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.x * grad

    w = torch.arange(3.0, requires_grad=True)
    fn = vf.offload(lambda: Keep.apply(w).sum(), p.everything, store=PromptStore())
    fn().backward()
    assert w.grad.tolist() == [0, 2, 4]
    assert count(fn, "packed") == 0
