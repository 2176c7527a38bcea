"""A plan is what a run does: fates and bytes one by one, without memory and without changing anything."""

import contextlib
import copy
import io
import os
import pickle
import random
import re
import resource
import threading
import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import veofunc as vf
from tests.offload.bodies import BODIES, INPUT, Model
from tests.offload.table import CASES, MODELS, WIDTH, CloneStore, Layers, batch, every_third, make
from veofunc import policies as p
from veofunc.offload.call import Call
from veofunc.offload.offload import make_settings

EVENTS = ("packed", "kept", "deduplicated", "moved", "recomputed")
DEFAULTS = {"model": None, "store": None, "keep": 0, "prefetch": 0, "blocks": None}


def planned(fn, policy, *args, **options):
    return vf.plan_offload(fn, policy, **{"store": CloneStore(), **options})(*args)


def run(fn, policy, *args, **options):
    """The sums of a real run, as a plan has them; and the output."""
    offloaded = vf.offload(fn, policy, **{"store": CloneStore(), **options})
    out = offloaded(*args)
    stats = offloaded.stats()
    return [{event: int(stats[kind, event]) for event in EVENTS} for kind in ("count", "bytes")], out


def assert_same(plan, sums):
    assert [plan.count, plan.bytes] == sums


def recording(policy, log):
    def ask(saved):
        fate = policy(saved)
        log.append((saved, fate))
        return fate

    return ask


# What is saved, and what becomes of it.


class PickleStore(CloneStore):
    """Keeps no tensors, so that all that live are those of the run; what it gives back can be followed."""

    def __init__(self):
        self.given: list[tuple[StorageWeakRef, int]] = []

    def put(self, tensor):
        return PickleSlot(self, pickle.dumps(tensor.clone()))


class PickleSlot:
    def __init__(self, store, content):
        self.store, self.content = store, content

    def get(self):
        tensor = pickle.loads(self.content)
        storage = tensor.untyped_storage()
        self.store.given.append((StorageWeakRef(storage), storage.nbytes()))
        return tensor


