"""`router_metrics` against plain arithmetic."""

import itertools
import math
import statistics

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
    return tuple(vf.Router(f"layers.{i}.router", len(row), 2) for i, row in enumerate(loads))


def metrics_of(loads, dropped=None, channels=(), top_k=2, **more):
    """Metrics of these loads; `more` are sums beside those of `make_obs`."""
    obs = make_obs(loads, dropped)
    for name, values in more.items():
        obs["router", name] = torch.tensor(values)
    return vf.router_metrics(
        obs, tuple(router._replace(top_k=top_k) for router in routers_of(loads)), channels
    )


def entropy(weights):
    total, result = sum(weights), 0.0
    for weight in weights:
        if weight > 0:
            result -= weight / total * math.log(weight / total)
    return result


def by_layer_and_over(name, values, worst, each):
    """The metrics of one name, from its value of each layer; None for a layer that has none."""
    seen = [value for value in values if value is not None]
    metrics = {f"moe/{name}/{worst.__name__}": worst(seen), f"moe/{name}/mean": sum(seen) / len(seen)}
    if each:
        metrics |= {f"moe/{name}/layer_{i}": value for i, value in enumerate(values) if value is not None}
    return metrics


def named(metrics, *names):
    return {key: value for key, value in metrics.items() if key.split("/")[1] in names}


VIOLATIONS = ("max_vio", "min_vio", "avg_vio", "unobserved_layers", "dropped")


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
    metrics = named(metrics_of(loads, dropped), *VIOLATIONS)
    assert metrics == pytest.approx(reference.router_metrics(loads, sum(dropped)), abs=1e-12)


@FEW
@given(st.lists(LAYER, min_size=1, max_size=4).filter(lambda loads: any(map(sum, loads))))
def test_other_metrics_of_the_load_equal_a_loop_over_layers(loads):
    relative, effective, cv, dead, imbalance = [], [], [], [], []
    for row in loads:
        if sum(row) == 0:
            for values in (relative, effective, cv, dead, imbalance):
                values.append(None)
            continue
        mean = sum(row) / len(row)
        relative.append(entropy(row) / math.log(len(row)) if len(row) > 1 else 1.0)
        effective.append(math.exp(entropy(row)))
        cv.append(math.sqrt(sum((load - mean) ** 2 for load in row) / len(row)) / mean)
        dead.append(len([load for load in row if load == 0]))
        imbalance.append(max(row) / mean)
    expected = by_layer_and_over("load_entropy", relative, min, each=True)
    expected |= by_layer_and_over("effective_experts", effective, min, each=False)
    expected |= by_layer_and_over("cv", cv, max, each=False)
    expected |= by_layer_and_over("dead_experts", dead, max, each=True)
    expected |= by_layer_and_over("load_imbalance", imbalance, max, each=False)
    metrics = metrics_of(loads)
    names = ("load_entropy", "effective_experts", "cv", "dead_experts", "load_imbalance")
    assert named(metrics, *names) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert {key.split("/")[1] for key in metrics} <= {*names, *VIOLATIONS, "random_max_vio"}


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
    metrics = metrics_of([[4, 4]], zero_weight=[[100, 0]])
    assert metrics["moe/max_vio/max"] == 0.0
    assert metrics["moe/zero_weight"] == 100.0
    assert "moe/zero_weight" not in metrics_of([[4, 4]])


def test_unattributed_tokens_are_told_if_there_are_any():
    assert metrics_of([[4, 4], [1, 1]], unattributed_tokens=[3, 4])["moe/unattributed_tokens"] == 7.0
    assert "moe/unattributed_tokens" not in metrics_of([[4, 4]], unattributed_tokens=[0])


@pytest.mark.parametrize(
    ("loads", "relative", "effective", "cv", "dead"),
    [
        ([5, 5, 5, 5], 1, 4, 0, 0),
        ([8, 0, 0, 0], 0, 1, math.sqrt(3), 3),
        ([6, 6, 0, 0], 0.5, 2, 1, 2),
        ([16] + [0] * 7, 0, 1, 2.6457513, 7),  # not 2.83, of the sample deviation
        ([7], 1, 1, 0, 0),
    ],
)
def test_metrics_of_the_load_of_known_layers(loads, relative, effective, cv, dead):
    metrics = metrics_of([loads])
    assert metrics["moe/load_entropy/layer_0"] == pytest.approx(relative)
    assert metrics["moe/effective_experts/min"] == pytest.approx(effective)
    assert metrics["moe/cv/max"] == pytest.approx(cv)
    assert metrics["moe/dead_experts/layer_0"] == dead


