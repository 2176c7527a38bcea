import pytest
import torch
from tensordict import NonTensorData, TensorDict

from veofunc.checkpoint.manifest import CheckpointError
from veofunc.checkpoint.snapshot import (
    Empty,
    allocate_,
    describe_leaves,
    flatten,
    match,
    stage_,
    unflatten,
)


def nested_state() -> TensorDict:
    return TensorDict(
        {
            "model": TensorDict({"a.weight": torch.ones(2, 3), "b": torch.zeros(())}),
            "optimizer": TensorDict({"state": TensorDict(), "param_groups": NonTensorData([{"lr": 0.1}])}),
            "rng": {"torch": torch.zeros(3, dtype=torch.uint8)},
            "step": NonTensorData(3),
        }
    )


def entries_of(state: TensorDict):
    return {entry.path: entry for entry in describe_leaves(flatten(state), rank=0)}


def test_flatten_and_unflatten_are_inverse():
    leaves = flatten(nested_state())
    assert leaves.keys() == {
        ("model", "a.weight"),
        ("model", "b"),
        ("optimizer", "state"),
        ("optimizer", "param_groups"),
        ("rng", "torch"),
        ("step",),
    }
    again = flatten(unflatten(leaves))
    assert again.keys() == leaves.keys()
    assert again["step",] == 3
    assert again["optimizer", "param_groups"] == [{"lr": 0.1}]
    assert again["optimizer", "state"] == Empty()
    assert torch.equal(again["model", "a.weight"], leaves["model", "a.weight"])


def test_flatten_copies_no_tensor_and_all_json():
    groups = [{"lr": 0.1}]
    weight = torch.nn.Parameter(torch.ones(2))
    leaves = flatten(TensorDict({"w": weight, "groups": NonTensorData(groups)}))
    assert leaves["w",].data_ptr() == weight.data_ptr()
    assert not leaves["w",].requires_grad
    groups[0]["lr"] = 9
    assert leaves["groups",] == [{"lr": 0.1}]


def test_staged_tensors_are_copies_in_buffers_that_are_kept():
    buffers: dict = {}
    source = torch.arange(6.0).view(2, 3).T
    first = stage_(buffers, {("w",): source, ("step",): 1})
    kept = buffers["w",]
    source.fill_(-1)
    assert first["w",].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert first["step",] == 1
    second = stage_(buffers, {("w",): source})
    assert buffers["w",] is kept
    assert second["w",].data_ptr() == kept.data_ptr()


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3, dtype=torch.float64)])
def test_a_tensor_of_other_shape_or_dtype_gets_a_new_buffer(other):
    buffers: dict = {}
    stage_(buffers, {("w",): torch.zeros(3)})
    assert torch.equal(stage_(buffers, {("w",): other})["w",], other)


def test_buffers_are_allocated_without_a_copy_and_staging_keeps_them():
    buffers: dict = {("gone",): torch.ones(1)}
    leaves = {("w",): torch.arange(6.0).view(2, 3).T, ("step",): 1}
    allocate_(buffers, leaves)
    assert buffers.keys() == {("w",)}
    kept = buffers["w",]
    assert kept.is_contiguous()
    assert kept.tolist() == [[0, 0]] * 3
    assert stage_(buffers, leaves)["w",] is kept
    assert kept.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_view_is_staged_at_its_own_size():
    staged = stage_({}, {("w",): torch.zeros(1 << 20)[:4], ("e",): torch.ones(1).expand(8)})
    assert staged["w",].untyped_storage().nbytes() == 16
    assert staged["e",].tolist() == [1] * 8


def test_slots_and_keys():
    described = {
        path: (entry.slot, entry.key)
        for path, entry in entries_of(nested_state()).items()
        if entry.kind == "tensor"
    }
    assert described == {
        ("model", "a.weight"): ("model", "a.weight"),
        ("model", "b"): ("model", "b"),
        ("rng", "torch"): ("rest", "rank_0.rng.torch"),
    }


def test_what_differs_from_rank_to_rank_is_described_per_rank():
    state = nested_state()
    state["window"] = TensorDict({"obs": {"count": torch.ones(1)}, "num_steps": NonTensorData(2)})
    entries = describe_leaves(flatten(state), rank=7)
    assert {e.path[0] for e in entries if e.rank == 7} == {"rng", "window"}
    assert {e.rank for e in entries} == {None, 7}
    assert [e.key for e in entries if e.path[-1] == "count"] == ["rank_7.window.obs.count"]


def test_a_section_that_is_a_tensor_is_saved_under_its_own_name():
    (entry,) = describe_leaves(flatten(TensorDict({"model": torch.ones(1)})), rank=0)
    assert (entry.slot, entry.key) == ("model", "model")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s["model"].pop("b"), "model.b: unexpected"),
        (lambda s: s["model"].set("c", torch.ones(1)), "model.c: missing"),
        (lambda s: s["model"].set("b", torch.ones(1)), r"model.b: saved as float32\[\], in"),
        (lambda s: s["model"].set("b", torch.ones(()).half()), r"the state float16\[\]"),
        (lambda s: s["model"].set_non_tensor("b", 1), "in the state JSON"),
        (lambda s: s["rng"].rename_key_("torch", "t"), "rng.torch: unexpected"),
        (lambda s: s["optimizer"].set("state", torch.ones(1)), "saved as an empty TensorDict"),
    ],
)
def test_strict_match_names_the_difference(change, text):
    like = nested_state()
    change(like)
    with pytest.raises(CheckpointError, match=text):
        match(entries_of(nested_state()), flatten(like), strict=True)


def test_match_takes_sections_and_empty_subtrees_as_they_were_saved():
    saved = nested_state()
    saved["optimizer", "state"] = TensorDict({"b": {"m": torch.ones(1)}})
    like = nested_state()
    del like["step"], like["rng"]
    wanted = match(entries_of(saved), flatten(like), strict=True)
    assert {entry.path for entry in wanted} == flatten(saved).keys()


def test_an_empty_subtree_was_saved_but_the_state_has_more():
    like = nested_state()
    like["optimizer", "state"] = TensorDict({"b": {"m": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"optimizer.state.b.m: missing"):
        match(entries_of(nested_state()), flatten(like), strict=True)
    wanted = match(entries_of(nested_state()), flatten(like), strict=False)
    assert ("optimizer", "state") not in {entry.path for entry in wanted}


def test_buffers_of_leaves_that_are_gone_are_freed():
    buffers: dict = {}
    stage_(buffers, {("a",): torch.zeros(3), ("b",): torch.zeros(3)})
    stage_(buffers, {("b",): torch.zeros(3), ("step",): 1})
    assert buffers.keys() == {("b",)}
    stage_(buffers, {})
    assert buffers == {}


def test_a_stack_of_values_is_saved_as_the_list_of_them():
    stack = torch.stack([TensorDict({"name": "x"}), TensorDict({"name": "y"})])
    assert flatten(TensorDict({"data": stack}))["data", "name"] == ["x", "y"]
