"""`monitor_router` against plain loops over the choices that routers make."""

import copy
import functools
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import veofunc as vf
from tests import reference
from tests.no_sync import NoSync

WIDTH = 6
FEW = settings(max_examples=25, derandomize=True, database=None, deadline=None)
SUMS = ("tokens_per_expert", "zero_weight", "tokens", "dropped")


class Router(nn.Module):
    def __init__(self, num_experts=4, top_k=2):
        super().__init__()
        self.linear, self.top_k = nn.Linear(WIDTH, num_experts), top_k

    def forward(self, x):
        logits = self.linear(x)
        weights, ids = logits.softmax(-1).topk(self.top_k)
        return logits, weights, ids


class Block(nn.Module):
    def __init__(self, num_experts=4, top_k=2):
        super().__init__()
        self.router, self.experts = Router(num_experts, top_k), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        _, weights, _ = self.router(x)
        return x + self.experts(x).tanh() * weights.sum(-1, keepdim=True)


def select(context, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def plain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def recomputed(layers, x, *, reentrant=False, **options):
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant, **options)
    return x


def nested(layers, x, *, reentrant):
    inner = functools.partial(recomputed, layers[:2], reentrant=reentrant)
    return recomputed(layers[2:], checkpoint(inner, x, use_reentrant=reentrant), reentrant=reentrant)


RUNS = {
    "plain": plain,
    "reentrant": functools.partial(recomputed, reentrant=True),
    "non-reentrant": recomputed,
    "selective": functools.partial(
        recomputed, context_fn=functools.partial(create_selective_checkpoint_contexts, select)
    ),
    "nested reentrant": functools.partial(nested, reentrant=True),
    "nested non-reentrant": functools.partial(nested, reentrant=False),
}


class Model(nn.Module):
    """Three blocks, run in one of the ways of `RUNS`."""

    def __init__(self, num_experts=(4, 4, 4), top_k=2, run="plain", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block(n, top_k) for n in num_experts)
        self.run = RUNS[run]

    def forward(self, x):
        return self.run(self.layers, x)


class Given(nn.Module):
    """A router that returns what it is told to: ids and weights of shape [N, K]."""

    def __init__(self, ids, num_experts, weights=None):
        super().__init__()
        self.ids, self.weights, self.num_experts = ids, weights, num_experts

    def forward(self, x):
        weights = torch.ones(self.ids.shape) if self.weights is None else self.weights
        return torch.zeros(self.ids.shape[0], self.num_experts), weights, self.ids


def make_x(seed=0, num_tokens=9):
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def stacked(per_layer):
    """The reference's counts of every layer as the observations are: [L, E], short layers filled up."""
    width = max(len(counts["tokens_per_expert"]) for counts in per_layer)
    columns = {name: [counts[name] for counts in per_layer] for name in SUMS}
    for name in ("tokens_per_expert", "zero_weight"):
        columns[name] = [row + [0] * (width - len(row)) for row in columns[name]]
    return columns


@torch.no_grad()
def expected_counts(model, x):
    """Asks each router in turn, without hooks."""
    per_layer = []
    for layer in model.layers:
        logits, weights, ids = layer.router(x)
        per_layer.append(reference.router_counts(ids.tolist(), weights.tolist(), logits.shape[-1]))
        x = layer(x)
    return stacked(per_layer)


def assert_counts(obs, expected):
    assert set(obs["router"].keys()) == set(SUMS)
    for name in SUMS:
        assert obs["router", name].dtype == torch.int64
        assert obs["router", name].tolist() == expected[name], name


def hooks_on(model):
    """Every hook of every kind in `model`."""
    tables = [
        vars(module)[name] for module in model.modules() for name in vars(module) if name.endswith("_hooks")
    ]
    return [hook for table in tables for hook in table.values()]


