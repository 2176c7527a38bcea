"""Two processes that save together over gloo; this file is also the script that each runs."""

import functools
import json
import os
import random
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensordict import NonTensorData, TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.pair import run_checks, run_on_two_ranks, what_failed
from tests.limits import largest_file
from veofunc.checkpoint import CheckpointError, async_checkpointer
from veofunc.state import load_train_state, train_state
from veofunc.window import Window

WHOLE = torch.arange(35.0).view(7, 5)  # neither side is even


def sharded(mesh, placement, whole=WHOLE) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, [placement], src_data_rank=None)


def state_of(mesh, value=0.0, numel=8) -> TensorDict:
    weights = sharded(mesh, Shard(0), torch.full((2, numel), value))
    plain = torch.full((4,), value)
    return TensorDict({"model": TensorDict({"w": weights, "b": plain}), "step": NonTensorData(value)})


def finish(save) -> None:
    while not save.done:
        time.sleep(0.001)


def failure_of(work) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it did not fail")


def check_shards_come_back_in_any_placement(rank, mesh, directory):
    state = TensorDict({"model": TensorDict({"w": sharded(mesh, Shard(0))})})
    with async_checkpointer(state, directory) as ckpt:
        ckpt.save(state, 1)
        state["model", "w"].to_local().zero_()
    for placement in (Shard(0), Shard(1), Replicate()):
        like = TensorDict({"model": TensorDict({"w": sharded(mesh, placement, -WHOLE)})})
        restored = ckpt.restore(like)["model", "w"]
        assert restored.placements == (placement,)
        assert torch.equal(restored.full_tensor(), WHOLE)
        assert torch.equal(like["model", "w"].full_tensor(), -WHOLE)
    whole = ckpt.restore(TensorDict({"rng": TensorDict()}))["model", "w"]
    assert torch.equal(whole, WHOLE)


def check_shards_saved_and_restored_in_inference_mode_are_ordinary(rank, mesh, directory):
    with torch.inference_mode():
        state = TensorDict({"model": TensorDict({"w": sharded(mesh, Shard(0))})})
        ckpt = async_checkpointer(state, directory)
    ckpt.save(state, 1).result()
    with torch.inference_mode():
        restored = ckpt.restore(state)["model", "w"]
    assert not restored.is_inference()
    assert not restored.to_local().is_inference()
    assert torch.equal(restored.full_tensor(), WHOLE)


def check_plain_dcp_load_reads_all_shards(rank, mesh, directory):
    state = TensorDict({"model": TensorDict({"a.w": sharded(mesh, Shard(1))})})
    with async_checkpointer(state, directory) as ckpt:
        path = ckpt.save(state, 1).result()
    target = {"a.w": torch.zeros(7, 5)}
    dcp.load(target, checkpoint_id=path / "model")
    assert torch.equal(target["a.w"], WHOLE)
    assert len(list((path / "model").glob("*.distcp"))) == 2


def check_every_rank_gets_its_own_random_state_and_window(rank, mesh, directory):
    torch.manual_seed(rank)
    random.seed(rank)
    obs = TensorDict({"count": torch.full((3,), rank + 1)})
    model = nn.Linear(1, 1)
    state = train_state(model, window=Window().add(obs, 5))
    with async_checkpointer(train_state(model), directory) as ckpt:
        ckpt.save(state, 5)
        expected = torch.randn(4).tolist(), random.random()
    restored = ckpt.restore(train_state(model))
    load_train_state(restored, model)
    assert (torch.randn(4).tolist(), random.random()) == expected
    assert Window(**restored["window"]).obs["count"].tolist() == [rank + 1] * 3


def check_a_leaf_that_one_rank_cannot_stage_fails_on_all(rank, mesh, directory):
    with async_checkpointer(state_of(mesh), directory) as ckpt:
        bad = state_of(mesh, 1.0)
        if rank == 1:
            bad["model", "b"] = torch.eye(4).to_sparse()
            try:
                ckpt.save(bad, 1)
            except TypeError as error:
                text = f"{error}"
        else:
            text = failure_of(ckpt.save(bad, 1).result)
            assert "rank 1, staging" in text
        assert "model.b must be dense" in text
        ckpt.save(state_of(mesh, 2.0), 2)
    assert ckpt.steps() == (2,)


def check_a_write_that_fails_on_one_rank_fails_on_all(rank, mesh, directory):
    like = state_of(mesh, numel=1 << 19)
    ckpt = async_checkpointer(like, directory)
    ckpt.save(state_of(mesh, 1.0, numel=1 << 19), 1).result()
    with largest_file(1 << 20) if rank == 1 else nullcontext():
        finish(ckpt.save(state_of(mesh, 2.0, numel=1 << 19), 2))
    text = failure_of(ckpt.wait)
    assert "rank 1, writing" in text
    assert "step_2" in text
    assert "rank 0" not in text
    dist.barrier()  # rank 0 has removed what was written
    assert sorted(os.listdir(directory)) == [".lock", "step_1"]
    ckpt.save(state_of(mesh, 3.0, numel=1 << 19), 3).result()
    assert ckpt.restore(like)["step"] == 3