class Live(TorchDispatchMode):
    """Bytes of the storages that operations under it have made and that are still there."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and torch._C._has_storage(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.made or self.made[storage._cdata][0].expired():
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def nbytes(self, ignored):
        return sum(
            n for address, (ref, n) in self.made.items() if address not in ignored and not ref.expired()
        )


def addresses(model):
    return {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:offload moved nothing", "ignore:policy .* asks for names")
def test_counts_bytes_questions_and_what_is_held_in_the_end_are_those_of_a_run(name, case):
    model, x, case = make(name), batch(), CASES[case]

    def fn(x):
        return model(x * 1).sum()

    asked, foretold = [], []
    options = {"model": model, **case.options}
    with Live() as live:
        sums, out = run(fn, recording(case.policy, asked), x, **options, store=PickleStore())
    plan = planned(fn, recording(case.policy, foretold), x, **options)
    assert_same(plan, sums)
    assert foretold == asked
    assert plan.held_bytes == live.nbytes(addresses(model)) - out.nbytes


class Watched(Call):
    """A real call that looks at its handles each time that one is made."""

    def __init__(self, settings):
        super().__init__(settings)
        self.handles, self.timeline, self.ignored = [], [], addresses(settings.model)

    def _handle(self, tensor, saved=None):
        if self.handles:
            self.timeline.append(self.nbytes())
        handle = super()._handle(tensor, saved)
        self.handles.append(weakref.ref(handle))
        return handle

    def nbytes(self):
        """Bytes that handles hold: not given up, or brought back before backward asks for it."""
        handles = [handle for ref in self.handles if (handle := ref()) is not None]
        tensors = [h.tensor for h in handles if h.present] + [h.ready for h in handles if h.ready is not None]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(n for address, n in storages.items() if address not in self.ignored)


def watched(model, case):
    options = {**DEFAULTS, "model": model, "store": PickleStore(), **case.options}
    return Watched(make_settings(model, case.policy, **options))


@pytest.mark.parametrize("case", ["nothing", "every_third", "keep", "matmuls", "by_turns, keep"])
@pytest.mark.parametrize("name", ["blocks", "in place", "strange", "dropped", "experts"])
def test_what_is_held_after_each_tensor_is_that_of_a_run(name, case):
    model, x = make(name), batch()
    call = watched(model, CASES[case])
    with call.active():
        out = model(x)
    assert len(call.handles) > 5
    plan = planned(model, CASES[case].policy, x, **CASES[case].options)
    assert plan.forward == (*call.timeline, call.nbytes())
    assert plan.held_bytes == call.nbytes()
    assert plan.plain_bytes == planned(model, p.nothing, x).held_bytes
    del out


@pytest.mark.parametrize("name", ["blocks", "tied", "convolution", "strange", "dropped"])
def test_without_a_policy_it_is_what_plain_hooks_hold_after_each_tensor(name):
    """Counted by itself: distinct storages, parameters apart, of what autograd holds."""
    model, x = make(name), batch()
    ignored, alive, timeline = addresses(model), weakref.WeakSet(), []

    class Box:
        pass

    def nbytes():
        storages = {box.storage._cdata: box.storage.nbytes() for box in alive}
        return sum(n for address, n in storages.items() if address not in ignored)

    def pack(tensor):
        timeline.append(nbytes())
        box = Box()
        box.tensor, box.storage = tensor.detach(), tensor.untyped_storage()
        alive.add(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        out = model(x)
    assert planned(model, p.nothing, x).forward == (*timeline[1:], nbytes())
    del out


class Sampling(TorchDispatchMode):
    """Calls `sample` before each operation."""

    def __init__(self, sample):
        super().__init__()
        self.sample, self.samples = sample, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.samples.append(self.sample())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["nothing", "everything", "keep", "matmuls", "recompute, offload the rest"])
def test_predicts_backward_to_within_what_one_operation_saves(case):
    model, x, case = Layers(*(MODELS["blocks"]().layers[0] for _ in range(5))), batch(), CASES[case]
    call = watched(model, case)
    with call.active():
        loss = model(x).sum()
    given = call.settings.store.given

    def nbytes():
        return call.nbytes() + sum(n for ref, n in given if not ref.expired())

    with Sampling(nbytes) as backward:
        loss.backward()
    plan = planned(model, case.policy, x, **case.options, prefetch=0)
    assert len(plan.backward) == len(plan.tensors)
    assert all(nbytes >= 0 for nbytes in plan.backward)
    assert plan.peak_bytes == max(*plan.forward, *plan.backward) >= plan.held_bytes
    assert backward.samples[-1] == 0
    largest = max(tensor.saved.nbytes for tensor in plan.tensors)
    assert plan.backward[-1] <= largest
    assert abs(max(plan.backward) - max(backward.samples)) <= 3 * largest
    assert 3 * largest < plan.plain_bytes / 8


class Shifted(nn.Module):
    """Saves x and x @ w + 1; the latter is computed again from x @ w, which is held for that."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 4))

    def forward(self, x):
        return (x @ self.w + 1).sin()


def test_what_is_held_for_recomputation_stays_until_all_of_its_block_is_computed():
    plan = planned(nn.Sequential(Shifted()), p.matmuls, torch.ones(3, 8), blocks="*")
    x, product = 4 * 3 * 8, 4 * 3 * 4
    assert [(t.saved.op, t.fate.name) for t in plan.tensors] == [
        ("", "KEEP"),
        ("add", "RECOMPUTE"),
        ("mm", "KEEP"),
    ]
    assert plan.forward == (x, x + product, x + product)
    assert plan.backward == (x + product, x + 2 * product, x)


def test_parameters_are_not_counted_as_held_wherever_they_come_from():
    w = torch.ones(100, requires_grad=True)
    plan = planned(lambda w: (w.sin() * w.view(10, 10).exp().view(-1)).sum(), p.nothing, w)
    assert plan.bytes["kept"] == 4 * w.nbytes
    assert plan.held_bytes == plan.plain_bytes == 2 * w.nbytes  # the sine, and the exponential twice


