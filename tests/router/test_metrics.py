"""`router_metrics` against plain arithmetic."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

import veofunc as vf
from tests import reference

FEW = settings(max_examples=30, derandomize=True, database=None, deadline=None)


def make_obs(loads, dropped=None):
    """Sums of layers with the given loads of their own experts."""
    width = max(map(len, loads))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in loads])
    sums = {
        "tokens_per_expert": padded,
        "zero_weight": torch.zeros_like(padded),
        "tokens": padded.sum(-1),
        "dropped": torch.tensor(dropped or [0] * len(loads)),
    }
    return TensorDict({"router": TensorDict(sums)})


def routers_of(loads):
    return tuple((f"layers.{i}.router", len(row), 2) for i, row in enumerate(loads))


def metrics_of(loads, dropped=None):
    return vf.router_metrics(make_obs(loads, dropped), routers_of(loads))


LAYER = st.integers(1, 6).flatmap(
    lambda num_experts: st.one_of(
        st.just([0] * num_experts),
        st.lists(st.integers(0, 2**40), min_size=num_experts, max_size=num_experts),
    )
)


@FEW
@given(st.lists(st.tuples(LAYER, st.integers(0, 3)), min_size=1, max_size=4))
def test_metrics_equal_a_loop_over_layers(layers):
    loads, dropped = [row for row, _ in layers], [d for _, d in layers]
    metrics = metrics_of(loads, dropped)
    assert metrics == pytest.approx(reference.router_metrics(loads, sum(dropped)), abs=1e-12)


@pytest.mark.parametrize(
    ("loads", "highest", "lowest", "average"),
    [
        ([5, 5, 5, 5], 0, 0, 0),
        ([8, 0, 0, 0], 3, -1, 1.5),
        ([6, 6, 0, 0], 1, -1, 1),
        ([3, 3, 3, 1], 0.2, -0.6, 0.3),  # the largest deviation is that of the least loaded expert
        ([7], 0, 0, 0),
    ],
)
def test_violation_is_load_over_mean_load_minus_one(loads, highest, lowest, average):
    metrics = metrics_of([loads])
    assert metrics["moe/max_vio/layer_0"] == pytest.approx(highest)
    assert metrics["moe/min_vio/layer_0"] == pytest.approx(lowest)
    assert metrics["moe/avg_vio/layer_0"] == pytest.approx(average)


def test_a_collapsed_layer_shows_beside_balanced_ones():
    metrics = metrics_of([[4, 4, 4, 4], [16, 0, 0, 0], [4, 4, 4, 4]])
    assert metrics["moe/max_vio/max"] == metrics["moe/max_vio/layer_1"] == 3.0
    assert metrics["moe/min_vio/min"] == metrics["moe/min_vio/layer_1"] == -1.0
    assert metrics["moe/avg_vio/max"] == metrics["moe/avg_vio/layer_1"] == 1.5
    assert metrics["moe/max_vio/mean"] == 1.0


def test_opposite_skews_of_two_layers_do_not_cancel():
    metrics = metrics_of([[8, 0], [0, 8]])
    assert metrics["moe/max_vio/mean"] == 1.0


def test_ranks_that_feed_different_experts_are_balanced_together():
    loads = [[8 if e == rank else 0 for e in range(4)] for rank in range(4)]
    total = sum(make_obs([row]) for row in loads)
    assert vf.router_metrics(total, routers_of(loads[:1]))["moe/max_vio/max"] == 0.0
    assert all(metrics_of([row])["moe/max_vio/max"] == 3.0 for row in loads)


def test_micro_batches_weigh_by_their_tokens():
    total = make_obs([[10, 0]]) + make_obs([[500, 500]])
    assert vf.router_metrics(total, routers_of([[0, 0]]))["moe/max_vio/layer_0"] == pytest.approx(
        510 / 505 - 1
    )


def test_experts_that_a_layer_does_not_have_are_not_counted_as_idle():
    metrics = metrics_of([[4, 4], [2, 2, 2, 2]])
    assert metrics["moe/max_vio/max"] == 0.0
    assert metrics["moe/min_vio/min"] == 0.0


def test_layers_without_tokens_are_named_and_left_out_of_the_means():
    metrics = metrics_of([[0, 0], [6, 2], [0, 0]])
    assert metrics["moe/unobserved_layers"] == 2.0
    assert metrics["moe/unobserved_layers/layer_0"] == metrics["moe/unobserved_layers/layer_2"] == 1.0
    assert "moe/unobserved_layers/layer_1" not in metrics
    assert [name for name in metrics if "vio/layer" in name] == [
        f"moe/{name}_vio/layer_1" for name in ("max", "min", "avg")
    ]
    assert metrics["moe/max_vio/mean"] == metrics["moe/max_vio/layer_1"] == 0.5


def test_without_any_token_there_is_no_ratio():
    assert metrics_of([[0, 0], [0, 0]]) == {
        "moe/unobserved_layers": 2.0,
        "moe/unobserved_layers/layer_0": 1.0,
        "moe/unobserved_layers/layer_1": 1.0,
    }


def test_dropped_slots_are_told_if_there_are_any():
    assert "moe/dropped" not in metrics_of([[1, 1], [1, 1]])
    assert metrics_of([[1, 1], [1, 1]], dropped=[2, 3])["moe/dropped"] == 5.0


def test_zero_weight_slots_are_no_load():
    obs = make_obs([[4, 4]])
    obs["router", "zero_weight"] = torch.tensor([[100, 0]])
    assert vf.router_metrics(obs, routers_of([[4, 4]]))["moe/max_vio/max"] == 0.0


def test_values_are_plain_floats():
    metrics = metrics_of([[4, 1], [0, 0]], dropped=[1, 0])
    assert {type(value) for value in metrics.values()} == {float}


def test_reading_changes_nothing():
    obs = make_obs([[4, 1]])
    assert vf.router_metrics(obs, routers_of([[4, 1]])) == vf.router_metrics(obs, routers_of([[4, 1]]))
    assert obs["router", "tokens_per_expert"].tolist() == [[4, 1]]


def test_an_empty_window_has_no_metrics():
    assert vf.router_metrics(vf.Window().obs, routers_of([[0, 0]])) == {}


def test_sums_of_something_else_are_refused():
    with pytest.raises(ValueError, match=r"obs has no 'router', only \['channel'\].*monitor_router"):
        vf.router_metrics(TensorDict({"channel": torch.ones(1)}), routers_of([[0, 0]]))


def test_another_number_of_routers_is_refused():
    with pytest.raises(ValueError, match=r"obs has 1 routers, got 2: .*layers\.1\.router"):
        vf.router_metrics(make_obs([[4, 1]]), routers_of([[0, 0], [0, 0]]))
