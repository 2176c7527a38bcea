"""What the checkpoint benchmark compares: ways to save a state, each opened once and used many times."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tensordict import TensorDict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

import veofunc as vf

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Saving:
    """A save that has begun; what each field does by default is right for one that is over."""

    wait: Callable[[], object] = lambda: None  # returns when every byte is on disk
    done: Callable[[], bool] = lambda: True
    wait_staged: Callable[[], object] = lambda: None  # returns when the state may change


Save = Callable[[], Saving]
Saver = Callable[[State, Path], AbstractContextManager[Save]]  # saves below the directory, which it owns

MEMCPY, RAW = "copy into warm memory", "raw write + fsync"
OURS, OURS_VALUE = "ours", "ours, copy=False"
ORBAX = "orbax async"


def savers(num_ranks: int) -> tuple[dict[str, Saver], dict[str, Saver]]:
    """Those that end before they return, and those that let training go on, by name."""
    makers = {MEMCPY: memcpy, RAW: raw_write, "dcp.save": dcp_save, "safetensors + fsync": safetensors}
    behind = {
        "raw write, thread": raw_write_in_thread,
        "dcp.async_save, thread": partial(dcp_async, AsyncCheckpointerType.THREAD),
        "dcp.async_save, process": partial(dcp_async, AsyncCheckpointerType.PROCESS),
        OURS: ours,
        "ours, block=False": partial(ours, block=False),
        OURS_VALUE: partial(ours, copy=False),
        "ours, double_buffer": partial(ours, double_buffer=True),
    }
    if num_ranks == 1 and find_spec("orbax") is not None:
        behind[ORBAX] = orbax
    return {name: partial(at_once, make) for name, make in makers.items()}, behind


def local(state: State) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor."""
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}


@contextmanager
def at_once(
    make: Callable[[State, Path], Callable[[], object]], state: State, directory: Path
) -> Iterator[Save]:
    """What `make` returns saves, and is over when it returns."""
    act = make(state, directory)

    def save() -> Saving:
        act()
        return Saving()

    yield save


def memcpy(state: State, directory: Path) -> Callable[[], object]:
    """The floor of any save that lets training change the state in place."""
    tensors = list(local(state).values())
    buffers = [t.clone() for t in tensors]
    return lambda: torch._foreach_copy_(buffers, tensors)


def raw_write(state: State, directory: Path) -> Callable[[], object]:
    """The floor of any save: one file, nothing computed."""
    arrays = [memoryview(t.numpy()).cast("B") for t in local(state).values()]

    def write() -> None:
        with open(directory / f"raw_{dist.get_rank()}", "wb", buffering=0) as file:
            for array in arrays:
                written = 0
                while written < len(array):
                    written += os.write(file.fileno(), array[written:])
            os.fsync(file.fileno())

    return write


@contextmanager
def raw_write_in_thread(state: State, directory: Path) -> Iterator[Save]:
    """The floor of what the loop loses: machine and interpreter lock are shared, nothing is computed."""
    write = raw_write(state, directory)
    with ThreadPoolExecutor(1) as pool:

        def save() -> Saving:
            future = pool.submit(write)
            return Saving(future.result, future.done)

        yield save


def safetensors(state: State, directory: Path) -> Callable[[], object]:
    path = directory / f"{dist.get_rank()}.safetensors"

    def write() -> None:
        save_file(local(state), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    return write


def dcp_save(state: State, directory: Path) -> Callable[[], object]:
    return lambda: dcp.save(dict(state), checkpoint_id=directory / "save")


@contextmanager
def dcp_async(kind: AsyncCheckpointerType, state: State, directory: Path) -> Iterator[Save]:
    """With a stager that keeps its buffers: by default each save makes new ones and takes longer."""
    shared = kind is AsyncCheckpointerType.PROCESS
    stager = DefaultStager(StagingOptions(False, shared, False, False))  # not pinned, not asynchronous

    def save() -> Saving:
        options = {"async_checkpointer_type": kind, "async_stager": stager}
        future = dcp.async_save(dict(state), checkpoint_id=directory / "save", **options)
        return Saving(future.result, future.done)

    yield save
    stager.close()


@contextmanager
def orbax(state: State, directory: Path) -> Iterator[Save]:
    """Of jax arrays, which nothing can write to: what it compares with is ours, copy=False."""
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    arrays = {name: jnp.array(t.numpy()) for name, t in state.items()}
    path = directory / "save"  # under another name until all of it is there
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:

        def save() -> Saving:
            checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))
            return Saving(checkpointer.wait_until_finished, path.exists)

        yield save


@contextmanager
def ours(state: State, directory: Path, *, block: bool = True, **options: bool) -> Iterator[Save]:
    value = TensorDict({"model": TensorDict(dict(state))})
    with vf.async_checkpointer(value, directory, **options) as checkpointer:
        step = 0

        def save() -> Saving:
            nonlocal step
            step += 1
            saving = checkpointer.save(value, step, block=block)
            return Saving(saving.result, lambda: saving.done, saving.wait_staged)

        yield save
