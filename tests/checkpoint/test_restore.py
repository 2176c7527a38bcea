"""Which values come back, where to, and what is said if they cannot."""

import gc
import multiprocessing
import warnings

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict

from tests.checkpoint.support import flip, state_of, values_of
from veofunc.checkpoint import CheckpointError, async_checkpointer, items, restore
from veofunc.checkpoint.snapshot import flatten
from veofunc.checkpoint.storage import open_storage

ALL = {"model", "step", "ema", "rng"}


def full_state(value: float) -> TensorDict:
    ema = TensorDict({"w": torch.full((3,), float(value))})
    return state_of(value, ema=ema, rng=TensorDict({"x": torch.full((2,), float(value))}))


@pytest.fixture
def ckpt(tmp_path):
    """Has the steps 1, 2 and 3, each full of its number."""
    with async_checkpointer(full_state(0), tmp_path) as made:
        for step in (1, 2, 3):
            made.save(full_state(step), step)
    return made


@pytest.mark.parametrize(
    "only", [["model"], ["ema"], ["step"], ("ema", "rng"), {"model", "step", "ema"}, []], ids=str
)
def test_only_some_sections_are_read(only, ckpt, tmp_path):
    state = ckpt.restore(full_state(0), only=only)
    assert {*state.keys()} == {*only}
    assert all(tensor.unique().tolist() == [3] for tensor in state.values(True, True))
    assert {*ckpt.restore(TensorDict(), only=only).keys()} == {*only}


def test_a_slot_of_which_nothing_is_wanted_is_not_read(ckpt, tmp_path):
    flip(tmp_path / "step_3" / "model" / "__0_0.distcp")
    assert ckpt.restore(full_state(0), 3, only=["ema"])["ema", "w"].tolist() == [3, 3, 3]
    with pytest.raises(CheckpointError, match="CRC-32"):
        ckpt.restore(full_state(0), 3, only=["model"])


def test_not_strict_keeps_what_was_not_saved_and_leaves_out_what_is_not_wanted(ckpt):
    like = TensorDict(
        {"model": {"layers.0": torch.zeros(16), "new": torch.ones(2)}, "extra": {"x": torch.ones(1)}}
    )
    state = ckpt.restore(like, strict=False, only=["model", "extra"])
    assert {*state["model"].keys()} == {"layers.0", "new"}
    assert state["model", "layers.0"].tolist() == [3] * 16
    for path in (("model", "new"), ("extra", "x")):
        assert torch.equal(state[path], like[path])
        state[path].zero_()
        assert like[path].sum() > 0


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("there", FLOATS, ids=str)
@pytest.mark.parametrize("here", FLOATS, ids=str)
def test_cast_converts_as_torch_does(there, here, tmp_path):
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(there)
    state, like = (TensorDict({"model": {"w": x}}) for x in (values, torch.zeros(50).to(here)))
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    read = ckpt.restore(like, cast=True)["model", "w"]
    assert read.dtype == here
    assert torch.equal(read.view(torch.uint8), values.to(here).view(torch.uint8))


def test_all_differences_are_listed_at_once(tmp_path):
    model = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "n": torch.ones(2).int()}
    state = TensorDict({"model": model, "step": NonTensorData(1)})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    other = {"a": torch.ones(2).half(), "b": torch.ones(3), "n": torch.ones(2), "new": torch.ones(1)}
    like = TensorDict({"model": other, "step": torch.ones(())})
    with pytest.raises(CheckpointError) as caught:
        ckpt.restore(like)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  model.a: saved as float32[2], in the state float16[2]; cast=True converts it",
        "  model.b: saved as float32[2], in the state float32[3]",
        "  model.c: unexpected, the state has none",
        "  model.n: saved as int32[2], in the state float32[2]",
        "  model.new: missing, it was not saved",
        "  step: saved as JSON, in the state float32[]",
    ]
    with pytest.raises(CheckpointError) as caught:
        ckpt.restore(like, strict=False, cast=True)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  model.b: saved as float32[2], in the state float32[3]",
        "  model.n: saved as int32[2], in the state float32[2]",
        "  step: saved as JSON, in the state float32[]",
    ]