def test_prefetch_holds_more_in_backward_up_to_its_bytes_and_one_tensor():
    model, x = make("mlp"), batch()
    plans = [planned(model, p.everything, x, prefetch=prefetch) for prefetch in (0, 1, 1000, 1 << 40)]
    largest = max(tensor.saved.nbytes for tensor in plans[0].tensors)
    for plan, limit in zip(plans, (0, 1, 1000, plans[0].plain_bytes), strict=True):
        extra = [a - b for a, b in zip(plan.backward, plans[0].backward, strict=True)]
        assert all(0 <= nbytes < limit + largest for nbytes in extra) or limit == 0 == max(extra)
    moved = [t.saved.nbytes for t in plans[3].tensors if t.fate is vf.Fate.OFFLOAD and t.same_as is None]
    assert plans[3].backward[-1] <= plans[3].backward[0] == sum(moved)  # all asked for at once


# Bodies that need the values of tensors or their memory, and what of the others a plan cannot know.
NEED_ELEMENTS = (
    "mixture_of_experts",
    "random_numbers_of_somebodys_operation",
    "kernel_in_place",
    "kernel_in_place_on_a_view",
    "sloppy_kernel_in_place",
    "filled_by_a_kernel",
)
UNKNOWN = {
    "lstm": "the size of its workspace",
    "parameters_exchanged": "memory of parameters",
    "exception_inside": "that an index is out of range",
    "compiled_function_inside": "what a compiled function saves",
    "gradient_taken_inside": "no run without a gradient for its input",
}


@pytest.mark.parametrize("case", ["everything", "recompute, offload the rest"])
@pytest.mark.parametrize("body", sorted(BODIES.keys() - {*NEED_ELEMENTS, *UNKNOWN}))
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_block_does_is_planned_as_it_runs(body, case):
    case = CASES[case]
    sums, _ = run(Model(BODIES[body]), case.policy, INPUT.clone(), **case.options)
    assert_same(planned(Model(BODIES[body]), case.policy, INPUT.clone(), **case.options), sums)


def test_a_workspace_whose_size_is_unknown_is_planned_as_kept_and_empty():
    """Of the recurrent layers of a CPU; all else is planned as it runs."""
    model, x = nn.Sequential(nn.LSTM(16, 16, 2)), torch.randn(5, 3, 16)
    policy = p.first_of(p.recompute, p.everything)
    plan = planned(model, policy, x, blocks="0")
    (count, nbytes), _ = run(model, policy, x, blocks="0")
    workspaces = [tensor for tensor in plan.tensors if tensor.saved.dtype is torch.uint8]
    assert [(t.fate, t.saved.nbytes) for t in workspaces] == [(vf.Fate.KEEP, 0)] * 2
    count["recomputed"], count["kept"] = count["recomputed"] - 2, count["kept"] + 2
    assert plan.count == count
    assert plan.bytes["moved"] == nbytes["moved"]


# Arguments and surroundings.


def autocast(x, linear):
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x).exp().float() * x


def penalty(x, linear):
    loss = linear(x).tanh().square().sum()
    return sum(g.square().sum() for g in torch.autograd.grad(loss, linear.parameters(), create_graph=True))


def backward_twice(x, linear):
    loss = linear(x).tanh().square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


