"""The cases of cases.json: routings that other implementations got right or wrong, with exact results."""

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils.checkpoint import checkpoint

import veofunc as vf
from tests import reference

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())
CALLS = {case["id"]: case for case in CASES["calls"]}
WIDTH = 4


def cases(group):
    return pytest.mark.parametrize("case", CASES[group], ids=lambda case: case["id"])


class Router(nn.Module):
    """Returns the ids that it is given, with equal weights."""

    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts

    def forward(self, ids):
        return torch.zeros(len(ids), self.num_experts), torch.ones(ids.shape), ids


class Model(nn.Module):
    """A router per layer; a layer that is given None as ids does not run."""

    def __init__(self, num_layers, num_experts):
        super().__init__()
        self.layers = nn.ModuleList(Router(num_experts) for _ in range(num_layers))

    def forward(self, ids_per_layer):
        for layer, ids in zip(self.layers, ids_per_layer, strict=True):
            if ids is not None:
                layer(torch.tensor(ids))


def counts_of(obs):
    return obs["router", "tokens_per_expert"].tolist()


def run(inputs, transforms=1):
    """(sums of the wrapped calls, routers)."""
    calls = inputs["calls"]
    model = Model(len(calls[0]["ids"]), inputs["num_experts"])
    monitored = [vf.monitor_router(model) for _ in range(transforms)]
    total = 0
    for call in calls:
        if call.get("wrapped", True):
            observed = [fn(call["ids"])[1] for fn in monitored]
            assert all((obs == observed[0]).all() for obs in observed)
            total = total + observed[0]
        else:
            model(call["ids"])
    return total, monitored[0].routers


@cases("counting")
def test_counts_are_exact(case):
    obs, routers = run(case["inputs"], case["inputs"].get("transforms", 1))
    assert counts_of(obs) == case["expected"]["counts"]
    assert len(routers) == len(case["expected"]["counts"])


@cases("counting")
def test_the_expected_counts_are_those_of_a_loop_over_slots(case):
    inputs = case["inputs"]
    for layer, expected in enumerate(case["expected"]["counts"]):
        slots = [
            row
            for call in inputs["calls"]
            if call.get("wrapped", True) and call["ids"][layer] is not None
            for row in call["ids"][layer]
        ]
        counts = reference.router_counts(slots, None, inputs["num_experts"])
        assert counts["tokens_per_expert"] == expected


@pytest.mark.parametrize(
    "case", [c for c in CASES["counting"] if "metrics" in c["expected"]], ids=lambda case: case["id"]
)
def test_metrics_of_the_counts(case):
    metrics = vf.router_metrics(*run(case["inputs"]))
    for name, value in case["expected"]["metrics"].items():
        assert metrics[name] == pytest.approx(value), name


def obs_of(counts):
    """(observations, routers) of layers with these counts."""
    counts = torch.tensor(counts)
    sums = {"tokens_per_expert": counts, "dropped": torch.zeros(len(counts)).long()}
    routers = tuple((f"layers.{i}", counts.shape[-1], 2) for i in range(len(counts)))
    return TensorDict({"router": TensorDict(sums)}), routers


@cases("metrics")
def test_metrics_of_one_layer(case):
    metrics = vf.router_metrics(*obs_of(case["inputs"]["counts"]))
    for name, value in case["expected"].items():
        assert metrics[name] == pytest.approx(value), name


def test_hard_off_beats_resume():
    """To switch off is not to wrap."""
    case, window = CALLS["hard_off_beats_resume"], vf.Window()
    Model(1, 4)([case["inputs"]["ids"]])
    assert vf.router_metrics(window.obs, (("layers.0", 4, 2),)) == case["expected"]["metrics"]


def test_read_resets():
    """Nothing does: two readers see the same window."""
    case = CALLS["read_resets"]
    monitored = vf.monitor_router(Model(1, 4))
    window = vf.Window().add(monitored([case["inputs"]["ids"]])[1], step=1)
    first = vf.router_metrics(window.obs, monitored.routers)
    second = vf.router_metrics(window.obs, monitored.routers)
    assert first == second
    assert counts_of(window.obs) == case["expected"]["counts"]


