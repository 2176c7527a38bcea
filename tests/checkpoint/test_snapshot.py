import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from veofunc.checkpoint.manifest import CheckpointError, Entry
from veofunc.checkpoint.snapshot import (
    Empty,
    Sections,
    describe_leaves,
    describe_values,
    flatten,
    match,
    memory_of,
    name_of,
    unflatten,
)

SECTIONS = Sections({"model": "model", "optimizer": "optimizer"}, frozenset(["rng", "window"]))


class Wrapper(torch.Tensor):
    """A tensor without data of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(torch.ones(2))


class Named(torch.Tensor):
    """A tensor with data, and more to it."""


def nested_state() -> TensorDict:
    return TensorDict(
        {
            "model": TensorDict({"a.weight": torch.ones(2, 3), "b": torch.zeros(())}),
            "optimizer": TensorDict({"state": TensorDict(), "param_groups": NonTensorData([{"lr": 0.1}])}),
            "rng": {"torch": torch.zeros(3, dtype=torch.uint8)},
            "step": NonTensorData(3),
        }
    )


def described(
    state: TensorDict, sections: Sections = SECTIONS, rank: int = 0
) -> dict[tuple[str, ...], Entry]:
    return {entry.path: entry for entry in describe_leaves(flatten(state), sections, rank)}


def matched(like: TensorDict, saved: TensorDict, *, strict: bool = True, cast: bool = False) -> set:
    """The paths that are restored."""
    return {entry.path for entry in match(described(saved), flatten(like), strict=strict, cast=cast)}


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


def test_what_was_below_an_empty_subtree_is_in_it_again():
    leaves = {("a", "b"): torch.ones(1), ("a",): Empty()}
    assert unflatten(leaves)["a", "b"].tolist() == [1]


def test_flatten_copies_no_tensor_and_all_json():
    groups = [{"lr": 0.1}]
    weight = torch.nn.Parameter(torch.ones(2))
    leaves = flatten(TensorDict({"w": weight, "groups": NonTensorData(groups)}))
    assert leaves["w",].data_ptr() == weight.data_ptr()
    groups[0]["lr"] = 9
    assert leaves["groups",] == [{"lr": 0.1}]


def test_a_stack_of_values_is_saved_as_the_list_of_them():
    stack = torch.stack([TensorDict({"name": "x"}), TensorDict({"name": "y"})])
    assert flatten(TensorDict({"data": stack}))["data", "name"] == ["x", "y"]


def test_a_subclass_with_data_is_taken_for_the_plain_tensor_that_it_is():
    tensor = torch.ones(2).as_subclass(Named)
    (leaf,) = flatten(TensorDict({"a": tensor})).values()
    assert type(leaf) is torch.Tensor
    assert leaf.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(2).to_sparse(), "a must be dense and hold data, got torch.sparse_coo on cpu"),
        (torch.ones(2, device="meta"), "a must be dense and hold data, got torch.strided on meta"),
        (Wrapper(torch.ones(2)), "a must be a plain tensor or a DTensor, got Wrapper"),
    ],
    ids=["sparse", "meta", "wrapper"],
)
def test_what_has_no_data_to_save_is_named(tensor, text):
    with pytest.raises(TypeError, match=text):
        flatten(TensorDict({"a": tensor}))


def test_a_state_must_be_a_tensordict():
    with pytest.raises(
        TypeError, match="state must be a TensorDict, as train_state makes it, got <class 'dict'>"
    ):
        flatten({"a": torch.ones(1)})


def test_slots_and_keys():
    state = nested_state()
    state["ema"] = TensorDict({"b": torch.zeros(1)})
    slots = Sections({**SECTIONS.slots, "ema": "averages"}, SECTIONS.per_rank)
    found = {path: (e.slot, e.key) for path, e in described(state, slots).items() if e.kind == "tensor"}
    assert found == {
        ("model", "a.weight"): ("model", "a.weight"),
        ("model", "b"): ("model", "b"),
        ("rng", "torch"): ("rest", "rank_0.rng.torch"),
        ("ema", "b"): ("averages", "ema.b"),
    }


def test_an_entry_says_what_a_leaf_is():
    entries = described(nested_state())
    assert entries["model", "a.weight"] == Entry(
        ("model", "a.weight"), "tensor", None, "model", "a.weight", (2, 3), "float32"
    )
    assert entries["optimizer", "state"] == Entry(("optimizer", "state"), "empty")
    assert entries["step",] == Entry(("step",), "json", value=3)


def test_what_differs_from_rank_to_rank_is_described_per_rank():
    state = nested_state()
    state["window"] = TensorDict({"obs": {"count": torch.ones(1)}, "num_steps": NonTensorData(2)})
    entries = described(state, rank=7)
    assert {path[0] for path, entry in entries.items() if entry.rank == 7} == {"rng", "window"}
    assert {entry.rank for entry in entries.values()} == {None, 7}
    assert entries["window", "obs", "count"].key == "rank_7.window.obs.count"
    assert entries["window", "num_steps"] == Entry(("window", "num_steps"), "json", 7, value=2)


def test_a_section_that_is_a_tensor_is_saved_under_its_own_name():
    (entry,) = described(TensorDict({"model": torch.ones(1)})).values()
    assert (entry.slot, entry.key) == ("model", "model")


def test_two_tensors_of_one_name_on_disk_are_refused():
    state = TensorDict({"model": TensorDict({"a.b": torch.ones(1), "a": TensorDict({"b": torch.ones(1)})})})
    with pytest.raises(
        ValueError, match=r"\('model', 'a.b'\) and \('model', 'a', 'b'\) would both .* as 'a.b'"
    ):
        described(state)


def test_of_tensors_that_are_the_same_memory_one_is_saved():
    weight = torch.ones(4, 4)
    state = TensorDict(
        {
            "model": TensorDict(
                {"a": weight, "b": weight, "flat": weight.view(-1), "turned": weight.T, "part": weight[:2]}
            ),
            "ema": weight,
            "rng": weight,
        }
    )
    assert {path[-1]: entry.tie for path, entry in described(state).items() if entry.tie} == {"b": "a"}


def test_what_has_no_values_is_tied_to_nothing():
    empty = torch.ones(0)
    assert not any(entry.tie for entry in described(TensorDict({"a": empty, "b": empty})).values())


def test_the_same_memory_read_otherwise_is_not_the_same_values():
    whole = torch.ones(4, 4, dtype=torch.complex64)
    others = [
        whole.conj(),
        whole.T,
        whole[:2],
        whole.view(-1),
        whole.real,
        whole.clone(),
        whole.view(torch.int64),
    ]
    assert memory_of(whole) == memory_of(whole[:])
    assert len({memory_of(tensor) for tensor in [whole, *others]}) == 1 + len(others)


def test_the_values_are_described_without_the_tensors():
    leaves = flatten(nested_state())
    everything = describe_leaves(leaves, SECTIONS, 3)
    assert [*describe_values(leaves, SECTIONS, 3)] == [e for e in everything if e.kind != "tensor"]


def test_a_dtype_has_the_name_that_torch_gives_it():
    assert getattr(torch, name_of(torch.float8_e4m3fn)) is torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s["model"].pop("b"), "model.b: unexpected"),
        (lambda s: s["model"].set("c", torch.ones(1)), "model.c: missing"),
        (lambda s: s["model"].set("b", torch.ones(1)), r"model.b: saved as float32\[\], in"),
        (
            lambda s: s["model"].set("b", torch.ones(()).half()),
            r"the state float16\[\]; cast=True converts it",
        ),
        (lambda s: s["model"].set_non_tensor("b", 1), "in the state JSON"),
        (lambda s: s.set("step", torch.ones(())), r"step: saved as JSON, in the state float32\[\]$"),
        (lambda s: s["rng"].rename_key_("torch", "t"), "rng.torch: unexpected"),
        (lambda s: s["optimizer"].set("state", torch.ones(1)), "saved as an empty TensorDict"),
    ],
)
def test_strict_match_names_the_difference(change, text):
    like = nested_state()
    change(like)
    with pytest.raises(CheckpointError, match=text):
        matched(like, nested_state())


def test_all_differences_are_listed():
    like = nested_state()
    like["model", "b"] = torch.ones(1)
    like["model", "c"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=r"restore:\n  model\.b: saved as .*\n  model\.c: missing"):
        matched(like, nested_state())


def test_without_strict_what_only_one_has_is_let_be_and_another_shape_is_not():
    like = nested_state()
    like["model", "c"] = torch.ones(1)
    del like["model", "a.weight"]
    assert matched(like, nested_state(), strict=False) == flatten(nested_state()).keys() - {
        ("model", "a.weight")
    }
    like["model", "b"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=r"restore:\n  model\.b: saved as float32\[\], in [^\n]*$"):
        matched(like, nested_state(), strict=False)


@pytest.mark.parametrize(
    ("here", "fits"),
    [
        (torch.ones(3, dtype=torch.float16), True),
        (torch.ones(3, dtype=torch.float64), True),
        (torch.ones(4, dtype=torch.float16), False),
        (torch.ones(3, dtype=torch.int32), False),
        (torch.ones(3, dtype=torch.complex64), False),
    ],
    ids=str,
)
def test_cast_lets_floats_be_of_another_precision(here, fits):
    saved, like = TensorDict({"a": torch.ones(3)}), TensorDict({"a": here})
    with pytest.raises(CheckpointError, match=r"a: saved as float32\[3\]") as failure:
        matched(like, saved)
    assert ("cast=True converts it" in str(failure.value)) is fits
    if fits:
        assert matched(like, saved, cast=True) == {("a",)}
        return
    with pytest.raises(CheckpointError, match=r"a: saved as float32\[3\], in the state \w+\[\d\]$"):
        matched(like, saved, cast=True)


def test_match_takes_sections_and_empty_subtrees_as_they_were_saved():
    saved = nested_state()
    saved["optimizer", "state"] = TensorDict({"b": {"m": torch.ones(1)}})
    like = nested_state()
    del like["step"], like["rng"]
    assert matched(like, saved) == flatten(saved).keys()


def test_an_empty_subtree_was_saved_but_the_state_has_more():
    like = nested_state()
    like["optimizer", "state"] = TensorDict({"b": {"m": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"optimizer.state.b.m: missing"):
        matched(like, nested_state())
    assert ("optimizer", "state") not in matched(like, nested_state(), strict=False)


def test_a_stack_that_hides_a_key_is_refused_by_name():
    both, one = TensorDict({"a": torch.ones(1), "b": torch.ones(1)}), TensorDict({"a": torch.ones(1)})
    with pytest.raises(TypeError, match=r"^data is a stack of which not all parts have \['b'\]"):
        flatten(TensorDict({"data": lazy_stack([both, one])}))
    assert flatten(TensorDict({"data": lazy_stack([one, one])})).keys() == {("data", "a")}