FUNCTIONS = {
    "autocast": autocast,
    "double backward": penalty,
    "backward inside": backward_twice,
    "veofunc.grad inside": lambda x, linear: vf.grad(lambda x: linear(x).tanh().square().sum())(x).sum(),
    "vmap inside": lambda x, linear: torch.vmap(lambda x: linear(x).sin())(x),
    "wrapper subclass": lambda x, linear: linear(TwoTensor(x, x * 2)).sin().exp(),
    "sparse": lambda x, linear: (
        torch.sparse.mm(x.flatten(1).to_sparse(), linear.weight.repeat(6, 1)).sin().exp()
    ),
    "loop": lambda x, linear: torch.stack([linear(row).tanh() for row in x]).logsumexp(0),
    "constant": lambda x, linear: linear(x).exp() * torch.tensor(2.0).item() * torch.tensor([1.0] * WIDTH),
    "numpy constant": lambda x, linear: linear(x).exp() * torch.from_numpy(np.ones(WIDTH, dtype=np.float32)),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning", "ignore:offload moved nothing")
def test_functions_of_all_kinds_are_planned_as_they_run(kind):
    torch.manual_seed(0)
    linear, x = nn.Linear(WIDTH, WIDTH), batch()
    for policy in (every_third, p.everything):
        sums, _ = run(FUNCTIONS[kind], policy, x, linear, model=linear)
        assert_same(planned(FUNCTIONS[kind], policy, x, linear, model=linear), sums)
    assert sums[0]["moved"] > 0


def test_a_tensordict_and_keywords_are_given_on():
    model, data = make("tied"), TensorDict({"x": batch(), "scale": torch.tensor(2.0)})

    def fn(data, *, power):
        return model(data["x"]) ** power * data["scale"]

    assert planned(lambda x: model(x) ** 2.0 * data["scale"], p.everything, data["x"], model=model).count == (
        vf.plan_offload(fn, p.everything, store=CloneStore(), model=model)(data, power=2.0).count
    )


@dataclass
class Batch:
    """A container that PyTorch knows nothing of; it cannot be hashed."""

    x: Tensor
    note: str = ""


def test_arguments_may_be_of_any_kind():
    model, args = make("tied"), (Batch(batch()), {"tensors": [batch()], None: {1, 2}}, [], object())

    def fn(data, others, *rest):
        return model(data.x) * others["tensors"][0].mean() * len(rest)

    sums, _ = run(fn, p.everything, *args, model=model)
    assert_same(planned(fn, p.everything, *args, model=model), sums)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_parallel_model_is_planned_as_it_runs(mesh):
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = distribute_tensor(batch(), mesh, [Replicate()])

    def on_distributed(x):
        return (x @ x.mT).sin().exp() * model[0].bias.sum()

    for fn, arg in ((model, batch()), (on_distributed, x)):
        for policy in (p.everything, p.larger_than(400)):
            sums, _ = run(fn, policy, arg, model=model)
            assert sums[0]["moved"] > 0
            assert_same(planned(fn, policy, arg, model=model), sums)


def test_what_fn_closes_over_is_planned_as_it_runs_with_model_and_without():
    """Without, frozen weights and buffers count as activations."""
    model, x, weight = make("tied"), batch(), torch.randn(WIDTH)

    def fn():
        return model(x).sum(-1, keepdim=True) * weight * weight.exp()

    for options in ({}, {"model": model}):
        sums, _ = run(fn, p.everything, **options)
        assert_same(planned(fn, p.everything, **options), sums)
    assert planned(fn, p.everything).count["moved"] > planned(fn, p.everything, model=model).count["moved"]


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y[0], lambda y: y.flatten(0, 1)])
def test_an_argument_is_known_by_the_operation_that_made_it(view):
    model, y, asked, foretold = make("mlp"), view(nn.Linear(WIDTH, WIDTH)(batch()).tanh()), [], []
    run(model, recording(p.everything, asked), y)
    planned(model, recording(p.everything, foretold), y)
    assert foretold == asked
    assert asked[0][0].op == "tanh"


def test_arguments_may_be_one_tensor_or_views_of_it():
    model, y = make("mlp"), nn.Linear(WIDTH, WIDTH)(batch()).tanh()
    for args in ((y, y), (y, y[0]), (y[0], y[0])):
        sums, _ = run(lambda a, b: model(a) * b * a, p.everything, *args, model=model)
        assert_same(planned(lambda a, b: model(a) * b * a, p.everything, *args, model=model), sums)


def test_a_tensor_that_was_named_after_it_was_saved_is_shown_with_its_name():
    def fn(w):
        return vf.checkpoint_name(w.exp(), "late") * 2

    plan = planned(fn, p.names(offload=["late"]), torch.ones(3, requires_grad=True))
    assert [(tensor.saved.name, tensor.fate) for tensor in plan.tensors] == [("late", vf.Fate.OFFLOAD)]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(without):
    with without():
        plan = planned(make("mlp"), p.everything, batch())
    assert plan.tensors == plan.forward == plan.backward == ()
    assert plan.held_bytes == plan.peak_bytes == plan.plain_bytes == 0
    assert "0 B" in repr(plan)
    plan.plot()


def test_floating_point_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("blocks", "convolution"):
        model, x = make(name), batch()
        with FlopCounterMode(display=False) as counter:
            model(x)
        plan = planned(model, p.everything, x)
        assert plan.flops == counter.get_total_flops() > 0
        counts = [tensor.flops for tensor in plan.tensors]
        assert counts[0] == 0 and counts == sorted(counts) and counts[-1] <= plan.flops


