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
EXTRA = ("channel_bits_per_byte", "channel_accuracy", "channel_z")
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
    names = tuple(f"source_{c}" for c in range(len(channels)))
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


def test_more_names_than_sums_are_refused():
    for names in (("a", "b", "c"), vf.Channels(("a", "b", "c"))):
        with pytest.raises(ValueError, match=r"obs has 2 channels, got 3 names: \('a', 'b', 'c'\)"):
            vf.channel_metrics(make_obs([6.0, 3.0], [3, 1]), names)


def test_a_str_is_not_taken_for_the_names():
    with pytest.raises(TypeError, match=r"names of all channels or Channels, got the str 'ab'"):
        vf.channel_metrics(make_obs([6.0, 3.0], [3, 1]), "ab")


def losses(names, loss_sum, token_count=None):
    """Loss by key, of channels of one token each."""
    metrics = vf.channel_metrics(make_obs(loss_sum, token_count or [1] * len(loss_sum)), names)
    start = "channel_loss/"
    return {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}


@pytest.mark.parametrize("make", [tuple, list, vf.Channels])
def test_a_slot_without_a_name_is_called_by_its_number(make):
    assert losses(make(["a", "b"]), [1.0, 2.0, 0.0, 3.0], [1, 1, 0, 1]) == {"a": 1.0, "b": 2.0, "3": 3.0}


def test_a_slot_without_a_name_is_no_channel_that_is_called_so():
    assert losses(("a", "3"), [0.0, 2.0, 0.0, 3.0], [0, 1, 0, 1]) == {"3": 2.0, "3-3": 3.0}


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["python", "web/cc-2024.10", "a_b", "-"], ["python", "web/cc-2024.10", "a_b", "-"]),
        (["c++", "c--", "c__"], ["c__", "c--", "c__-2"]),
        (["c__", "c++", "c::"], ["c__", "c__-1", "c__-2"]),
        (["c_", "c_-2", "c+"], ["c_", "c_-2", "c_-2-2"]),  # the way out is taken, too
        (["c_", "c+", "c_-1"], ["c_", "c_-1", "c_-1-2"]),
        (["train/a", "train_a", "train\\a", "train a"], ["train/a", "train_a", "train_a-2", "train_a-3"]),
        (["Bücher", "书", "a\n", "?"], ["Bücher", "书", "a_", "_"]),
    ],
)
def test_keys_are_cleaned_and_different(names, keys):
    values = [float(c) for c in range(len(names))]
    assert losses(names, values) == dict(zip(keys, values, strict=True))


@FEW
@given(st.lists(st.text("a+-_2 1", min_size=1, max_size=5), min_size=1, max_size=12, unique=True), st.data())
def test_keys_stay_whatever_else_comes_or_has_tokens(names, data):
    values = [float(c) for c in range(len(names))]
    keys = list(losses(names, values))
    assert len(keys) == len(names)
    num_known = data.draw(st.integers(0, len(names)))
    assert list(losses(names[:num_known], values[:num_known])) == keys[:num_known]
    counts = [data.draw(st.integers(0, 1)) for _ in names]
    assert list(losses(names, values, counts)) == [
        key for key, count in zip(keys, counts, strict=True) if count
    ]


def with_more(obs, **sums):
    for name, values in sums.items():
        obs["channel", name] = torch.tensor(values)
        obs["channel", f"unattributed_{name}"] = torch.tensor(0)
    return obs


def test_optional_sums_give_bits_per_byte_accuracy_and_z():
    obs = make_obs([6.0, 3.0, 0.0, 8.0], [4, 2, 0, 1])
    obs = with_more(obs, bytes=[12, 0, 0, 1], correct=[3, 0, 0, 1], z_sum=[10.0, 5.0, 0.0, 2.5])
    metrics = vf.channel_metrics(obs, ("a", "b", "c"))
    found = {key: value for key, value in metrics.items() if key.split("/")[0] in EXTRA}
    assert found == {
        "channel_bits_per_byte/a": pytest.approx(0.5 / 0.6931471805599453),
        "channel_bits_per_byte/3": pytest.approx(8.0 / 0.6931471805599453),
        "channel_accuracy/a": 0.75,
        "channel_accuracy/b": 0.0,
        "channel_accuracy/3": 1.0,
        "channel_z/a": 2.5,
        "channel_z/b": 2.5,
        "channel_z/3": 2.5,
    }
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize("name", ["bytes", "correct", "z_sum"])
def test_each_optional_sum_stands_alone_and_what_is_not_summed_is_absent(name):
    plain = vf.channel_metrics(make_obs([6.0], [3]), ("a",))
    metrics = vf.channel_metrics(with_more(make_obs([6.0], [3]), **{name: [3]}), ("a",))
    extra = EXTRA[["bytes", "correct", "z_sum"].index(name)]
    assert metrics.keys() - plain.keys() == {f"{extra}/a"}
    assert plain == {key: metrics[key] for key in plain}


def test_a_byte_of_256_equally_likely_ones_has_8_bits():
    labels, channel = torch.arange(256), torch.zeros(256).long()
    loss = torch.nn.functional.cross_entropy(torch.zeros(256, 256), labels, reduction="none")
    sums = vf.channel_sums(loss, labels, channel, 1)
    obs = with_more(TensorDict({"channel": sums}), bytes=[256])
    assert vf.channel_metrics(obs, ("a",))["channel_bits_per_byte/a"] == pytest.approx(8.0)