@pytest.mark.parametrize("where", ["cpu", torch.device("cpu")])
def test_map_location_says_where_tensors_go(where, ckpt):
    state = ckpt.restore(full_state(0), map_location=where)
    assert {tensor.device.type for tensor in state.values(True, True)} == {"cpu"}
    assert values_of(state) == {3}


def test_sizes_alone_are_compared_on_demand(ckpt, tmp_path):
    for place in ("model", "rest"):
        flip(tmp_path / "step_3" / place / "__0_0.distcp")
    assert ckpt.restore(full_state(0), 3, verify="sizes")["step"] == 3
    with pytest.raises(CheckpointError, match="CRC-32"):
        ckpt.restore(full_state(0), 3, verify="full")
    file = tmp_path / "step_2" / "model" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step_2/model/__0_0.distcp: has \d+ bytes, must have"):
        ckpt.restore(full_state(0), 2, verify="sizes")


@pytest.mark.parametrize(
    "name", ["model/__0_0.distcp", "model/.metadata", "model/index.json", "manifest.json"]
)
def test_any_flipped_bit_of_what_is_read_is_found(name, ckpt, tmp_path):
    file = tmp_path / "step_3" / name
    size = file.stat().st_size
    for place in range(0, size, max(1, size // 40)):
        flip(file, place, place % 8)
        with pytest.raises(CheckpointError, match=name):
            ckpt.restore(full_state(0), 3)
        flip(file, place, place % 8)
    assert values_of(async_checkpointer(full_state(0), tmp_path).restore(full_state(0), 3)) == {3}


def test_two_damaged_steps_are_skipped_with_the_reasons(ckpt, tmp_path):
    flip(tmp_path / "step_3" / "model" / "__0_0.distcp")
    flip(tmp_path / "step_2" / "rest" / "__0_0.distcp")
    like = full_state(0)
    with pytest.warns(RuntimeWarning) as warned:
        assert values_of(ckpt.restore(like)) == {1}
    texts = [str(warning.message) for warning in warned]
    assert f"step 3 is skipped: {tmp_path}/step_3/model/__0_0.distcp: its CRC-32 is" in texts[0]
    assert any(
        f"step 2 is skipped: {tmp_path}/step_2/rest/__0_0.distcp: its CRC-32" in text for text in texts
    )
    assert values_of(like) == {0}
    flip(tmp_path / "step_1" / "manifest.json")
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="no complete step"):
        ckpt.restore(like)
    assert values_of(like) == {0}


@pytest.mark.parametrize("options", [{}, {"only": ["model"]}, {"cast": True, "strict": False}], ids=str)
def test_like_is_untouched_when_it_fails_and_when_it_does_not(options, ckpt, tmp_path):
    flip(tmp_path / "step_3" / "model" / "__0_0.distcp")
    like = full_state(7)
    before = {
        path: tensor.clone() for path, tensor in like.items(True, True) if isinstance(tensor, torch.Tensor)
    }
    with pytest.raises(CheckpointError):
        ckpt.restore(like, 3, **options)
    state = ckpt.restore(like, 2, **options)
    for tensor in state.values(True, True):
        tensor.fill_(9)
    assert before.keys() >= {("model", "layers.0"), ("ema", "w"), ("rng", "x")}
    assert all(torch.equal(like[path], tensor) for path, tensor in before.items())


def test_tensors_that_were_one_come_back_as_one(tmp_path):
    weight = torch.arange(6.0)
    model = {"wte": weight, "head": weight, "view": weight.view(2, 3), "same": weight.clone()}
    state = TensorDict({"model": model, "ema": {"w": weight}})
    with async_checkpointer(state, tmp_path) as ckpt:
        path = ckpt.save(state, 1).result()
    for read in (ckpt.restore(state)["model"], ckpt.restore(TensorDict())["model"]):
        assert read["wte"].data_ptr() == read["head"].data_ptr()
        assert len({read[name].data_ptr() for name in model}) == 3
        assert all(torch.equal(read[name], model[name]) for name in model)
    alone = TensorDict({"model": {"head": torch.zeros(6)}})
    assert torch.equal(ckpt.restore(alone, strict=False, only=["model"])["model", "head"], weight)
    assert path.joinpath("model", "__0_0.distcp").stat().st_size < 4 * 24 + 4 * 1000


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(items, "PIECE_BYTES", 1000)
    monkeypatch.setattr(restore, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(restore, "BLOCK_BYTES", 700)


@pytest.mark.parametrize("files_per_rank", [1, 3])
@pytest.mark.parametrize("verify", ["full", "sizes"])
def test_tensors_of_many_pieces_are_read_by_several_threads(files_per_rank, verify, small_pieces, tmp_path):
    shapes = {
        "matrix": (70, 90),
        "rows": (3, 2, 600),
        "long": (5000,),
        "tiny": (),
        "empty": (0, 4),
        "cube": (5, 5, 5),
    }
    model = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    state = TensorDict({"model": model})
    with async_checkpointer(state, tmp_path, files_per_rank=files_per_rank) as ckpt:
        path = ckpt.save(state, 1).result()
    assert len(list(path.glob("model/*.distcp"))) == files_per_rank
    like = TensorDict(
        {"model": {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}}
    )
    read = ckpt.restore(like, verify=verify)["model"]
    assert all(torch.equal(read[name], tensor) for name, tensor in model.items())
    flip(path / "model" / "__0_0.distcp")
    if verify == "full":
        with pytest.raises(CheckpointError, match=r"__0_0.distcp: its CRC-32"):
            ckpt.restore(like, 1)


@pytest.fixture
def of_three_ranks(tmp_path, monkeypatch):
    """A checkpointer of one rank, and the step of another three, each with an `rng` of its own."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_save_as, args=(rank, tmp_path)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    return async_checkpointer(state_of(0), tmp_path / "steps")


def _save_as(rank: int, directory) -> None:
    store = dist.FileStore(str(directory / "store"), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    own = TensorDict({"x": torch.full((2,), rank), "n": NonTensorData(rank)})
    state = state_of(1, rng=own)
    with async_checkpointer(state, directory / "steps") as ckpt:
        ckpt.save(state, 1)
    dist.barrier()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_what_each_rank_has_saved_of_its_own_is_given_dropped_or_listed(of_three_ranks):
    ckpt = of_three_ranks
    like = state_of(0, rng=TensorDict({"x": torch.full((2,), 9), "n": NonTensorData(9)}))
    with pytest.warns(RuntimeWarning, match=r'saved by 3 ranks and is restored on 1: rng come.*ranks="all"'):
        own = ckpt.restore(like)
    assert (own["rng", "x"].tolist(), own["rng", "n"]) == ([0, 0], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept, listed = ckpt.restore(like, ranks="drop"), ckpt.restore(like, ranks="all")
        without = ckpt.restore(state_of(0), ranks="drop")
    assert (kept["rng", "x"].tolist(), kept["rng", "n"]) == ([9, 9], 9)
    assert kept["rng", "x"].data_ptr() != like["rng", "x"].data_ptr()
    assert {*listed["rng"].keys()} == {"rank_0", "rank_1", "rank_2"}
    for rank in range(3):
        assert listed["rng", f"rank_{rank}", "x"].tolist() == [rank, rank]
        assert listed["rng", f"rank_{rank}", "n"] == rank
    assert "rng" not in without.keys()
    assert [values_of(state) for state in (own, kept, listed, without)] == [{1}] * 4


def test_a_restored_state_holds_no_file_and_nothing_of_the_checkpointer(ckpt, tmp_path):
    state = ckpt.restore(full_state(0))
    del ckpt
    gc.collect()
    assert values_of(state) == {3}


def test_a_rank_that_saved_nothing_of_its_own_keeps_what_the_state_has(ckpt, tmp_path):
    request = restore.Request(flatten(full_state(7)), None, True, False, "full", None, "own", 1, 2)
    with pytest.warns(RuntimeWarning, match="stay as in `like` on others"):
        leaves = restore.read_step(open_storage(tmp_path), 3, request)
    assert leaves["rng", "x"].tolist() == [7, 7]
    assert leaves["ema", "w"].tolist() == [3, 3, 3]


def test_a_section_that_nobody_has_is_refused_by_name(tmp_path):
    with async_checkpointer(state_of(1), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
        with pytest.raises(CheckpointError, match=r"only must name sections that step 1 has, .*\['modle'\]"):
            ckpt.restore(state_of(1), only=["modle"])