def test_threads_plan_apart():
    model, start, plans = make("blocks"), threading.Barrier(3), []

    def work():
        start.wait()
        plans.append(planned(model, p.everything, batch()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plans == [planned(model, p.everything, batch())] * 3


# Nothing is needed and nothing changes.


class Careless(nn.Module):
    """Draws, counts, caches, and goes backward, in its forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(6)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.last = None

    def forward(self, x):
        random.random(), np.random.rand(), torch.manual_seed(0)
        x = self.norm(self.linear(x) + torch.randn(WIDTH)) * (1 + self.average)
        self.last, self.fresh, self.pair = x, x * 2, (x, x)
        self.average = 0.9 * self.average + 0.1 * x.mean((0, 1)).detach()
        x.sum().backward(retain_graph=True)
        return nn.functional.dropout(x).exp()


def state(model):
    return {
        "tensors": [
            (name, id(t), t.tolist()) for name, t in (*model.named_parameters(), *model.named_buffers())
        ],
        "gradients": [None if t.grad is None else (id(t.grad), t.grad.tolist()) for t in model.parameters()],
        "attributes": {name: repr(vars(module).keys()) for name, module in model.named_modules()},
        "hooks": [module._forward_hooks | module._forward_pre_hooks for module in model.modules()],
        "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
        "global hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
    }


@pytest.mark.parametrize("with_gradient", [False, True])
def test_model_gradients_random_numbers_and_files_are_as_before(with_gradient, tmp_path):
    model, x = Careless(), batch()
    if with_gradient:
        model(x)
        model.last = model.fresh = model.pair = None
    store, before, files = vf.DiskStore(tmp_path), state(model), sorted(os.listdir("/proc/self/fd"))
    first = planned(model, p.everything, x, store=store)
    second = planned(model, p.everything, x, store=store)
    assert first == second and hash(first) == hash(second)
    assert first.count["moved"] > 0
    assert state(model) == before
    assert sorted(os.listdir("/proc/self/fd")) == files
    assert os.listdir(tmp_path) == []
    assert x.tolist() == batch().tolist() and x.grad is None


def test_an_exception_leaves_nothing_behind_either():
    model, x = Careless(), batch()
    model.norm.register_forward_hook(lambda *args: 1 / 0)
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        planned(model, p.everything, x)
    assert state(model) == before


def test_nothing_is_put_into_a_store():
    class Refusing(CloneStore):
        def put(self, tensor):
            raise AssertionError("a plan moves nothing")

    assert planned(make("mlp"), p.everything, batch(), store=Refusing()).count["moved"] > 0


def test_a_store_is_asked_what_it_accepts():
    class OnlyLarge(CloneStore):
        def accepts(self, tensor):
            return tensor.nbytes > 600

    sums, _ = run(make("mlp"), p.everything, batch(), store=OnlyLarge())
    assert_same(planned(make("mlp"), p.everything, batch(), store=OnlyLarge()), sums)
    assert planned(make("mlp"), p.everything, batch(), store=vf.HostStore()).count["moved"] == 0


@contextlib.contextmanager
def more_memory_at_most(nbytes):
    """While the block runs, this process gets no more than `nbytes` of memory: a real "out of memory"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    (used,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_a_model_whose_activations_do_not_fit_is_planned():
    def block():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout())

    model, x = nn.Sequential(*(block() for _ in range(12))), torch.zeros(1, 64).expand(100_000, 64)
    with more_memory_at_most(64 << 20):
        with pytest.raises(RuntimeError, match="alloc"):
            model(x)
        plan = planned(model, p.everything, x)
    assert plan.plain_bytes > 2 << 30


def test_a_model_without_memory_is_planned():
    with torch.device("meta"):
        model, x = make("blocks"), torch.empty(1 << 20, 6, WIDTH)
    plan = planned(model, p.everything, x)
    small = planned(make("blocks"), p.everything, batch())
    assert plan.count == small.count
    assert plan.plain_bytes * 3 == small.plain_bytes << 20
    assert vf.plan_offload(model, p.everything)(x).count == plan.count  # the default store takes it


# What cannot be planned.


@pytest.mark.parametrize(
    ("step", "operation"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: 1 if x.sum() > 0 else 0, "_local_scalar_dense"),
        (lambda x: x.tolist(), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "nonzero"),
        (lambda x: torch.unique(x), "_unique2"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_a_function_that_needs_values_is_refused_with_the_operation(step, operation):
    def body(x):
        step(x)
        return x.exp()

    before = torch._C._len_torch_dispatch_stack()
    message = f"plan_offload runs body on tensors without elements, but it needs them in aten.{operation}"
    with pytest.raises(ValueError, match=message):
        planned(body, p.everything, batch())
    assert torch._C._len_torch_dispatch_stack() == before


def test_a_kernel_outside_of_pytorch_is_refused_instead_of_crashing():
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        planned(BODIES["kernel_in_place"].__call__, p.everything, Model(BODIES["gru"]).layers[0], INPUT)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor_from_jagged(torch.ones(5, WIDTH), torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match="cannot run on nested tensors"):
        planned(lambda x: x.exp(), p.everything, nested)


def test_options_are_those_of_offload():
    with pytest.raises(ValueError, match="keep must be an int >= 0"):
        vf.plan_offload(make("mlp"), p.everything, keep=-1)
    with pytest.raises(ValueError, match="prefetch must be an int >= 0"):
        vf.plan_offload(make("mlp"), p.everything, prefetch=float("nan"))
    with pytest.raises(ValueError, match="matches no module"):
        vf.plan_offload(make("mlp"), p.everything, blocks="decoder.*")
    with pytest.raises(ValueError, match="for which offload needs blocks="):
        vf.plan_offload(make("mlp"), p.recompute)
    with pytest.raises(TypeError, match="fn must be callable"):
        vf.plan_offload(3, p.everything)
    with pytest.raises(TypeError, match=r"must return a veofunc\.Fate"):
        planned(make("mlp"), lambda saved: "offload", batch())


# How a plan looks.


def test_prints_a_line_for_each_kind_and_one_for_all_layers():
    plans = [
        repr(planned(Layers(*(MODELS["blocks"]().layers[0] for _ in range(n))), p.larger_than(600), batch()))
        for n in (2, 12)
    ]
    for text in plans:
        lines = text.splitlines()
        assert lines[0] == "offload(Layers, larger_than(600))"
        assert max(map(len, lines)) <= 110
        assert len(lines) < 40
        assert any("layers.*.mlp.*" in line and "offload" in line for line in lines)
        assert "layers.0" not in text
    assert len(plans[0].splitlines()) == len(plans[1].splitlines())


def test_prints_its_sums():
    plan = planned(make("mlp"), p.any_of(p.matmuls, p.not_(p.matmuls)), batch(), blocks="layers.*")
    text = repr(plan)
    assert all(
        f"{event:<14}{count:>7} tensors {plan.bytes[event]:>9} B" in text
        for event, count in plan.count.items()
        if count
    )
    assert f"held after forward {plan.held_bytes} B, without offload {plan.plain_bytes} B" in text
    assert f"predicted peak {plan.peak_bytes} B" in text


def test_draws_the_bytes_that_are_held():
    from matplotlib.figure import Figure

    plan = planned(make("blocks"), p.larger_than(500), batch())
    figure = plan.plot()
    assert type(figure) is Figure
    (axes,) = figure.axes
    assert axes.get_title() == "offload(Layers, larger_than(500))"
    steps, plain, _ = axes.get_lines()
    assert steps.get_ydata() == pytest.approx([n / 2**20 for n in (*plan.forward, *plan.backward)])
    assert plain.get_ydata() == pytest.approx([plan.plain_bytes / 2**20] * 2)
    figure.savefig(io.BytesIO())


def test_a_long_title_is_drawn_whole():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    policy = p.any_of(*(p.in_modules(f"layers.{i % 2}", "layers.*.norm1") for i in range(6)))
    plan = planned(make("blocks"), policy, batch())
    canvas = FigureCanvasAgg(plan.plot())
    canvas.draw()
    (axes,) = canvas.figure.axes
    title = axes.title.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= canvas.figure.bbox.x1
    assert 0 <= title.y0 < title.y1 <= canvas.figure.bbox.y1
    assert axes.get_title().split() == plan.title.split()


# What is compiled.


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh() * x


def small():
    return Layers(Small(), Small())


def compiled_whole(model, backend):
    return torch.compile(model, backend=backend)


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compiled_blocks(model, backend):
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def compiled_method(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def compiled_twice(model, backend):
    return compiled_whole(compiled_blocks(model, backend), backend)


COMPILED = (compiled_whole, compiled_in_place, compiled_blocks, compiled_method, compiled_twice)
by_the_compiler = pytest.mark.filterwarnings(  # which hears this from PyTorch itself
    "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:`torch.jit.script_method`"
)


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


@by_the_compiler
@pytest.mark.parametrize("blocks", [None, "layers.*"])
@pytest.mark.parametrize("compile", COMPILED)
def test_the_plan_of_what_is_compiled_is_that_of_what_was_written(compile, blocks, compiler):
    policy = p.everything if blocks is None else p.first_of(p.recompute, p.everything)
    plain = planned(small(), policy, batch(), blocks=blocks)
    plan = planned(compile(small(), compiler), policy, batch(), blocks=blocks)
    assert replace(plan, title="") == replace(plain, title="")
    assert compiler.frame_count == 0


@by_the_compiler
@pytest.mark.parametrize("was_run", [False, True])
@pytest.mark.parametrize("compile", COMPILED)
def test_a_plan_leaves_the_compiler_as_it_was(compile, was_run, compiler):
    def num_frames(plans):
        torch.compiler.reset()
        compiler.frame_count, frames = 0, []
        fn, x = compile(small(), compiler), batch()
        if was_run:
            fn(x)
        if plans:
            planned(fn, p.first_of(p.recompute, p.everything), x, blocks="layers.*")
        frames.append(compiler.frame_count)
        fn(x)
        frames.append(compiler.frame_count)
        sums, _ = run(fn, p.everything, x)
        return [*frames, compiler.frame_count], sums

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="little is gained")
        without = num_frames(plans=False)
        assert num_frames(plans=True) == without
    assert without[0][1] > 0


@by_the_compiler
@pytest.mark.filterwarnings("ignore:little is gained")
def test_the_policy_is_obeyed_by_what_is_compiled_after_its_plan(compiler):
    policy = p.first_of(p.recompute, p.everything)
    fn = compiled_blocks(small(), compiler)
    planned(fn, policy, batch(), blocks="layers.*")
    sums, _ = run(fn, policy, batch(), blocks="layers.*")  # a warning if it were not
    assert compiler.frame_count > 0
    assert sums[0]["moved"] > 0


@by_the_compiler
def test_a_plan_that_raises_leaves_the_compiler_as_it_was(compiler):
    model = small()
    fn = torch.compile(lambda x: model(x) * 2, backend=compiler)

    def raising(x):
        raise ZeroDivisionError(fn(x))

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            planned(raising, p.everything, batch(), model=model)
    assert compiler.frame_count == 0
    fn(batch())
    assert compiler.frame_count == 1


@by_the_compiler
def test_plans_in_several_threads_leave_the_compiler_as_it_was(compiler):
    first_is_in, second_may_end = threading.Event(), threading.Event()
    fn = torch.compile(torch.sin, backend=compiler)

    def early(x):
        first_is_in.set()
        second_may_end.wait(0.2)
        return x.sin()

    def late(x):
        second_may_end.set()
        return x.sin()

    def plan_late():
        first_is_in.wait()
        planned(late, p.everything, batch())

    threads = [threading.Thread(target=planned, args=(early, p.everything, batch()))]
    threads.append(threading.Thread(target=plan_late))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fn(batch())
    assert compiler.frame_count == 1


# What is no plan yet.


def test_what_was_not_called_with_arguments_says_so():
    uncalled = vf.plan_offload(make("mlp"), p.everything, store=CloneStore())
    said = "plan_offload(Layers, everything): not a plan yet, call it with the arguments of Layers"
    assert repr(uncalled).startswith(said)
    with pytest.raises(AttributeError, match=re.escape(said)):
        uncalled.plot()
    assert not hasattr(uncalled, "bytes")
    assert callable(copy.copy(uncalled))
