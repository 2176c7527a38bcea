"""`Channels` against plain lists of names."""

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import veofunc as vf

FEW = settings(max_examples=40, derandomize=True, database=None, deadline=None)
NAMES = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), max_size=12)


@FEW
@given(NAMES, NAMES)
def test_ids_are_positions_in_the_order_of_the_first_mention(first, later):
    channels, expected = vf.Channels(dict.fromkeys(first)), []
    for name in [*first, *later]:
        if name not in expected:
            expected.append(name)
    ids = channels.ids(later)
    assert ids.dtype == torch.int64 and ids.shape == (len(later),)
    assert ids.tolist() == [expected.index(name) for name in later]
    assert channels.names == tuple(expected)
    assert len(channels) == len(expected)
    assert [channels.id(name) for name in expected] == list(range(len(expected)))
    assert all((name in channels) == (name in expected) for name in "abcdefg")


def test_sums_from_before_and_after_growth_add():
    channels, labels = vf.Channels(("a",), capacity=3), torch.tensor([1, 1])
    before = vf.channel_sums(torch.tensor([1.0, 2.0]), labels, channels.ids(["a", "a"]), channels.capacity)
    after = vf.channel_sums(torch.tensor([4.0, 8.0]), labels, channels.ids(["b", "a"]), channels.capacity)
    assert (before + after)["loss_sum"].tolist() == [11.0, 4.0, 0.0]


@pytest.mark.parametrize("add", [vf.Channels.id, lambda c, name: c.ids(["a", "d", name])])
def test_full_channels_refuse_a_new_name_and_stay_as_they_were(add):
    channels = vf.Channels(("a", "b"), capacity=2 + (add is not vf.Channels.id))
    channels.ids(["a", "b"])
    text = rf"there can be {channels.capacity} channels, no id is left for 'c': .* larger capacity="
    with pytest.raises(ValueError, match=text):
        add(channels, "c")
    assert channels.names == ("a", "b")
    assert channels.id("b") == 1


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (True, TypeError, "a name must be a str, got True"),
        (None, TypeError, "a name must be a str, got None"),
        (3, TypeError, "a name must be a str, got 3"),
        (b"a", TypeError, "a name must be a str, got b'a'"),
        (["a"], TypeError, r"a name must be a str, got \['a'\]"),
        ("", ValueError, "a name must not be empty"),
    ],
)
def test_what_is_no_name_is_refused(name, error, text):
    channels = vf.Channels(("a",))
    calls = (
        lambda: channels.id(name),
        lambda: channels.ids(["new", name]),
        lambda: channels.update(["a", name]),
        lambda: channels.all_merge(names=[name]),
        lambda: vf.Channels(["a", name]),
    )
    for call in calls:
        with pytest.raises(error, match=text):
            call()
    assert channels.names == ("a",)


def test_a_str_is_not_taken_for_a_sequence_of_names():
    channels = vf.Channels()
    for call in (vf.Channels, channels.ids, channels.update, lambda s: channels.all_merge(names=s)):
        with pytest.raises(TypeError, match="names must be a sequence of names, got the str 'code'"):
            call("code")


@pytest.mark.parametrize(
    ("names", "capacity", "error", "text"),
    [
        (["a", "b", "a"], 8, ValueError, r"names must be different, got \('a', 'b', 'a'\)"),
        (["a", "b"], 1, ValueError, "there can be 1 channels, no id is left for 'b'"),
        ([], 0, ValueError, "capacity must be at least 1, got 0"),
        ([], True, TypeError, "capacity must be an int, .*, got True"),
        ([], 8.0, TypeError, "capacity must be an int, .*, got 8.0"),
    ],
)
def test_names_and_capacity_must_fit(names, capacity, error, text):
    with pytest.raises(error, match=text):
        vf.Channels(names, capacity)


def test_equal_if_names_ids_and_capacity_are():
    channels = vf.Channels(("a", "b"), capacity=4)
    assert channels == vf.Channels(["a", "b"], 4)
    others = [vf.Channels(("b", "a"), 4), vf.Channels(("a",), 4), vf.Channels(("a", "b"), 5), ("a", "b")]
    assert all(channels != other for other in others)