@FEW
@given(st.data())
def test_counts_equal_a_loop_over_slots(data):
    num_experts, top_k, num_tokens = (data.draw(st.integers(*range_)) for range_ in ((3, 6), (1, 2), (1, 7)))

    def slots(elements):
        row = st.lists(elements, min_size=top_k, max_size=top_k)
        return data.draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))

    layers, expected = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        ids, weights = slots(st.integers(-2, num_experts + 1)), slots(st.sampled_from([0.0, -0.0, 0.25, 1.0]))
        dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
        layers.append(Given(torch.tensor(ids, dtype=dtype), num_experts, torch.tensor(weights)))
        expected.append(reference.router_counts(ids, weights, num_experts))
    model = nn.ModuleList(layers)
    monitored = vf.monitor_router(lambda x: [layer(x) for layer in model], model=model)
    for _ in range(2):  # the first call searches, the next ones know
        assert_counts(monitored(make_x())[1], stacked(expected))
    assert [router.num_experts for router in monitored.routers] == [num_experts] * len(layers)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_counts_are_those_that_the_routers_give_by_themselves(top_k):
    model, x = Model(top_k=top_k), make_x()
    out, obs = vf.monitor_router(model)(x)
    assert_counts(obs, expected_counts(model, x))
    assert torch.equal(out, model(x))


def test_layers_may_have_different_numbers_of_experts():
    model, x = Model(num_experts=(3, 8, 5)), make_x()
    monitored = vf.monitor_router(model)
    for _ in range(2):
        assert_counts(monitored(x)[1], expected_counts(model, x))
    assert monitored.routers == (
        ("layers.0.router", 3, 2),
        ("layers.1.router", 8, 2),
        ("layers.2.router", 5, 2),
    )


def test_an_id_that_only_a_wider_layer_has_is_dropped():
    model = nn.Sequential(Given(torch.tensor([[0, 4]]), 3), Given(torch.tensor([[0, 4]]), 5))
    _, obs = vf.monitor_router(lambda: [layer(None) for layer in model], model=model)()
    assert obs["router", "tokens_per_expert"].tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 1]]
    assert obs["router", "dropped"].tolist() == [1, 0]