def simulated(num_tokens, num_experts, top_k, repeats):
    """Mean of the max violation of tokens that choose at random."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(repeats):
        loads = [0] * num_experts
        for start in range(0, num_tokens, 4096):
            rows = min(4096, num_tokens - start)
            ids = torch.rand(rows, num_experts, generator=generator).topk(top_k).indices
            for expert, count in enumerate(torch.bincount(ids.reshape(-1), minlength=num_experts).tolist()):
                loads[expert] += count
        found.append(max(loads) / (sum(loads) / num_experts) - 1)
    return statistics.fmean(found)


def noise_floor(num_tokens, num_experts, top_k):
    """The metric, of a layer with as many slots."""
    metrics = metrics_of([[num_tokens * top_k] + [0] * (num_experts - 1)], top_k=top_k)
    assert metrics["moe/random_max_vio/max"] == metrics["moe/random_max_vio/mean"]
    return metrics["moe/random_max_vio/max"]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "repeats"),
    [
        (16, 4, 1, 8000),
        (16, 8, 2, 4000),
        (64, 4, 2, 8000),
        (64, 8, 7, 4000),
        (64, 128, 8, 300),
        (256, 64, 1, 300),
        (1000, 8, 2, 2000),
        (2000, 256, 8, 30),
        (30000, 4, 1, 500),  # here loads are taken for normal
        (30000, 8, 2, 300),
    ],
)
def test_noise_floor_is_that_of_random_routing(num_tokens, num_experts, top_k, repeats):
    expected = simulated(num_tokens, num_experts, top_k, repeats)
    assert noise_floor(num_tokens, num_experts, top_k) == pytest.approx(expected, rel=0.045)


@pytest.mark.parametrize("num_experts", [4, 8, 64, 256])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8])
def test_noise_floor_of_a_few_tokens_is_nearly_that_of_random_routing(num_tokens, num_experts, top_k):
    expected = simulated(num_tokens, num_experts, top_k, repeats=2000)
    assert noise_floor(num_tokens, num_experts, top_k) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "expected"),
    [(1, 4, 1, 3), (1, 4, 2, 1), (1, 256, 8, 31), (5, 4, 4, 0), (9, 1, 1, 0), (2**50, 4, 2, 0)],
)
def test_noise_floor_at_the_ends_is_exact(num_tokens, num_experts, top_k, expected):
    assert noise_floor(num_tokens, num_experts, top_k) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("num_tokens", "expected"), [(64, 1.38), (1024, 0.33), (4096, 0.17), (65536, 0.04)])
def test_noise_floor_of_a_usual_model_is_what_others_measured(num_tokens, expected):
    assert noise_floor(num_tokens, 128, 8) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 2), (128, 8), (256, 8), (256, 255)])
def test_noise_floor_falls_with_the_tokens_without_a_jump(num_experts, top_k):
    floors = [noise_floor(round(1.5**k), num_experts, top_k) for k in range(4, 60)]
    ratios = [later / earlier for earlier, later in itertools.pairwise(floors)]
    assert all(0.6 < ratio <= 1 for ratio in ratios), ratios
    assert ratios[-1] == pytest.approx(1.5**-0.5, rel=1e-3)


def test_noise_floor_is_of_the_layers_own_tokens_and_experts():
    metrics = metrics_of([[20, 0], [100, 0, 0, 0], [0, 0, 0]], top_k=1)
    floors = noise_floor(20, 2, 1), noise_floor(100, 4, 1)
    assert metrics["moe/random_max_vio/max"] == max(floors)
    assert metrics["moe/random_max_vio/mean"] == pytest.approx(sum(floors) / 2)


def test_violation_of_batches_is_the_mean_over_calls():
    metrics = metrics_of([[8, 8], [8, 8], [0, 0]], batch_max_vio_sum=[3.0, 0.5, 0.0], batches=[4, 2, 0])
    assert named(metrics, "batch_max_vio") == by_layer_and_over(
        "batch_max_vio", [0.75, 0.25, None], max, True
    )
    assert metrics["moe/max_vio/max"] == 0.0


def test_metrics_of_probabilities_equal_a_loop_over_layers():
    tokens, entropies, squares = [10, 4, 0], [5.0, 2.5, 0.0], [90.0, 8.0, 0.0]
    masses = [[1.0, 2.0, 7.0, 0.0], [2.0, 2.0, 0.0, 0.0], [0.0] * 4]
    loads = [[1, 2, 7, 10], [4, 4], [0, 0, 0, 0]]
    metrics = metrics_of(loads, tokens=tokens, entropy_sum=entropies, z_sum=squares, probability_sum=masses)
    per_token = [entropies[i] / tokens[i] / math.log(len(loads[i])) for i in (0, 1)]
    of_mean = [entropy([0.1, 0.2, 0.7]) / math.log(4), 1.0]
    expected = by_layer_and_over("token_entropy", per_token, min, each=False)
    expected |= by_layer_and_over("probability_entropy", of_mean, min, each=False)
    expected |= by_layer_and_over("z", [9.0, 2.0], max, each=False)
    assert named(metrics, "token_entropy", "probability_entropy", "z") == pytest.approx(expected)


def test_a_router_that_shows_no_probabilities_is_left_out_of_their_means():
    metrics = metrics_of(
        [[4, 4], [4, 4]],
        tokens=[4, 4],
        probability_sum=[[2.0, 2.0], [0.0, 0.0]],
        entropy_sum=[2.0, 0.0],
        z_sum=[6.0, 0.0],
    )
    assert metrics["moe/probability_entropy/mean"] == metrics["moe/probability_entropy/min"] == 1.0
    assert metrics["moe/token_entropy/min"] == pytest.approx(0.5 / math.log(2))
    assert metrics["moe/z/mean"] == 1.5


@pytest.mark.parametrize(
    ("name", "metric", "value"), [("z_sum", "z", 0.5), ("entropy_sum", "token_entropy", 0.5 / math.log(2))]
)
def test_each_sum_of_probabilities_has_its_metric_alone(name, metric, value):
    metrics = metrics_of([[4, 4]], tokens=[4], **{name: [2.0]})
    found = named(metrics, "z", "token_entropy", "probability_entropy")
    worst = max if metric == "z" else min
    assert found == pytest.approx(by_layer_and_over(metric, [value], worst, each=False))


def divergence(part, whole):
    result = 0.0
    for a, b in zip(part, whole, strict=True):
        if a > 0:
            result += a / sum(part) * (math.log(a / sum(part)) - math.log(b / sum(whole)))
    return result


COUNTS = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


@FEW
@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), min_size=1, max_size=4))
def test_specialisation_is_the_divergence_of_a_channel_from_all(layers):
    by_channel = [list(channel) for channel in zip(*layers, strict=True)][:2]  # [2][L][4], and others' tokens
    loads = [[sum(counts) for counts in zip(*layer, strict=True)] for layer in layers]
    metrics = metrics_of(loads, channels=("code",), tokens_per_expert_by_channel=by_channel)
    expected = {}
    for name, tables in zip(("code", "1"), by_channel, strict=True):
        found = [divergence(part, whole) for part, whole in zip(tables, loads, strict=True) if sum(part)]
        if found:
            expected[f"moe/specialisation/{name}"] = sum(found) / len(found)
            expected[f"moe/specialisation_max/{name}"] = max(found)
    assert named(metrics, "specialisation", "specialisation_max") == pytest.approx(expected, abs=1e-9)


def test_specialisation_of_known_channels():
    both = [[[8, 0, 0, 0]], [[0, 4, 4, 0]], [[0, 0, 0, 0]]]
    metrics = metrics_of(
        [[8, 4, 4, 0]], channels=vf.Channels(("a", "b b")), tokens_per_expert_by_channel=both
    )
    assert metrics["moe/specialisation/a"] == pytest.approx(math.log(2))
    assert metrics["moe/specialisation_max/b_b"] == pytest.approx(math.log(2))
    assert not any(key.endswith("/2") for key in metrics)


def test_channels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="obs has 1 channels, got 2 names"):
        metrics_of([[1, 1]], channels=("a", "b"), tokens_per_expert_by_channel=[[[1, 1]]])
    with pytest.raises(TypeError, match=r"channels must be the names .* got the str 'code'"):
        metrics_of([[1, 1]], channels="code")
    assert "moe/max_vio/max" in metrics_of([[1, 1]], channels=("a", "b"))  # without sums of channels


def test_only_violations_entropy_and_dead_experts_have_a_key_per_layer():
    metrics = metrics_of(
        [[4, 1], [2, 2]],
        tokens=[5, 4],
        batch_max_vio_sum=[1.0, 1.0],
        batches=[2, 2],
        probability_sum=[[2.0, 2.0], [2.0, 2.0]],
        entropy_sum=[1.0, 1.0],
        z_sum=[1.0, 1.0],
        tokens_per_expert_by_channel=[[[4, 1], [2, 2]]],
    )
    per_layer = {key.split("/")[1] for key in metrics if "/layer_" in key}
    violations = {"max_vio", "min_vio", "avg_vio", "batch_max_vio"}
    assert per_layer == violations | {"load_entropy", "dead_experts"}


def test_sums_beside_those_it_knows_are_ignored():
    assert metrics_of([[1, 3]], coactivation=[[[1, 1], [1, 3]]]) == metrics_of([[1, 3]])


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
