"""Which modules are routers, by structure: dtypes and shapes, with no table of names."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import veofunc as vf
from tests import reference
from veofunc.router.detect import select_routers

GROUPS = json.loads((Path(__file__).parent / "families.json").read_text())
FAMILIES = [
    pytest.param(group["output"], id=name)
    for group in GROUPS
    if group["shows_ids"]
    for name in group["families"]
]
HIDDEN = [
    pytest.param(group["output"], id=name)
    for group in GROUPS
    if not group["shows_ids"]
    for name in group["families"]
]
N, K, E = 24, 2, 8  # tokens, slots and experts of the families' outputs
PART = re.compile(r"(float32|int64)\[([\d, ]+)\]|list\[int\]x(\d+)")


def random_output(layout, seed):
    """Random tensors of a family's dtypes and shapes, e.g. "(float32[24, 8], int64[24, 2])"."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for dtype, shape, list_length in PART.findall(layout):
        if list_length:
            sizes = torch.full((int(list_length),), N * K // int(list_length))
            parts.append((sizes + torch.tensor([1, -1]).repeat(int(list_length) // 2)).tolist())
        elif dtype == "int64":
            size = tuple(map(int, shape.split(", ")))
            mask = size[-1] == E  # one-hot over the experts
            parts.append(torch.randint(0, 2 if mask else width(layout), size, generator=generator))
        else:
            parts.append(torch.rand(tuple(map(int, shape.split(", "))), generator=generator))
    return tuple(parts) if layout.startswith("(") else parts[0]


def width(layout):
    """The number of experts that a layout shows: the width of its logits."""
    shown = re.match(r"\(?float32\[\d+, (\d+)\]", layout)
    return int(shown.group(1)) if shown else E


class Router(nn.Module):
    """Returns a given output, and says of itself what most routers do."""

    def __init__(self, output):
        super().__init__()
        self.output, self.num_experts, self.top_k = output, E, K
        self.weight = nn.Parameter(torch.zeros(E, 32))

    def forward(self, x):
        return self.output


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = E

    def forward(self, x, routed):
        return x * 2


class Mixture(nn.Module):
    def __init__(self, output, passes_on):
        super().__init__()
        self.router, self.experts, self.passes_on = Router(output), Experts(), passes_on

    def forward(self, x):
        routed = self.router(x)
        return self.experts(x, routed), routed if self.passes_on else None


class Model(nn.Module):
    """A model whose routers return `outputs`, and which, with `passes_on`, returns them too."""

    def __init__(self, outputs, passes_on=False):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 32), nn.LayerNorm(32)
        self.layers = nn.ModuleList(Mixture(output, passes_on) for output in outputs)

    def forward(self, ids):
        x, all_routed = self.norm(self.embed(ids)).flatten(0, 1), []
        for layer in self.layers:
            x, routed = layer(x)
            all_routed.append(routed)
        return {"last_hidden_state": x.view(*ids.shape, 32), "router_outputs": tuple(all_routed)}


TOKENS = torch.zeros(2, 12).long()


@pytest.mark.parametrize("passes_on", [False, True])
@pytest.mark.parametrize("layout", FAMILIES)
def test_family_that_shows_its_ids_is_found_and_counted(layout, passes_on):
    outputs = [random_output(layout, seed) for seed in range(3)]
    monitored = vf.monitor_router(Model(outputs, passes_on))
    for _ in range(2):
        _, obs = monitored(TOKENS)
        for i, output in enumerate(outputs):
            (ids,) = (part for part in output if part.dtype == torch.int64)
            expected = reference.router_counts(ids.tolist(), None, width(layout))
            assert obs["router", "tokens_per_expert"][i].tolist() == expected["tokens_per_expert"]
            assert obs["router", "tokens"][i] == N
    assert obs["router", "dropped"].tolist() == [0, 0, 0]
    assert obs["router", "zero_weight"].sum() == 0
    assert monitored.routers == tuple((f"layers.{i}.router", width(layout), K) for i in range(3))


def counts_shown(output):
    """Slots per expert of an output that shows a mask or sizes, in plain Python."""
    for part in output:
        if isinstance(part, list):
            return part
        if part.dtype == torch.int64 and part.shape[-1] == E:
            rows = part.reshape(-1, E).tolist()
            return [sum(row[expert] for row in rows) for expert in range(E)]
    return None


@pytest.mark.parametrize("layout", [p for p in HIDDEN if counts_shown(random_output(p.values[0], 0))])
def test_family_that_shows_a_mask_or_sizes_is_found_and_counted(layout):
    outputs = [random_output(layout, seed) for seed in range(3)]
    monitored = vf.monitor_router(Model(outputs))
    for _ in range(2):
        _, obs = monitored(TOKENS)
        assert obs["router", "tokens_per_expert"].tolist() == [counts_shown(output) for output in outputs]
        assert obs["router", "tokens"].tolist() == [N] * 3
    assert [router.path for router in monitored.routers] == [f"layers.{i}.router" for i in range(3)]


def test_scores_that_are_zero_for_all_but_k_are_found_and_counted():
    scores = [torch.rand(N, E) for _ in range(3)]
    chosen = [score * (score >= score.topk(K).values[:, -1:]) for score in scores]
    monitored = vf.monitor_router(Model([(c, score) for c, score in zip(chosen, scores, strict=True)]))
    for _ in range(2):
        _, obs = monitored(TOKENS)
        expected = [[sum(row[e] > 0 for row in c.tolist()) for e in range(E)] for c in chosen]
        assert obs["router", "tokens_per_expert"].tolist() == expected
    assert monitored.routers == tuple((f"layers.{i}.router", E, K) for i in range(3))


@pytest.mark.parametrize("layout", [p for p in HIDDEN if not counts_shown(random_output(p.values[0], 0))])
def test_family_that_hides_its_ids_is_refused_rather_than_miscounted(layout):
    model = Model([random_output(layout, seed) for seed in range(2)])
    with pytest.raises(ValueError, match="no router found in Model") as error:
        vf.monitor_router(model)(TOKENS)
    assert "Router returned (" in str(error.value)
    assert "Name the routers with routers=" in str(error.value)
    with pytest.raises(ValueError, match="where no expert ids can be seen: pass indices="):
        vf.monitor_router(model, routers="layers.*.router")(TOKENS)


def sizes_to_ids(output):
    sizes = next(part for part in output if isinstance(part, list))
    return torch.tensor([expert for expert, size in enumerate(sizes) for _ in range(size)]).view(-1, K)


def largest(scores, top_k):
    """The ids of the `top_k` largest of each row, in plain Python."""
    rows = scores.flatten(0, -2).tolist()
    return [sorted(range(len(row)), key=lambda e: -row[e])[:top_k] for row in rows]


def mask_of(output):
    return next(part for part in output if part.dtype == torch.int64)


WAYS = {  # from what a hiding family's router returns to its ids, and the same in plain Python
    "float32[24, 8]": (
        lambda logits: logits.topk(K).indices,
        lambda logits: largest(logits, K),
    ),
    "(int64[48], int64[48], float32[48], list[int]x8, float32[24, 8])": (
        sizes_to_ids,
        lambda output: sizes_to_ids(output).tolist(),
    ),
    "(float32[24, 8], float32[24, 8])": (
        lambda output: output[0].topk(1).indices,
        lambda output: largest(output[0], 1),
    ),
    "(int64[24, 8], float32[24, 8], float32[24, 8])": (
        lambda output: output[1].topk(K).indices,
        lambda output: largest(output[1], K),
    ),
    "(int64[2, 12, 8], float32[2, 12, 1], float32[2, 12, 8])": (
        lambda output: mask_of(output).argmax(-1, keepdim=True),
        lambda output: largest(mask_of(output), 1),
    ),
    "(float32[24, 1], int64[24, 1, 8], float32[24, 1])": (
        lambda output: mask_of(output).argmax(-1),
        lambda output: largest(mask_of(output), 1),
    ),
}


@pytest.mark.parametrize("layout", HIDDEN)
def test_family_that_hides_its_ids_counts_with_indices(layout):
    indices, in_python = WAYS[layout]
    outputs = [random_output(layout, seed) for seed in range(2)]
    monitored = vf.monitor_router(Model(outputs), routers="layers.*.router", indices=indices)
    for _ in range(2):
        _, obs = monitored(TOKENS)
        for i, output in enumerate(outputs):
            expected = reference.router_counts(in_python(output), None, E)
            assert obs["router", "tokens_per_expert"][i].tolist() == expected["tokens_per_expert"]
            assert obs["router", "tokens"][i] == expected["tokens"]
    assert [num_experts for _, num_experts, _ in monitored.routers] == [E, E]


def test_number_of_experts_is_the_width_of_the_logits_whatever_the_module_says():
    """Some routers choose among more than `num_experts`: skip or zero-computation experts."""
    router = Router((torch.zeros(3, 11), torch.ones(3, 2), torch.tensor([[10, 9], [8, 0], [10, 1]])))
    _, obs = vf.monitor_router(nn.Sequential(router))(None)
    assert obs["router", "tokens_per_expert"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 2]]


def test_without_logits_the_module_says_how_many_experts_there_are():
    router = Router((torch.ones(3, 2), torch.tensor([[7, 1], [2, 0], [7, 1]])))
    _, obs = vf.monitor_router(nn.Sequential(router))(None)
    assert obs["router", "tokens_per_expert"].tolist() == [[1, 2, 1, 0, 0, 0, 0, 2]]


@dataclasses.dataclass
class Routing:
    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        lambda output: dict(zip("abc", output, strict=True)),
        lambda output: {"routing": {"chosen": output[2:], "rest": output[:2]}},
        lambda output: (None, output, 3),
        lambda output: (output[2].int(), output[1], output[0]),
        lambda output: Routing(*output),
    ],
    ids=["list", "mapping", "nested", "among others", "int32, another order", "dataclass"],
)
def test_the_output_may_be_any_nest_of_tensors(wrap):
    output = random_output("(float32[24, 8], float32[24, 2], int64[24, 2])", 0)
    _, obs = vf.monitor_router(nn.Sequential(Router(wrap(output))))(None)
    expected = reference.router_counts(output[2].tolist(), None, E)
    assert obs["router", "tokens_per_expert"].tolist() == [expected["tokens_per_expert"]]