def test_zero_weight_slots_are_no_load():
    ids, weights = torch.tensor([[0, 2], [0, 1]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    _, obs = vf.monitor_router(nn.Sequential(Given(ids, 3, weights)))(None)
    assert obs["router", "tokens_per_expert"].tolist() == [[0, 1, 1]]
    assert obs["router", "zero_weight"].tolist() == [[2, 0, 0]]


def test_leading_dimensions_hold_the_tokens():
    model, x = Model(), make_x()
    _, flat = vf.monitor_router(model)(x)
    _, shaped = vf.monitor_router(model)(x.view(3, 1, 3, WIDTH))
    assert (flat == shaped).all()


def backward_outside(model):
    def step(x):
        out, obs = monitored(x)
        out.square().sum().backward()
        return obs

    monitored = vf.monitor_router(model)
    return step


def backward_inside(model):
    def train(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    monitored = vf.monitor_router(train, model=model)
    return lambda x: monitored(x)[1]


def backward_twice(model):
    def step(x):
        out, obs = monitored(x)
        out.square().sum().backward(retain_graph=True)
        out.square().sum().backward()
        return obs

    monitored = vf.monitor_router(model)
    return step


ONCE_ONLY = ("reentrant", "nested reentrant", "selective")  # they refuse a second backward
RECOMPUTED = [
    pytest.param(run, step, id=f"{run}-{step.__name__}")
    for run in RUNS
    for step in (backward_outside, backward_inside, backward_twice)
    if not (step is backward_twice and run in ONCE_ONLY)
]


# torch says so of a reentrant checkpoint within another one
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("run", "step"), RECOMPUTED)
def test_counts_once_under_recompute(run, step, early_stop):
    model = Model(run=run)
    once = step(model)
    with set_checkpoint_early_stop(early_stop):
        for seed in (0, 1):
            x = make_x(seed).requires_grad_()
            assert_counts(once(x), expected_counts(model, x))
    assert all(p.grad is not None for name, p in model.named_parameters() if "experts" in name)
    assert hooks_on(model) == []


def test_recomputation_that_ends_early_in_some_layers_only_counts_once():
    """The last layer is not checkpointed: halving the counts would be wrong for it."""
    model = Model()
    model.run = lambda layers, x: layers[2](recomputed(layers[:2], x))
    x = make_x().requires_grad_()
    assert_counts(backward_inside(model)(x), expected_counts(model, x))


class Sometimes(Model):
    """Leaves out the layers that `skip` names."""

    def forward(self, x, skip=()):
        for i, layer in enumerate(self.layers):
            x = x if i in skip else layer(x)
        return x


def test_routers_that_are_not_called_keep_their_rows():
    model, x = Sometimes(), make_x()
    monitored = vf.monitor_router(model)
    for skip in ((1,), (0, 2), (), (0, 1, 2)):
        _, obs = monitored(x, skip)
        tokens = [0 if i in skip else 9 for i in range(3)]
        assert obs["router", "tokens"].tolist() == tokens
        assert obs["router", "tokens_per_expert"].sum(-1).tolist() == [2 * n for n in tokens]
        assert obs["router", "tokens_per_expert"].shape == (3, 4)
        assert obs["router", "tokens_per_expert"].dtype == torch.int64
    assert [path for path, _, _ in monitored.routers] == [f"layers.{i}.router" for i in range(3)]


class Returning(Block):
    """A block that returns what its router returned, changed by `show`."""

    def __init__(self, show):
        super().__init__()
        self.show = show

    def forward(self, x):
        return super().forward(x), self.show(self.router(x))


@pytest.mark.parametrize(
    "show",
    [
        lambda routed: routed,
        lambda routed: {"logits": routed[0], "weights": routed[1], "ids": routed[2]},
        lambda routed: tuple(tensor.view(3, 3, -1) for tensor in routed),
        lambda routed: tuple(tensor.clone() for tensor in routed),
    ],
    ids=["same", "mapping", "reshaped", "cloned"],
)
def test_a_block_that_returns_its_router_s_choice_is_counted_once(show):
    block, x = Returning(show), make_x()
    monitored = vf.monitor_router(nn.Sequential(block))
    for _ in range(2):
        _, obs = monitored(x)
        assert monitored.routers == (("0.router", 4, 2),)
        assert obs["router", "tokens"].tolist() == [2 * 9]  # Block and Returning call it
    assert vf.find_routers(block, x) == (("router", 4, 2),)


def test_experts_that_return_their_ids_are_no_router():
    class Experts(nn.Module):
        def forward(self, x, ids, weights):
            return x * weights.sum(-1, keepdim=True), weights, ids

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = Router(), Experts()

        def forward(self, x):
            _, weights, ids = self.router(x)
            return self.experts(x, ids, weights)

    assert vf.find_routers(nn.Sequential(Mixture()), make_x()) == (("0.router", 4, 2),)


def test_routers_that_return_one_shared_tensor_of_ids_all_count():
    ids = torch.tensor([[0, 1], [2, 1]])
    model = nn.ModuleList([Given(ids, 4), Given(ids, 4)])
    monitored = vf.monitor_router(lambda: [layer(None) for layer in model], model=model)
    for _ in range(2):
        assert monitored()[1]["router", "tokens_per_expert"].tolist() == [[1, 2, 1, 0]] * 2


def test_a_router_that_is_called_twice_counts_both_calls():
    model, x = Model(num_experts=(4,)), make_x()

    def fn(x):
        return model(x), model(-x)

    monitored = vf.monitor_router(fn, model=model)
    once, other = expected_counts(model, x), expected_counts(model, -x)
    for _ in range(2):
        _, obs = monitored(x)
        both = [[a + b for a, b in zip(once[n][0], other[n][0], strict=True)] for n in ("tokens_per_expert",)]
        assert obs["router", "tokens_per_expert"].tolist() == both
        assert obs["router", "tokens"].tolist() == [18]


def test_a_module_that_is_shared_by_two_places_has_one_row():
    model = Model(num_experts=(4, 4))
    model.layers[1].router = model.layers[0].router
    _, obs = vf.monitor_router(model)(make_x())
    assert obs["router", "tokens"].tolist() == [18]


@pytest.mark.parametrize("when", ["before the call", "in the call"])
def test_a_copy_of_the_model_is_not_counted(when):
    model, x = Model(), make_x()
    before = copy.deepcopy(model)

    def fn(x):
        other = before if when == "before the call" else copy.deepcopy(model)
        return model(x) + other(-x)

    monitored = vf.monitor_router(fn, model=model)
    for _ in range(2):
        assert_counts(monitored(x)[1], expected_counts(model, x))


def test_what_runs_outside_of_the_wrapped_call_leaves_no_trace():
    model, x = Model(), make_x()
    monitored = vf.monitor_router(model)
    _, before = monitored(x)
    with torch.no_grad():
        model(make_x(3))  # an evaluation
    assert (monitored(x)[1] == before).all()
    assert_counts(before, expected_counts(model, x))


def test_training_evaluation_and_inference_count_the_same():
    model, x = Model(), make_x()
    monitored = vf.monitor_router(model)
    expected = expected_counts(model, x)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for training in (True, False):
            model.train(training)
            with mode():
                assert_counts(monitored(x)[1], expected)


def test_micro_batches_add_up():
    model = Model()
    monitored = vf.monitor_router(model)
    parts = [monitored(make_x()[rows])[1] for rows in (slice(0, 2), slice(2, 3), slice(3, 9))]
    assert_counts(sum(parts), expected_counts(model, make_x()))


def test_two_models_do_not_mix():
    models = [Model(seed=0), Model(seed=1, num_experts=(4, 8))]
    x = make_x()
    monitored = [vf.monitor_router(model) for model in models]
    for _ in range(2):
        for fn, model in zip(monitored, models, strict=True):
            assert_counts(fn(x)[1], expected_counts(model, x))

    def both(x):
        return models[0](x) + models[1](x)

    for model in models:
        assert_counts(vf.monitor_router(both, model=model)(x)[1], expected_counts(model, x))


@pytest.mark.parametrize("shared", [False, True])
def test_two_threads_count_their_own_calls(shared):
    models = [Model(seed=0), Model(seed=0 if shared else 1)]
    models[1] = models[0] if shared else models[1]
    monitored = [vf.monitor_router(model) for model in models]
    monitored[1] = monitored[0] if shared else monitored[1]
    inputs = [make_x(0), make_x(1, num_tokens=5)]
    expected = [expected_counts(model, x) for model, x in zip(models, inputs, strict=True)]
    start, results = threading.Barrier(2), [[], []]

    def work(i):
        start.wait()
        for _ in range(30):
            results[i].append(monitored[i](inputs[i])[1])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for observed, right in zip(results, expected, strict=True):
        assert len(observed) == 30
        for obs in observed:
            assert_counts(obs, right)
    assert hooks_on(models[0]) == hooks_on(models[1]) == []


def test_an_exception_leaves_nothing_and_the_next_call_is_right():
    model, x = Model(), make_x()

    def fn(x, fail):
        out = model(x)
        if fail:
            raise RuntimeError("out of memory")
        return out

    monitored = vf.monitor_router(fn, model=model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            monitored(x, True)
        assert hooks_on(model) == []
        assert_counts(monitored(x, False)[1], expected_counts(model, x))


def test_hooks_of_the_user_stay_and_ours_go():
    model, seen = Model(), []
    handle = model.layers[0].router.register_forward_hook(
        lambda module, args, output: seen.append(len(output))
    )
    before = hooks_on(model)
    vf.monitor_router(model)(make_x())
    assert hooks_on(model) == before
    assert seen == [3]
    handle.remove()
    assert hooks_on(model) == []


def functional(model):
    def fn(params, x):
        return torch.func.functional_call(model, params, (x,)).square().mean()

    return fn


@pytest.mark.parametrize("grad_and_value", [torch.func.grad_and_value, vf.grad_and_value])
def test_works_under_grad_and_value(grad_and_value):
    model, x = Model(), make_x()
    params = {name: p.detach() for name, p in model.named_parameters()}
    monitored = vf.monitor_router(functional(model), model=model)
    for _ in range(2):
        grads, (value, obs) = grad_and_value(monitored, has_aux=True)(params, x)
        assert_counts(obs, expected_counts(model, x))
    expected = model(x).square().mean()
    torch.testing.assert_close(value, expected.detach())
    for grad, right in zip(
        grads.values(), torch.autograd.grad(expected, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(grad, right)


def test_works_under_vmap_of_grad():
    model = Model()
    params = {name: p.detach() for name, p in model.named_parameters()}
    inputs = [make_x(seed) for seed in range(3)]
    monitored = vf.monitor_router(functional(model), model=model)
    grad = torch.func.grad(monitored, has_aux=True)
    for _ in range(2):
        _, obs = torch.func.vmap(grad, in_dims=(None, 0))(params, torch.stack(inputs))
        for m, x in enumerate(inputs):
            one = TensorDict({"router": {name: leaf[m] for name, leaf in obs["router"].items()}})
            assert_counts(one, expected_counts(model, x))


def test_works_under_vmap_over_an_ensemble_of_parameters():
    models, x = [Model(seed=seed) for seed in range(3)], make_x()
    params, _ = torch.func.stack_module_state(models)
    monitored = vf.monitor_router(functional(models[0]), model=models[0])
    _, obs = torch.func.vmap(monitored, in_dims=(0, None))(params, x)
    for m, model in enumerate(models):
        one = TensorDict({"router": {name: leaf[m] for name, leaf in obs["router"].items()}})
        assert_counts(one, expected_counts(model, x))


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def compile_whole(model):
    return compiled(vf.monitor_router(model))


def compile_model(model):
    return vf.monitor_router(compiled(model))


def compile_blocks(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return vf.monitor_router(model)


# torch.compile itself reads .grad of what a hook is given
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("wrap", "run"),
    [
        (compile_whole, "non-reentrant"),
        (compile_model, "plain"),
        (compile_model, "non-reentrant"),
        (compile_blocks, "plain"),
    ],
)
def test_counts_are_the_same_compiled(wrap, run):
    torch.compiler.reset()
    model, right = Model(num_experts=(4, 8), run=run), Model(num_experts=(4, 8))
    monitored = wrap(model)
    for seed in (0, 1, 2):  # the first call searches, the second one compiles again, the third neither
        x = make_x(seed).requires_grad_()
        out, obs = monitored(x)
        out.square().sum().backward()
        torch.testing.assert_close(out, right(x))
        assert_counts(obs, expected_counts(right, x))
    torch.compiler.reset()


def test_after_the_first_call_nothing_waits_for_the_device():
    model = Model(num_experts=(4, 8, 4))
    monitored = vf.monitor_router(model)
    monitored(make_x())
    with NoSync():
        out, obs = monitored(make_x(1))
        out.sum().backward()
        _ = obs + obs


def test_not_even_the_first_call_waits_for_the_device():
    with NoSync():
        vf.monitor_router(Model())(make_x())


def test_observations_share_no_storage_and_belong_to_the_call():
    model = Model()
    monitored = vf.monitor_router(model)
    _, first = monitored(make_x())
    kept = first.clone()
    _, second = monitored(make_x(1))
    leaves = [*first["router"].values(), *second["router"].values()]
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)
    assert (first == kept).all()


@pytest.mark.parametrize(
    ("routers", "rows"),
    [
        ("layers.*.router", [0, 1, 2]),
        ("layers.1.router", [1]),
        (("layers.2.router", "layers.0.r*"), [0, 2]),
        (lambda path, module: isinstance(module, Router) and "1" not in path, [0, 2]),
    ],
    ids=["glob", "path", "globs", "predicate"],
)
def test_routers_may_be_named(routers, rows):
    model, x = Model(num_experts=(3, 8, 5)), make_x()
    monitored = vf.monitor_router(model, routers=routers)
    expected = expected_counts(model, x)
    for _ in range(2):
        _, obs = monitored(x)
        width = max(router.num_experts for router in monitored.routers)
        counts = [expected["tokens_per_expert"][i][:width] for i in rows]
        assert obs["router", "tokens_per_expert"].tolist() == counts
        assert [router.path for router in monitored.routers] == [f"layers.{i}.router" for i in rows]


class Logits(nn.Linear):
    """A router that shows its logits only; the block chooses."""

    def __init__(self, num_experts):
        super().__init__(WIDTH, num_experts)


class LogitsModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gates = nn.ModuleList([Logits(4), Logits(6)])

    def forward(self, x):
        for gate in self.gates:
            x = x + gate(x).topk(2).values.sum(-1, keepdim=True)
        return x


def test_indices_say_how_to_get_the_ids_from_what_a_router_returns():
    model, x = LogitsModel(), make_x()
    monitored = vf.monitor_router(model, routers="gates.*", indices=lambda logits: logits.topk(2).indices)
    with torch.no_grad():
        first = model.gates[0](x)
        second = model.gates[1](x + first.topk(2).values.sum(-1, keepdim=True))
    ids = [logits.topk(2).indices.tolist() for logits in (first, second)]
    expected = stacked([reference.router_counts(ids[i], None, (4, 6)[i]) for i in range(2)])
    for _ in range(2):
        assert_counts(monitored(x)[1], expected)
    assert monitored.routers == (("gates.0", 4, 2), ("gates.1", 6, 2))


def test_indices_may_choose_every_expert():
    gate = Logits(2)
    gate.num_experts = 2
    monitored = vf.monitor_router(
        nn.Sequential(gate), routers="0", indices=lambda logits: logits.argsort(-1, descending=True)
    )
    assert monitored(make_x())[1]["router", "tokens_per_expert"].tolist() == [[9, 9]]


def test_aux_of_the_user_comes_first():
    model, x = Model(), make_x()
    monitored = vf.monitor_router(lambda x: (model(x), {"z": x.sum()}), model=model, has_aux=True)
    _, obs = monitored(x)
    assert list(obs.keys()) == ["z", "router"]


def test_a_name_in_obs_is_never_written_twice():
    model = Model()
    with pytest.raises(ValueError, match=r"obs\['router'\] is written twice.*once, or rename"):
        vf.monitor_router(vf.monitor_router(model))
    monitored = vf.monitor_router(lambda x: (model(x), {"router": x.sum()}), model=model, has_aux=True)
    with pytest.raises(ValueError, match=r"obs\['router'\] is written twice.*once, or rename"):
        monitored(make_x())


def test_routers_are_known_after_the_first_call_only():
    monitored = vf.monitor_router(Model())
    with pytest.raises(AttributeError, match="routers are known after the first call"):
        _ = monitored.routers
    monitored(make_x())
    assert len(monitored.routers) == 3


def test_no_router_found_lists_what_was_looked_at():
    monitored = vf.monitor_router(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()))
    with pytest.raises(ValueError, match="no router found in Sequential") as error:
        monitored(make_x())
    for part in ("routers=", "indices=", "Linear returned (float32[9, 4])", "ReLU returned (float32[9, 4])"):
        assert part in str(error.value)


def test_a_model_that_the_function_does_not_run_is_an_error():
    model = Model()
    with pytest.raises(ValueError, match="no module: none ran in the call"):
        vf.monitor_router(lambda x: x, model=model)(make_x())
    with pytest.raises(ValueError, match=r"none of the routers layers\.0\.router ran in the call"):
        vf.monitor_router(lambda x: x, model=model, routers="layers.0.router")(make_x())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"routers": "layers.*"},
            ValueError,
            r"router layers.0 .Block. returned \(float32\[9, 6\]\).*pass indices=",
        ),
        (
            {"routers": "*.*.router", "indices": lambda output: output[1]},
            TypeError,
            "indices= must return an int32 or int64 tensor of expert ids, got torch.float32",
        ),
        (
            {"routers": "*.*.router", "indices": lambda output: output[2][:, 0]},
            ValueError,
            r"indices= must return ids of shape \[..., K\], got \[9\]",
        ),
        (
            {"routers": "*.*.router", "indices": lambda output: output},
            TypeError,
            "indices= must return an int32 or int64 tensor of expert ids, got tuple",
        ),
    ],
)
def test_output_without_ids_is_refused_at_the_call(options, error, message):
    model = Model()
    with pytest.raises(error, match=message):
        vf.monitor_router(model, **options)(make_x())
    assert hooks_on(model) == []


