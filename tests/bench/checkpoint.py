"""Checkpoints: how long training waits, and how long until a save is on disk.

The floor of any save that lets training go on is one copy of the state into memory that is there already.
Ours, torch.save and torch.distributed.checkpoint (DCP) run in one process, on one disk; old files are
removed outside of the timed part.
"""

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict

import veofunc as vf
from tests.bench import measure

Wait = Callable[[], object]  # returns when the save is on disk


def run(rounds: int = 5, megabytes: int = 200, tensors: int = 40, directory: str = "") -> str:
    nbytes = megabytes * 1_000_000 // tensors
    state = TensorDict({f"{i:03}": torch.randn(max(1, nbytes // 4)) for i in range(tensors)})
    with tempfile.TemporaryDirectory(dir=directory or None) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's about running without a process group
        with vf.async_checkpointer(TensorDict({"model": state}), Path(path) / "ours") as ckpt:
            savers = {
                "copy into warm memory": copier(state),
                "torch.save + fsync": torch_saver(state),
                "dcp.save": lambda folder: done(dcp.save(dict(state.items()), checkpoint_id=folder)),
                "dcp.async_save": lambda folder: (
                    dcp.async_save(dict(state.items()), checkpoint_id=folder).result
                ),
                "async_checkpointer": our_saver(ckpt, TensorDict({"model": state})),
            }
            variants = {name: variant(Path(path), save) for name, save in savers.items()}
            samples = measure.interleaved(variants, rounds)
    on_disk = {name: rounds for name, rounds in samples.items() if name != "copy into warm memory"}
    return "\n\n".join(
        (
            measure.table("training waits", samples, seconds="blocking"),
            measure.table("until it is on disk", on_disk, seconds="durable"),
        )
    )


def variant(path: Path, save: Callable[[Path], Wait]) -> Callable[[], dict[str, float]]:
    def measured() -> dict[str, float]:
        for old in path.glob("*/*"):
            shutil.rmtree(old)
        folder = path / "theirs" / "save"
        folder.mkdir(parents=True)
        start = time.perf_counter()
        wait = save(folder)
        blocking = time.perf_counter() - start
        wait()
        return {"blocking": blocking, "durable": time.perf_counter() - start}

    return measured


def done(_: object) -> Wait:
    return lambda: None


def copier(state: TensorDict) -> Callable[[Path], Wait]:
    buffers = state.clone()

    def copy(folder: Path) -> Wait:
        return done(buffers.copy_(state))

    return copy


def torch_saver(state: TensorDict) -> Callable[[Path], Wait]:
    def save(folder: Path) -> Wait:
        with open(folder / "state.pt", "wb") as file:
            torch.save(dict(state.items()), file)
            file.flush()
            os.fsync(file.fileno())
        return done(None)

    return save


def our_saver(ckpt, state: TensorDict) -> Callable[[Path], Wait]:
    step = 0

    def save(folder: Path) -> Wait:
        nonlocal step
        step += 1
        return ckpt.save(state, step).result

    return save