class TopK(nn.Module):
    def forward(self, x):
        return x.topk(3)


class Maximum(nn.Module):
    def forward(self, x):
        return x.max(-1)


class Retrieval(nn.Module):
    """Embeddings of a batch with their tokens, as sentence encoders return them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)

    def forward(self, ids):
        hidden = self.embed(ids)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pooled": hidden.mean(1),
            "hidden": hidden,
        }


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
DENSE = {
    "topk": (TopK(), (X,)),
    "max": (Maximum(), (X,)),
    "max pooling with indices": (nn.MaxPool1d(2, return_indices=True), (X,)),
    "LSTM": (nn.LSTM(8, 8, batch_first=True), (X,)),
    "MultiheadAttention": (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X)),
    "Transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (X,)),
    "Embedding": (nn.Embedding(9, 8), (torch.ones(2, 5).long(),)),
    "EmbeddingBag": (nn.EmbeddingBag(9, 8), (torch.ones(2, 5).long(),)),
    "retrieval": (Retrieval(), (torch.ones(2, 5).long(),)),
}


@pytest.mark.parametrize(("module", "args"), DENSE.values(), ids=DENSE.keys())
def test_a_module_that_routes_nothing_is_no_router(module, args):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, *args):
            return self.inner(*args)

    with pytest.raises(ValueError, match=r"no router found in Holder(.|\n)*Looked at:") as error:
        vf.find_routers(Holder(), *args)
    assert type(module).__name__ in str(error.value)


@pytest.mark.parametrize(("module", "args"), DENSE.values(), ids=DENSE.keys())
def test_a_module_that_routes_nothing_is_not_counted_beside_a_router(module, args):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module
            self.router = Router(random_output("(float32[24, 8], float32[24, 2], int64[24, 2])", 0))

        def forward(self, *args):
            return self.inner(*args), self.router(None)

    assert vf.find_routers(Both(), *args) == (("router", E, K),)


def test_every_module_of_a_router_s_class_is_one_even_if_it_did_not_run():
    output = random_output("(float32[24, 8], float32[24, 2], int64[24, 2])", 0)
    model = nn.ModuleDict({"used": Router(output), "spare": Router(output), "other": nn.Linear(2, 2)})
    monitored = vf.monitor_router(lambda: model["used"](None), model=model)
    _, obs = monitored()
    assert [path for path, _, _ in monitored.routers] == ["used", "spare"]
    assert obs["router", "tokens"].tolist() == [N, 0]


def test_routers_come_in_the_order_of_named_modules_not_of_the_calls():
    output = random_output("(float32[24, 8], float32[24, 2], int64[24, 2])", 0)
    model = nn.ModuleDict({"b": Router(output), "a": Router(output)})
    monitored = vf.monitor_router(lambda: (model["a"](None), model["b"](None)), model=model)
    monitored()
    assert [path for path, _, _ in monitored.routers] == ["b", "a"]


def test_find_routers_needs_no_gradient_and_leaves_no_hook():
    layer = nn.Linear(8, E)

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = layer

        def forward(self, x, scale=1):
            logits = self.gate(x) * scale
            assert not logits.requires_grad
            weights, ids = logits.topk(K)
            return logits, weights, ids

    model = Chooses()
    assert vf.find_routers(model, X, scale=2) == (("", E, K),)
    assert all(not module._forward_hooks for module in model.modules())
    assert torch.is_grad_enabled()


def test_find_routers_looks_through_wrappers():
    class Linear(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            weights, ids = logits.topk(K)
            return logits, weights, ids

    model = nn.Sequential(Linear(8, E))
    assert vf.find_routers(nn.DataParallel(model), X) == (("0", E, K),)


def test_find_routers_wants_a_module():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        vf.find_routers(lambda x: x, X)


PATHS = nn.ModuleDict(
    {
        "layers": nn.ModuleList(
            [
                nn.ModuleDict({"moe": nn.ModuleDict({"gate": nn.Identity(), "gated": nn.Identity()})})
                for _ in range(2)
            ]
        ),
        "gate": nn.Identity(),
    }
)


@pytest.mark.parametrize(
    ("routers", "paths"),
    [
        ("gate", ["gate"]),
        ("layers.*.moe.gate", ["layers.0.moe.gate", "layers.1.moe.gate"]),
        ("layers.*.*.gate", ["layers.0.moe.gate", "layers.1.moe.gate"]),
        ("layers.[1].moe.g*d", ["layers.1.moe.gated"]),
        (
            ("layers.1.moe.gate", "gate", "layers.0.moe.gate"),
            ["layers.0.moe.gate", "layers.1.moe.gate", "gate"],
        ),
        (lambda path, module: path.endswith("gate"), ["layers.0.moe.gate", "layers.1.moe.gate", "gate"]),
        (lambda path, module: isinstance(module, nn.ModuleList), ["layers"]),
    ],
)
def test_globs_match_whole_segments_and_keep_the_order_of_the_model(routers, paths):
    assert [path for path, _ in select_routers(PATHS, routers)] == paths


@pytest.mark.parametrize("glob", ["moe.gate", "layers.*.gate", "layers.*.moe.*.*", "Gate", ""])
def test_a_glob_that_matches_part_of_a_path_only_is_refused(glob):
    with pytest.raises(ValueError, match=re.escape(f"glob {glob!r} in routers= matches none of the modules")):
        select_routers(PATHS, glob)


class Gate(nn.Module):
    """A router of E experts that returns what `layout` makes of (x, logits, weights, ids)."""

    def __init__(self, layout, num_experts=4, top_k=2):
        super().__init__()
        self.projection = nn.Linear(6, num_experts)
        self.layout, self.top_k = layout, top_k

    def forward(self, x):
        logits = self.projection(x)
        weights, ids = logits.softmax(-1).topk(self.top_k)
        return self.layout(x, logits, weights, ids)


def usual(x, logits, weights, ids):
    return logits, weights, ids


class Gates(nn.Module):
    """Runs the first `num_run` of its gates."""

    def __init__(self, *gates):
        super().__init__()
        self.gates = nn.ModuleList(gates)

    def forward(self, x, num_run=None):
        for gate in self.gates[:num_run]:
            gate(x)
        return x


ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def routed(obs):
    return obs["router", "tokens_per_expert"].sum(-1).tolist()


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)])
@pytest.mark.parametrize("options", [{}, {"routers": "gates.*"}], ids=["found", "named"])
def test_a_router_without_tokens_counts_none(shape, options):
    monitored = vf.monitor_router(Gates(Gate(usual)), **options)
    first = monitored(torch.zeros(shape))[1]
    assert routed(first) == [0] and first["router", "tokens"].tolist() == [0]
    assert routed(first + monitored(ROWS)[1] + monitored(torch.zeros(shape))[1]) == [10]


def test_a_router_that_turns_out_to_have_other_experts_is_an_error_not_a_wrong_count():
    monitored = vf.monitor_router(Gates(Gate(usual, 4), Gate(usual, 16)))
    monitored(ROWS, 1)
    with pytest.raises(ValueError, match="chooses among 16 experts, not 4 as the first call let assume"):
        monitored(ROWS)


def test_a_router_that_did_not_run_says_its_number_of_experts():
    model = Gates(Gate(usual, 4), Gate(usual, 16))
    model.gates[1].num_experts = 16
    monitored = vf.monitor_router(model)
    monitored(ROWS, 1)
    assert monitored.routers == (("gates.0", 4, 2), ("gates.1", 16, 2))
    assert routed(monitored(ROWS)[1]) == [10, 10]


def test_of_several_widths_the_module_confirms_one():
    model = Gates(Gate(lambda x, logits, weights, ids: (x, logits, weights, ids), 4))
    model.gates[0].num_experts = 4
    assert vf.find_routers(model, ROWS) == (("gates.0", 4, 2),)


def test_a_mask_as_wide_as_the_module_says_are_no_ids():
    def mask(x, logits, weights, ids):
        return x, nn.functional.one_hot(ids[..., 0], 4), logits.softmax(-1)

    model = Gates(Gate(mask, 4))
    model.gates[0].num_experts = 4
    assert vf.find_routers(model, ROWS) == (("gates.0", 4, 1),)


class PassedOn(nn.Module):
    """A gate whose choice a sibling passes on as views."""

    class Dispatch(nn.Module):
        def forward(self, logits, weights, ids):
            return logits, weights.view(-1, 2), ids.view(-1, 2)

    def __init__(self):
        super().__init__()
        self.gate, self.dispatch = Gate(usual), self.Dispatch()

    def forward(self, x):
        return self.dispatch(*self.gate(x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_sibling_that_passes_the_choice_on_as_a_view_is_no_router(mode):
    monitored = vf.monitor_router(PassedOn())
    with mode():
        monitored(ROWS)
    assert monitored.routers == (("gate", 4, 2),)


def test_a_router_without_logits_says_how_many_experts_it_has_or_is_refused():
    model = Gates(Gate(lambda x, logits, weights, ids: (weights, ids)))
    with pytest.raises(ValueError, match="no router found"):
        vf.monitor_router(model)(ROWS)
    with pytest.raises(ValueError, match=r"no logits \[\.\.\., E\], give it an attribute num_experts"):
        vf.monitor_router(model, routers="gates.*")(ROWS)
    model.gates[0].num_experts = 4
    monitored = vf.monitor_router(model)
    assert routed(monitored(ROWS)[1]) == [10]
    assert monitored.routers == (("gates.0", 4, 2),)


def test_logits_win_over_the_local_number_of_experts():
    model = Gates(Gate(usual, 4, top_k=2))
    for local in (1, 3, 0, -1, True):
        model.gates[0].num_experts = local
        assert vf.find_routers(model, ROWS) == (("gates.0", 4, 2),)


def test_with_indices_a_weight_beside_the_ids_still_tells_load_from_none():
    def half(x, logits, weights, ids):
        return logits, weights * (torch.arange(5) < 2)[:, None], ids

    monitored = vf.monitor_router(Gates(Gate(half)), routers="gates.*", indices=lambda output: output[2])
    obs = monitored(ROWS)[1]
    assert routed(obs) == [4]
    assert obs["router", "zero_weight"].sum() == 6


def test_what_find_routers_returned_is_known_from_the_start():
    model = Gates(Gate(usual, 4), Gate(usual, 16))
    routers = vf.find_routers(model, ROWS)
    monitored = vf.monitor_router(model, routers=routers)
    assert monitored.routers == routers
    one, both = monitored(ROWS, 1)[1], monitored(ROWS)[1]
    assert routed(one) == [10, 0] and routed(both) == [10, 10]
    assert routed(one + both) == [20, 10]
    with pytest.raises(
        ValueError, match=r"routers= names gates\.7, the model has the modules gates, gates\.0"
    ):
        vf.monitor_router(model, routers=(("gates.7", 4, 2),))


def test_before_the_first_call_routers_say_how_to_know_them():
    with pytest.raises(AttributeError, match=r"routers=vf\.find_routers\(model, \*args\)"):
        vf.monitor_router(Gates(Gate(usual))).routers  # noqa: B018


def test_indices_must_be_a_function():
    with pytest.raises(TypeError, match="indices must be a function"):
        vf.monitor_router(Gates(Gate(usual)), routers="gates.*", indices="ids")


class CalledWithIds(nn.Module):
    """Is called with rows, ids and weights, as the experts of most models."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x, ids, weights):
        return x * weights.sum(-1, keepdim=True)