def test_step_window_after_read():
    case = CALLS["step_window_after_read"]
    monitored = vf.monitor_router(Model(1, 4))
    windows, window = [], vf.Window()
    for step in range(1, case["expected"]["next_window_start"] + 1):
        window = window.add(monitored([[[0, 1]]])[1], step)
        if step % case["inputs"]["read_at_step"] == 0:
            windows.append(window)
            window = vf.Window()
    assert (windows[0].first_step, windows[0].last_step) == (1, case["expected"]["window_end"])
    assert window.first_step == case["expected"]["next_window_start"]


def test_metric_key_set():
    case = CALLS["metric_key_set"]
    assert set(case["expected"]["keys"]) <= set(vf.router_metrics(*obs_of(case["inputs"]["counts"])))


def test_never_recorded_report():
    """The first empty window and every later one are the same."""
    monitored = vf.monitor_router(Model(1, 4))
    expected = CALLS["never_recorded_report"]["expected"]["metrics"]
    assert vf.router_metrics(vf.Window().obs, ()) == expected
    monitored([[[0, 1]]])
    assert vf.router_metrics(vf.Window().obs, monitored.routers) == expected
    assert vf.Window().empty


def test_no_router_found():
    with pytest.raises(ValueError, match=CALLS["no_router_found"]["expected"]["error"]):
        vf.monitor_router(nn.Linear(WIDTH, WIDTH))(torch.ones(2, WIDTH))


def test_hook_without_activation():
    """A transform that was made but is not called does nothing."""
    case, model = CALLS["hook_without_activation"], Model(1, 4)
    monitored = vf.monitor_router(model)
    ids = [case["inputs"]["ids"]]
    model(ids)
    assert not model.layers[0]._forward_hooks
    assert counts_of(monitored(ids)[1]) == case["expected"]["counts"]


@pytest.mark.parametrize(
    "output", [torch.ones(3, 4), (torch.ones(3, 4), torch.ones(3, 2)), (torch.ones(3, 4),) * 3]
)
def test_extractor_returns_none(output):
    class Odd(nn.Module):
        def forward(self):
            return output

    model = nn.ModuleDict({"router": Odd()})
    monitored = vf.monitor_router(lambda: model["router"](), model=model, routers="router")
    with pytest.raises(ValueError, match=CALLS["extractor_returns_none"]["expected"]["error"]):
        monitored()


def test_float_indices():
    model = Model(1, 4)
    monitored = vf.monitor_router(model, routers="layers.*", indices=lambda output: output[2].float())
    with pytest.raises(TypeError, match=CALLS["float_indices"]["expected"]["error"]):
        monitored([[[0, 1]]])


def test_downstream_topk_record():
    """The router returns logits only, and the block chooses."""
    case = CALLS["downstream_topk_record"]
    inputs = case["inputs"]
    model = nn.ModuleList(nn.Linear(WIDTH, inputs["num_experts"]) for _ in inputs["favourites"])
    for layer, favourites in zip(model, inputs["favourites"], strict=True):
        nn.init.zeros_(layer.weight)
        layer.bias.data = torch.tensor(
            [float(inputs["num_experts"] - favourites.index(e)) if e in favourites else 0.0 for e in range(8)]
        )

    def forward(x):
        return [layer(x).topk(2) for layer in model]

    monitored = vf.monitor_router(
        forward, model=model, routers="*", indices=lambda logits: logits.topk(2).indices
    )
    _, obs = monitored(torch.ones(inputs["tokens"], WIDTH))
    assert counts_of(obs) == case["expected"]["counts"]


@pytest.mark.parametrize("kind", CALLS["recompute"]["inputs"]["checkpoint"])
def test_recompute(kind):
    inputs, expected = CALLS["recompute"]["inputs"], CALLS["recompute"]["expected"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, WIDTH)
            self.router = Router(WIDTH)

        def forward(self, x):
            logits = self.gate(x)
            _, weights, _ = self.router(logits.topk(inputs["top_k"]).indices)
            return x + logits * weights.sum(-1, keepdim=True)

    model = nn.ModuleList(Block() for _ in range(inputs["layers"]))

    def forward(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=kind == "reentrant")
        return x.sum()

    loss, obs = vf.monitor_router(forward, model=model)(
        torch.randn(inputs["tokens"], WIDTH, requires_grad=True)
    )
    loss.backward()
    assert [sum(row) for row in counts_of(obs)] == [expected["slots_per_layer"]] * inputs["layers"]


def test_every_call_case_has_its_test():
    assert {f"test_{case_id}" for case_id in CALLS} <= set(globals())