def check_a_rank_that_has_nothing_to_write_may_have_a_pace(rank, mesh, directory):
    state = TensorDict({"model": TensorDict({"w": torch.ones(4)})})
    with async_checkpointer(state, directory, bytes_per_second=1e6) as ckpt:
        path = ckpt.save(state, 1).result()
    assert [file.name for file in path.glob("model/*.distcp")] == ["__0_0.distcp"]


def check_ranks_that_save_different_things_are_told(rank, mesh, directory):
    with async_checkpointer(state_of(mesh), directory) as ckpt:
        text = failure_of(ckpt.save(state_of(mesh, 1.0), 1 + rank).result)
        assert "rank 1 saves something else than rank 0: number of the step;" in text
        state = state_of(mesh, 1.0)
        state["data"] = NonTensorData({"position": rank})
        assert "rank 0: data;" in failure_of(ckpt.save(state, 1).result)
    assert ckpt.steps() == ()


def check_damage_that_one_rank_finds_stops_all(rank, mesh, directory):
    with async_checkpointer(state_of(mesh), directory) as ckpt:
        path = ckpt.save(state_of(mesh, 1.0), 1).result()
    dist.barrier()
    if rank == 0:
        file = path / "model" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    assert "model/__1_0.distcp: its CRC-32 is" in failure_of(lambda: ckpt.restore(state_of(mesh), 1))


def check_a_group_saves_alone(rank, mesh, directory):
    groups = [dist.new_group([0]), dist.new_group([1])]
    mine = directory / str(rank)
    state = TensorDict({"x": torch.full((2,), rank)})
    with async_checkpointer(state, mine, process_group=groups[rank]) as ckpt:
        ckpt.save(state, rank)
    assert ckpt.latest() == rank
    assert ckpt.restore(state)["x"].tolist() == [rank, rank]
    assert json.loads((mine / f"step_{rank}" / "manifest.json").read_text())["world_size"] == 1


def check_fsdp_training_resumes_bit_equal(rank, mesh, directory):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Linear(7, 3))
        fully_shard(model, mesh=mesh)
        torch.manual_seed(rank)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, num_steps):
        for _ in range(num_steps):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make()
    with async_checkpointer(train_state(model, optimizer), directory) as ckpt:
        train(model, optimizer, 3)
        ckpt.save(train_state(model, optimizer), 3)
        train(model, optimizer, 3)
    other, second = make()
    load_train_state(ckpt.restore(train_state(other, second)), other, second)
    moments = second.state[other[0].weight]["exp_avg"]
    assert isinstance(moments, DTensor)
    train(other, second, 3)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())


def check_a_small_tensor_that_differs_is_told_and_per_rank_lets_it(rank, mesh, directory):
    state = state_of(mesh)
    state["sampler"] = TensorDict({"seed": torch.tensor([rank])})
    with async_checkpointer(state, directory / "shared") as ckpt:
        assert "rank 0: sampler;" in failure_of(ckpt.save(state, 1).result)
    with async_checkpointer(state, directory / "own", per_rank=["sampler"]) as ckpt:
        ckpt.save(state, 1)
        assert ckpt.restore(state)["sampler", "seed"].tolist() == [rank]


def check_a_group_destroyed_too_early_never_shows_half_a_step(rank, mesh, directory):
    """The last check: the processes go on without a group."""
    ckpt = async_checkpointer(state_of(mesh, numel=1 << 20), directory)
    ckpt.save(state_of(mesh, 1.0, numel=1 << 20), 1).result()
    save = ckpt.save(state_of(mesh, 2.0, numel=1 << 20), 2)
    dist.destroy_process_group()
    try:
        save.result()
        expected = {2}
    except CheckpointError:
        expected = set()
    for step in ckpt.steps():
        ckpt.verify(step)
    assert expected <= {*ckpt.steps()}


CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}


def main(rank: int, directory: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    checks = {name: functools.partial(check, rank, mesh, directory / name) for name, check in CHECKS.items()}
    run_checks(checks, rank, directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where two processes have run all checks."""
    directory = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks(__file__, directory)
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_on_two_ranks(name, rank, directory):
    failure = what_failed(name, rank, directory)
    assert not failure, failure


@pytest.mark.distributed
def test_one_process_restores_what_two_have_saved(directory):
    steps = directory / "every_rank_gets_its_own_random_state_and_window"
    ckpt = async_checkpointer(train_state(nn.Linear(1, 1)), steps)
    with pytest.warns(RuntimeWarning, match="saved by 2 ranks and is restored on 1"):
        restored = ckpt.restore(train_state(nn.Linear(1, 1)))
    assert Window(**restored["window"]).obs["count"].tolist() == [1, 1, 1]
    steps = directory / "shards_come_back_in_any_placement"
    like = TensorDict({"model": TensorDict({"w": torch.zeros(7, 5)})})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = async_checkpointer(like, steps).restore(like)
    assert torch.equal(restored["model", "w"], WHOLE)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