class MixtureOf(nn.Module):
    """Runs `body(self, x)` on its gates and experts."""

    def __init__(self, body, num=1):
        super().__init__()
        self.gates = nn.ModuleList(Gate(usual, 4) for _ in range(num))
        self.first, self.second = CalledWithIds(), CalledWithIds()
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def counts_by_hand(model, i, x):
    ids = model.gates[i](x)[2].tolist()
    return [sum(row.count(expert) for row in ids) for expert in range(4)]


def overwritten(model, x):
    _, weights, ids = model.gates[0](x)
    y = model.first(x, ids, weights)
    ids.fill_(0)
    weights.detach().zero_()
    return y


def with_shared_experts(model, x):
    n = len(x)
    shared = model.second(x, torch.zeros(n, 1).long(), torch.ones(n, 1))
    _, weights, ids = model.gates[0](x)
    return shared + model.first(x, ids, weights)


def two_of_each(model, x):
    (_, w0, ids0), (_, w1, ids1) = model.gates[0](x), model.gates[1](x)
    return model.first(x, ids0.clone(), w0) + model.second(x, ids1.clone(), w1)


@pytest.mark.parametrize(
    ("body", "num"), [(overwritten, 1), (with_shared_experts, 1), (two_of_each, 2)], ids=lambda x: str(x)
)
def test_each_call_counts_the_choice_that_the_experts_are_called_with(body, num):
    model = MixtureOf(body, num)
    monitored = vf.monitor_router(model)
    for _ in range(2):
        load = monitored(ROWS)[1]["router", "tokens_per_expert"].tolist()
        expected = [counts_by_hand(model, i, ROWS) for i in range(num)]
        assert [row for row in load if sum(row) == 5 * 2][:num] == expected