def test_number_of_experts_that_cannot_be_seen_is_refused():
    class Hidden(nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), 2).long()

    monitored = vf.monitor_router(nn.Sequential(Hidden()), routers="0", indices=lambda ids: ids)
    with pytest.raises(ValueError, match=r"cannot see the number of experts of router Hidden.*int64\[9, 2\]"):
        monitored(make_x())


@pytest.mark.parametrize(
    ("fn", "options", "error", "message"),
    [
        (lambda x: x, {}, ValueError, "needs the module that fn runs: pass model="),
        (lambda x: x, {"model": lambda x: x}, TypeError, "model must be a torch.nn.Module, got function"),
        (None, {"model": Model()}, TypeError, "fn must be callable.*got NoneType"),
        (Model(), {"indices": lambda output: output}, ValueError, "name the routers with routers="),
        (
            Model(),
            {"routers": "layers.router"},
            ValueError,
            "glob 'layers.router' in routers= matches none of",
        ),
        (Model(), {"routers": ("layers.*.router", "x")}, ValueError, "glob 'x' in routers= matches none of"),
        (Model(), {"routers": lambda path, module: False}, ValueError, "a predicate that holds for none of"),
        (Model(), {"routers": ()}, TypeError, r"routers must be globs or a predicate.*got \(\)"),
        (Model(), {"routers": (1,)}, TypeError, r"routers must be globs or a predicate.*got \(1,\)"),
        (Model(), {"routers": 3}, TypeError, "routers must be globs or a predicate.*got 3"),
    ],
)
def test_wrong_option_is_refused_when_the_transform_is_made(fn, options, error, message):
    with pytest.raises(error, match=message):
        vf.monitor_router(fn, **options)


