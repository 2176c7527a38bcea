"""Every entry runs, and prints a finite ratio for each variant. What the ratios are is no test."""

import math
import re

import numpy as np
import pytest
import torch

from tests.bench import channel, measure, offload, router
from tests.bench.__main__ import ENTRIES, main

TINY = {
    "offload": "--width 16 --layers 2 --heads 2 --batch 1 --tokens 8 --inflight 1 --threads 1",
    "channel": "--tokens 256 --documents 4 --hidden 8 --vocabulary 2048 --threads 1",
    "router": "--tokens 64 --hidden 16 --experts 16 --batch 1 --length 16",
    "checkpoint": "--scale 0.0001 --only ranks",
}
NUM_ROWS = {
    "offload": 8,
    "channel": len(channel.names()[0]),
    "router": len(router.names()) + len(router.names()[2:]),  # steps, and what those with a monitor add
    "checkpoint": 11 + 10 + 8 * 4,
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_prints_a_finite_ratio_for_every_variant(name, capsys, tmp_path):
    where = f" --directory {tmp_path}" if name in ("offload", "checkpoint") else ""
    main([name, "--rounds", "1", *(TINY[name] + where).split()])
    out = capsys.readouterr().out
    ratios = [float(ratio) for ratio in re.findall(r" ([\d.naif]+)x\b", out)]
    assert len(ratios) == NUM_ROWS[name]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_lists_the_entries(capsys):
    main([])
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{name}$|^ +{name} +\S", out, re.MULTILINE) for name in (*ENTRIES, "all"))


def test_every_round_runs_every_variant_once_in_a_rotating_order():
    ran = []
    variants = {name: lambda name=name: ran.append(name) or {"seconds": len(ran)} for name in "abc"}
    samples = measure.interleaved(variants, rounds=3)
    rounds = ["".join(ran[i : i + 3]) for i in range(0, 12, 3)]
    assert rounds[1:] == ["abc", "bca", "cab"]  # after one that is not counted
    assert [s["seconds"] for s in samples["a"]] == [4, 9, 11]


def test_table_shows_medians_and_their_ratio_to_the_first_row():
    samples = {"base": [{"s": t} for t in (4.0, 2.0, 9.0)], "other": [{"s": t} for t in (1.0, 5.0, 6.0)]}
    _, base, other = measure.table("title", samples, seconds="s").splitlines()
    assert base.split() == ["base", "4.000000", "2.000000", "1.000x"]
    assert other.split() == ["other", "5.000000", "1.000000", "1.250x"]


def test_memory_is_what_the_allocator_gave():
    w = torch.ones(1 << 18, requires_grad=True)  # 1 MiB
    held = measure.mebibytes_on("cpu", lambda: (w * 2).exp().sum())
    assert held["held MiB"] == pytest.approx(1, abs=0.01)  # the result of exp
    assert 2 <= held["peak MiB"] <= 4


def test_a_worker_keeps_one_object_in_a_process_of_its_own():
    with measure.Worker(dict, [("a", 1)]) as first, measure.Worker(dict) as second:
        assert first.call("setdefault", "b", 2) == second.call("setdefault", "b", 3) - 1 == 2
        assert first.call("copy") == {"a": 1, "b": 2}


def test_a_worker_that_fails_is_named():
    with (
        measure.Worker(dict, [("a", 1)]) as worker,
        pytest.raises(RuntimeError, match=r"dict\(\[\('a', 1\)\],\) failed in nothing"),
    ):
        worker.call("nothing")


def test_resources_are_those_of_the_act_alone():
    def take(mebibytes):
        return measure.resources(lambda: torch.ones(mebibytes << 18).sum())

    before = measure.resident_mebibytes()
    large, small = take(100), take(1)
    assert 95 < large["RSS MiB"] - before < 150
    assert small["RSS MiB"] < large["RSS MiB"] - 90
    assert all(value > 0 for value in large.values())


def test_gradients_that_are_not_those_of_the_plain_step_are_an_error():
    class Fixed:
        def __init__(self, digest):
            self.call = lambda method: digest

    offload.require_equal_gradients({offload.PLAIN: Fixed("a"), "same": Fixed("a")})
    with pytest.raises(RuntimeError, match=r"they differ in \['other'\]"):
        offload.require_equal_gradients({offload.PLAIN: Fixed("a"), "same": Fixed("a"), "other": Fixed("b")})


def test_goals_say_what_is_met_and_what_is_missed():
    def row(seconds, peak, rss):
        return [{"seconds": seconds, "peak MiB": peak, "RSS MiB": rss}]

    samples = {
        offload.PLAIN: row(10.0, 100.0, 110.0),
        offload.CHECKPOINT: row(13.0, 20.0, 50.0),
        offload.OFFLOAD: row(12.0, 14.0, 28.0),
        "fast, but large": row(10.0, 60.0, 60.0),
    }
    goals = [re.split(r": |  +|, at most ", line) for line in offload.goals(samples)]
    assert goals == [
        ["met", "offload large", "peak MiB / plain's", "0.140", "0.15"],
        ["missed", "offload large", "RSS MiB / peak MiB", "2.000", "1.25"],
        ["missed", "offload large", "seconds / plain's", "1.200", "1.10"],
        ["met", "offload large", "peak MiB / checkpointing's", "0.700", "1.00"],
        ["met", "offload large", "seconds / checkpointing's", "0.923", "1.00"],
    ]


def test_loss_bench_has_a_row_for_every_variant_or_says_that_it_has_none_and_goals(capsys):
    main(["channel", "--rounds", "1", *TINY["channel"].split()])
    out = capsys.readouterr().out
    (left_out,) = re.findall("left out: (.*)", out) or [""]
    for name in channel.variants(channels=1):
        assert bool(re.search(rf"^{re.escape(name)} .*x ", out, re.MULTILINE)) != (
            name in left_out.split("; ")
        )
    assert len(re.findall(r"^(?:met|missed) .*, at most ", out, re.MULTILINE)) == 2 * 4 + 2


class Results:
    """Of a step, with what is `changed`."""

    def __init__(self, **changed):
        ones = np.ones(3, dtype=np.float32)
        self.call = lambda method: {"loss": ones[0], "weight": ones, "sums": ones, **changed}


def test_losses_that_have_other_results_than_plain_are_an_error():
    workers = {channel.PLAIN: Results(), channel.FROM_HIDDEN: Results(), "near": Results(loss=1 + 1e-6)}
    channel.require_same_results(workers)
    for changed in ({"loss": 1 + 1e-4}, {"weight": np.array([1, 1, 1 + 1e-4])}, {"sums": np.full(3, np.nan)}):
        (what,) = changed
        with pytest.raises(RuntimeError, match=rf"\['{what} of other'\]"):
            channel.require_same_results({**workers, "other": Results(**changed)})


def test_loss_goals_compare_each_route_with_its_own_loss_and_one_pass_with_plain():
    def row(seconds, alone=0.0, extra=0.0):
        return [{"seconds": seconds, "alone s": alone, "extra MiB": extra}]

    samples = {
        channel.PLAIN: row(10.0, extra=1000.0),
        channel.UNREDUCED: row(20.0),
        channel.ONE_PASS: row(8.0),
        channel.with_sums("output"): row(20.0, alone=0.1),
        channel.with_sums("reduction"): row(11.0, alone=0.01),
        channel.with_sums("pair"): row(9.0, alone=0.4, extra=120.0),
        channel.with_sums("intercept"): row(10.0, alone=0.02),
    }
    goals = [re.split(r"  +|, at most ", line) for line in channel.goals(samples)]
    values, verdicts = [goal[2] for goal in goals], [goal[0] for goal in goals]
    assert values == [
        *("1.0000", "0.0050", "1.1000", "0.0010", "1.1250", "0.0500", "1.0000", "0.0020"),
        *("0.9000", "0.1200"),
    ]
    assert verdicts == [
        *("met", "met", "missed", "met", "missed", "missed", "met", "met"),
        *("met", "missed"),
    ]


def test_router_bench_has_a_row_for_every_variant_or_says_that_it_has_none_and_goals(capsys):
    main(["router", "--rounds", "1", *TINY["router"].split()])
    out = capsys.readouterr().out
    for name in router.countings(torch.zeros(1, 16)):
        assert re.search(rf"^{re.escape(name)} +-?[\d.]+%$", out, re.MULTILINE)
    for name in (router.PLAIN, router.AGAIN, *router.MONITORS):
        timed = len(re.findall(rf"^{re.escape(name)} .*x$", out, re.MULTILINE))
        assert timed == (0 if f"left out: {name}" in out else 2 if name in router.MONITORS else 1)
    assert len(re.findall(r"^(?:met|missed) .*, at most ", out, re.MULTILINE)) == 1 + 2


def test_monitors_that_count_otherwise_or_nothing_are_an_error():
    one, two, none = (np.full((2, 4), fill) for fill in (1, 2, 0))
    router.require_same_counts({"first": one, "same": one.copy()})
    with pytest.raises(RuntimeError, match=r"those of 'first'.*\['other'\]"):
        router.require_same_counts({"first": one, "same": one, "other": two})
    with pytest.raises(RuntimeError, match="not all 0"):
        router.require_same_counts({"first": none, "same": none})


def test_router_goals_compare_counting_with_the_matmul_and_the_step_with_plain():
    def row(seconds, added=0.0):
        return [{"CPU s": seconds, "added s": added}]

    of_layer = {
        64: {router.MATMUL: row(10.0), router.OURS: row(0.06)},
        128: {router.MATMUL: row(20.0), router.OURS: row(0.06)},
    }
    of_step = {router.PLAIN: row(10.0), router.OURS: row(10.2, added=0.02)}
    goals = [re.split(r"  +|, at most ", line) for line in router.goals(of_layer, of_step)]
    assert [(goal[0], *goal[2:]) for goal in goals] == [
        ("missed", "0.0060", "0.005"),
        ("met", "0.0030", "0.005"),
        ("met", "0.0020", "0.010"),
        ("missed", "1.0200", "1.010"),
    ]