class Attention(nn.Module):
    """Returns what a choice among tokens looks like."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.project = kind, nn.Linear(6, 6)

    def forward(self, x):
        x = self.project(x)
        scores = (x @ x.mT).softmax(-1)  # [T, T]
        if self.kind == "window":
            return scores, (torch.arange(len(x))[:, None] - torch.arange(len(x))).abs() < 2
        if self.kind == "top-k":
            values, ids = scores.topk(2)
            return scores, values, ids
        return scores, torch.diag_embed(scores.diagonal())


@pytest.mark.parametrize("kind", ["window", "top-k", "diagonal"])
def test_a_choice_among_tokens_is_no_routing(kind):
    with pytest.raises(ValueError, match="no router found"):
        vf.find_routers(nn.Sequential(Attention(kind)), ROWS)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.gate = Attention(kind), Gate(usual, 4)

        def forward(self, x):
            self.attention(x)
            return self.gate(x)

    monitored = vf.monitor_router(Both())
    for num_tokens in (5, 3):
        assert routed(monitored(ROWS[:num_tokens])[1]) == [2 * num_tokens]
    assert monitored.routers == (("gate", 4, 2),)


class Functional(nn.Module):
    """Routes by logits that it is given, and says nothing of itself."""

    def forward(self, logits):
        weights, ids = logits.softmax(-1).topk(2)
        return logits, weights, ids


def test_a_router_may_have_no_parameters():
    assert vf.find_routers(nn.Sequential(Functional()), torch.randn(5, 4)) == (("0", 4, 2),)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_a_module_that_was_replaced_by_a_compiled_one_is_looked_into():
    model = Gates(Gate(usual, 4))
    model.gates[0] = torch.compile(model.gates[0], backend="eager")
    monitored = vf.monitor_router(model)
    for _ in range(2):
        assert routed(monitored(ROWS)[1]) == [10]