def test_without_aux_has_aux_is_refused():
    with pytest.raises(TypeError, match=r"has_aux=True says that Model returns \(out, aux\), got Tensor"):
        vf.monitor_router(Model(), has_aux=True)(make_x())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled_code_that_was_made_outside_of_the_call_is_not_watched_and_that_is_said():
    torch.compiler.reset()
    model, x = torch.compile(Model(), backend="eager"), make_x()
    monitored = vf.monitor_router(model)
    assert monitored(x)[1]["router", "tokens"].tolist() == [9] * 3
    model(x)
    with pytest.warns(UserWarning, match=r"saw no router in this call.*torch\.compiler\.reset\(\)"):
        monitored(x)
    torch.compiler.reset()
    assert monitored(x)[1]["router", "tokens"].tolist() == [9] * 3


def compiled_graphs(run):
    """How many graphs the compiler makes in `run()`."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    run(backend)
    return len(graphs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize("known", [False, True])
def test_blocks_that_are_compiled_one_by_one_share_their_code(known):
    """Of more blocks than the compiler would compile anew."""
    num_layers = torch._dynamo.config.recompile_limit + 4
    model, x = Model(num_experts=(4,) * num_layers), make_x()
    expected = expected_counts(model, x)
    routers = vf.find_routers(model, x) if known else None

    def run(backend):
        for layer in model.layers:
            layer.compile(backend=backend)
        monitored = vf.monitor_router(model, routers=routers)
        for _ in range(4):
            assert_counts(monitored(x)[1], expected)

    assert compiled_graphs(run) <= 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # which the compiler uses
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_blocks_under_checkpoint_count_once_though_backward_is_inside(reentrant, backend):
    torch.compiler.reset()
    model = Model()
    blocks = [torch.compile(layer, backend=backend) for layer in model.layers]
    model.run = lambda layers, x: recomputed(blocks, x, reentrant=reentrant)
    step = backward_inside(model)
    for seed in range(3):
        x = make_x(seed).requires_grad_()
        assert step(x)["router", "tokens"].tolist() == [9] * 3
