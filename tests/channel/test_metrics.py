"""`channel_metrics` against plain arithmetic."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

import veofunc as vf
from tests import reference

FEW = settings(max_examples=30, derandomize=True, database=None, deadline=None)
COUNTS = st.one_of(st.just(0), st.integers(1, 2**40))


def make_obs(loss_sum, token_count, other_loss=0.0, other_count=0):
    sums = {
        "loss_sum": torch.tensor(loss_sum, dtype=torch.float64),
        "token_count": torch.tensor(token_count),
        "unattributed_loss_sum": torch.tensor(other_loss, dtype=torch.float64),
        "unattributed_token_count": torch.tensor(other_count),
    }
    return TensorDict({"channel": TensorDict(sums)})


@FEW
@given(st.lists(st.tuples(st.floats(0, 20), COUNTS), min_size=1, max_size=5), st.floats(0, 20), COUNTS)
def test_metrics_equal_a_loop_over_channels(channels, other_mean, other_count):
    names = tuple(f"source {c}" for c in range(len(channels)))
    sums = {
        "loss_sum": [mean * count for mean, count in channels],
        "token_count": [count for _, count in channels],
        "unattributed_loss_sum": other_mean * other_count,
        "unattributed_token_count": other_count,
    }
    obs = make_obs(*sums.values())
    assert vf.channel_metrics(obs, names) == pytest.approx(reference.channel_metrics(sums, names))


def test_weighted_parts_add_up_to_the_mean_over_all_tokens():
    metrics = vf.channel_metrics(make_obs([6.0, 3.0], [3, 1]), ("a", "b"))
    assert metrics["channel_loss_weighted/a"] + metrics["channel_loss_weighted/b"] == 9.0 / 4
    with_others = vf.channel_metrics(make_obs([6.0, 3.0], [3, 1], 11.0, 4), ("a", "b"))
    other_part = with_others["channel_unattributed_loss"] * with_others["channel_unattributed_tokens"] / 8
    parts = with_others["channel_loss_weighted/a"] + with_others["channel_loss_weighted/b"] + other_part
    assert parts == 20.0 / 8


def test_values_are_plain_floats():
    metrics = vf.channel_metrics(make_obs([6.0, 3.0], [3, 1], 1.0, 1), ("a", "b"))
    assert {type(value) for value in metrics.values()} == {float}
    assert all(type(name) is str for name in metrics)


def test_channels_without_tokens_and_unattributed_tokens_that_do_not_exist_emit_nothing():
    assert set(vf.channel_metrics(make_obs([6.0, 0.0], [3, 0]), ("a", "b"))) == {
        "channel_loss/a",
        "channel_loss_weighted/a",
        "channel_tokens/a",
        "channel_perplexity/a",
    }
    assert vf.channel_metrics(make_obs([0.0], [0]), ("a",)) == {}


def test_only_unattributed_tokens_are_named_as_such():
    assert vf.channel_metrics(make_obs([0.0], [0], 6.0, 3), ("a",)) == {
        "channel_unattributed_loss": 2.0,
        "channel_unattributed_tokens": 3.0,
    }


@pytest.mark.parametrize(
    ("mean", "perplexity"),
    [(0.0, 1.0), (math.log(2), 2.0), (1e4, math.inf), (math.inf, math.inf), (math.nan, math.nan)],
)
def test_perplexity_is_exp_of_the_mean_and_never_raises(mean, perplexity):
    metrics = vf.channel_metrics(make_obs([mean], [1]), ("a",))
    assert metrics["channel_perplexity/a"] == pytest.approx(perplexity, nan_ok=True)


def test_metrics_of_a_window_are_those_of_its_sums():
    labels = torch.ones(2).long()
    window = vf.Window()
    for step, (losses, ids) in enumerate([([2.0, 4.0], [0, 0]), ([1.0, 5.0], [1, 0])], start=1):
        sums = vf.channel_sums(torch.tensor(losses), labels, torch.tensor(ids), 2)
        window = window.add(TensorDict({"channel": sums}), step)
    metrics = vf.channel_metrics(window.obs, ("a", "b"))
    assert metrics["channel_loss/a"] == pytest.approx(11 / 3)
    assert metrics["channel_loss/b"] == 1.0
    assert metrics["channel_tokens/a"] == 3.0


def test_reading_changes_nothing():
    obs = make_obs([6.0, 3.0], [3, 1])
    assert vf.channel_metrics(obs, ("a", "b")) == vf.channel_metrics(obs, ("a", "b"))
    assert obs["channel", "token_count"].tolist() == [3, 1]


def test_an_empty_window_has_no_metrics():
    assert vf.channel_metrics(vf.Window().obs, ("a", "b")) == {}


def test_sums_of_something_else_are_refused():
    with pytest.raises(ValueError, match=r"obs has no 'channel', only \['router'\].*with_channel_loss"):
        vf.channel_metrics(TensorDict({"router": torch.ones(1)}), ("a",))


def test_another_number_of_names_is_refused():
    with pytest.raises(ValueError, match=r"obs has 2 channels, got 1 names: \('a',\)"):
        vf.channel_metrics(make_obs([6.0, 3.0], [3, 1]), ("a",))