def test_repr_makes_an_equal_one():
    channels = vf.Channels(("a", "it's"), capacity=4)
    assert repr(channels) == """Channels(('a', "it's"), capacity=4)"""
    assert eval(repr(channels), {"Channels": vf.Channels}) == channels


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_grows_by_itself(copied):
    channels = vf.Channels(("a",), capacity=4)
    other = copied(channels)
    assert other == channels
    assert other.id("b") == 1
    assert channels.names == ("a",)


def test_update_adds_what_the_other_has_more_and_keeps_what_it_has_less():
    channels = vf.Channels(("a",), capacity=8)
    channels.update(vf.Channels(("a", "b"), capacity=3))
    channels.update(["a", "b", "c"])
    channels.update(vf.Channels(("a",)))
    assert channels == vf.Channels(("a", "b", "c"), capacity=8)


@pytest.mark.parametrize("other", [["a", "c", "d"], vf.Channels(("a", "c"))], ids=type)
def test_update_refuses_one_id_with_two_names(other):
    channels = vf.Channels(("a", "b"))
    with pytest.raises(ValueError, match=r"id 1 has two names, ('b' and 'c'|'c' and 'b')"):
        channels.update(other)
    assert channels.names == ("a", "b")


def test_update_with_too_many_names_adds_none():
    channels = vf.Channels(("a",), capacity=2)
    for other in (["a", "b", "c"], vf.Channels(("a", "b", "c"))):
        with pytest.raises(ValueError, match="there can be 2 channels, no id is left for 'c'"):
            channels.update(other)
    assert channels.names == ("a",)


def test_threads_that_add_the_same_names_get_one_id_each():
    channels = vf.Channels(capacity=500)
    names, seen, start = [f"n{i}" for i in range(500)], [], threading.Barrier(8)

    def add(order):
        start.wait()
        seen.append({name: channels.id(name) for name in order})

    orders = [names[i * 50 :] + names[: i * 50] for i in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=add, args=[order]) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(seen) == 8 and all(ids == seen[0] for ids in seen)
    assert sorted(seen[0].values()) == list(range(500))
    assert [channels.names[i] for i in seen[0].values()] == list(seen[0])


def test_without_a_process_group_a_merge_adds_the_names_of_this_process():
    channels = vf.Channels(("a",))
    channels.all_merge()
    assert channels.names == ("a",)
    channels.all_merge(names=["c", "a", "b"])
    assert channels.names == ("a", "c", "b")


RANKS = """
import sys
import torch.distributed as dist
import veofunc as vf

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


def merged(mine, names=((), ()), capacity=(8, 8), group=None):
    channels = vf.Channels(list(mine[rank]), capacity[rank])
    try:
        channels.all_merge(group, names=names[rank])
    except (TypeError, ValueError) as error:
        assert channels.names == tuple(mine[rank])
        return f"{type(error).__name__}: {error}"
    return channels.names


groups = [dist.new_group([r]) for r in range(2)]
print(merged(["a", "ab"]))  # one rank has added a name
print(merged(["ab", "a"]))
print(merged(["a", "a"], names=(["x", "y"], ["z", "y"])))
print(merged(["ab", "ac"]))
print(merged(["ab", "ba"]))
print(merged(["a", "a"], names=(["b"], ["c"]), capacity=(2, 2)))
print(merged(["a", "a"], capacity=(2, 3)))
print(merged(["a", "a"], names=([], [None])))
print(merged(["a", "a"], names=(["x"], ["x"]), group=groups[rank]))
print(merged(["a", "ab"]))  # the group still works
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_two_ranks_know_all_names_or_raise_the_same(tmp_path):
    command = [sys.executable, "-W", "error", "-c", RANKS, str(tmp_path / "rendezvous")]
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [*command, str(r)], cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for r in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    lines = [out.splitlines() for out, _ in outputs]
    assert lines[0] == lines[1]
    assert lines[0][:3] == ["('a', 'b')", "('a', 'b')", "('a', 'x', 'y', 'z')"]
    starts = [
        "ValueError: id 1 has two names, 'b' and 'c'",
        "ValueError: id 0 has two names, 'a' and 'b'",
        "ValueError: there can be 2 channels, no id is left for 'c'",
        "ValueError: capacity must be the same on every rank, got [2, 3]",
        "TypeError: a name must be a str, got None",
    ]
    for line, start in zip(lines[0][3:8], starts, strict=True):
        assert line.startswith(start)
    assert lines[0][8:] == ["('a', 'x')", "('a', 'b')"]
