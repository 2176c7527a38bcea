"""What several ranks have saved comes back on any number of ranks; this file is also the script of each.

`python test_checkpoint_reshard.py save|load RANK NUM_RANKS DIRECTORY NUM_SAVED`.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from veofunc.checkpoint import async_checkpointer
from veofunc.state import load_train_state, train_state

SHAPES = {"odd": (7, 5), "one": (1, 3), "wide": (2, 9), "long": (13,), "cube": (3, 4, 5)}
DTYPES = {
    "odd": torch.float32,
    "one": torch.bfloat16,
    "wide": torch.int64,
    "long": torch.float64,
    "cube": torch.half,
}
FLAT = {"rows": [Shard(0)], "last": [Shard(-1)], "whole": [Replicate()]}
SQUARE = {
    "rows, copies": [Shard(0), Replicate()],
    "copies, rows": [Replicate(), Shard(0)],
    "tiles": [Shard(0), Shard(1)],
}


def whole(name: str) -> torch.Tensor:
    """The values, the same on every rank; no two of a tensor are equal."""
    numel = torch.Size(SHAPES[name]).numel()
    return torch.arange(1, numel + 1).view(SHAPES[name]).to(DTYPES[name])


def placements_of(mesh) -> dict:
    return FLAT if mesh.ndim == 1 else SQUARE


def sharded(mesh, value: int | None = None) -> TensorDict:
    """Each tensor in each placement, with its values or full of one."""
    found = TensorDict()
    for name, shape in SHAPES.items():
        for label, placements in placements_of(mesh).items():
            if any(placement.is_shard() and placement.dim >= len(shape) for placement in placements):
                continue
            tensor = whole(name) if value is None else torch.full(shape, value, dtype=DTYPES[name])
            found[f"{name}: {label}"] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    if mesh.ndim == 1:
        found["one: tied"] = found["one: rows"]  # of which most ranks hold nothing
    return TensorDict({"model": found})


def make_model(mesh=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))  # most ranks hold nothing of the last
    if mesh is not None:
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, num_steps: int) -> None:
    """On the same batches on every rank: the gradients, means over equal ones, are those of one rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(state) -> dict:
    """Every tensor, gathered."""
    leaves = state.exclude("rng").items(True, True)
    return {
        path: x.full_tensor() if hasattr(x, "full_tensor") else x for path, x in leaves if torch.is_tensor(x)
    }


def meshes(num_ranks: int) -> dict:
    found = {"line": init_device_mesh("cpu", (num_ranks,))}
    if num_ranks % 2 == 0:
        found["square"] = init_device_mesh("cpu", (num_ranks // 2, 2))
    return found


def save(num_ranks: int, directory: Path) -> None:
    for name, mesh in meshes(num_ranks).items():
        state = sharded(mesh)
        with async_checkpointer(state, directory / name, files_per_rank=2) as ckpt:
            ckpt.save(state, 1)
    model, optimizer = make_model(init_device_mesh("cpu", (num_ranks,)))
    train(model, optimizer, 3)
    state = train_state(model, optimizer)
    with async_checkpointer(state, directory / "fsdp") as ckpt:
        ckpt.save(state, 1)
    expected = full(state)  # of all ranks
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")


def load(num_ranks: int, directory: Path, num_saved: int) -> None:
    for name in ("line", "square")[: 1 + (num_saved % 2 == 0)]:
        check_every_placement(num_ranks, directory / name)
        check_plain_dcp_load(directory / name / "step_1" / "model")
    check_training_state(num_ranks, directory)


def check_every_placement(num_ranks: int, directory: Path) -> None:
    """Tensors that were saved in one placement come back in every other one, and whole."""
    ckpt = async_checkpointer(TensorDict(), directory)
    saved = ckpt.restore(TensorDict())["model"]
    assert len(saved.keys()) == len(sharded_names(directory.name))
    for mesh in meshes(num_ranks).values():
        for placements in placements_of(mesh).values():
            like = TensorDict()
            for key in saved.keys():
                shape = SHAPES[key.split(":")[0]]
                if all(not p.is_shard() or p.dim < len(shape) for p in placements):
                    empty = torch.zeros(shape, dtype=saved[key].dtype)
                    like[key] = distribute_tensor(empty, mesh, placements, src_data_rank=None)
            restored = ckpt.restore(TensorDict({"model": like}), strict=False)["model"]
            for key in like.keys():
                assert restored[key].placements == like[key].placements
                assert torch.equal(restored[key].full_tensor(), whole(key.split(":")[0])), key
    for key, tensor in saved.items():
        assert torch.equal(tensor, whole(key.split(":")[0])), key


def sharded_names(kind: str) -> list[str]:
    labels = FLAT if kind == "line" else SQUARE
    names = [f"{n}: {label}" for n, s in SHAPES.items() for label in labels if label != "tiles" or len(s) > 1]
    return [*names, "one: tied"] if kind == "line" else names


def check_plain_dcp_load(directory: Path) -> None:
    target = {key: torch.zeros_like(whole(key.split(":")[0])) for key in sharded_names(directory.parts[-3])}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")
        dcp.load(target, checkpoint_id=directory)
    for key, tensor in target.items():
        assert torch.equal(tensor, whole(key.split(":")[0])), key


def check_training_state(num_ranks: int, directory: Path) -> None:
    """Model and optimizer come back bit for bit, and can go on."""
    expected = torch.load(directory / "expected.pt")
    model, optimizer = make_model(init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None)
    like = train_state(model, optimizer)
    ckpt = async_checkpointer(like, directory / "fsdp")
    restored = ckpt.restore(like, ranks="drop")
    found = full(restored)
    assert found.keys() == expected.keys() and len(found) >= 12
    for path, tensor in expected.items():
        assert torch.equal(found[path], tensor), path
    load_train_state(restored, model, optimizer)
    for path, tensor in full(train_state(model, optimizer)).items():
        assert torch.equal(tensor, expected[path]), path
    train(model, optimizer, 1)


def run(what: str, num_ranks: int, directory: Path, num_saved: int) -> None:
    """In so many processes."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    arguments = [[what, rank, num_ranks, directory, num_saved] for rank in range(num_ranks)]
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", __file__, *map(str, mine)], env=environment)
        for mine in arguments
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0] * num_ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of what so many ranks have saved."""
    made = {}

    def get(num_ranks: int) -> Path:
        if num_ranks not in made:
            made[num_ranks] = tmp_path_factory.mktemp(f"of_{num_ranks}")
            run("save", num_ranks, made[num_ranks], num_ranks)
        return made[num_ranks]

    return get


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_two_ranks_have_saved_comes_back_on(num_ranks, saved):
    run("load", num_ranks, saved(2), 2)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("num_saved", "num_ranks"), [(2, 2), (2, 4), (4, 1), (4, 2), (4, 3), (4, 4), (3, 4)])
def test_what_some_ranks_have_saved_comes_back_on(num_saved, num_ranks, saved):
    run("load", num_ranks, saved(num_saved), num_saved)


def main(what: str, rank: int, num_ranks: int, directory: Path, num_saved: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/{what}_{num_saved}_{num_ranks}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    save(num_ranks, directory) if what == "save" else load(num_ranks, directory, num_saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
