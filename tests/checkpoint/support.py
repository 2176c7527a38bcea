"""What several of these tests need."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import NonTensorData, TensorDict


def state_of(value: float, numel: int = 16, **sections: TensorDict) -> TensorDict:
    """A model of three tensors full of `value`, a number, and more sections."""
    tensors = {f"layers.{i}": torch.full((numel,), float(value)) for i in range(3)}
    return TensorDict({"model": TensorDict(tensors), "step": NonTensorData(value), **sections})


def values_of(state: TensorDict) -> set[float]:
    """All values of the model's tensors."""
    return {x for tensor in state["model"].values() for x in tensor.unique().tolist()}


def flip(file: Path, place: int = -1, bit: int = 0) -> None:
    """Change one bit; of the byte in the middle, unless `place` says which."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place < 0 else place] ^= 1 << bit
    file.write_bytes(content)


def names_in(directory: Path) -> list[str]:
    """What there is besides the lock."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def forked(work: Callable[[], str]) -> tuple[int, str]:
    """The process id, and what `work` gives in a fork of this process; "" if that was killed."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(theirs, work().encode())
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return pid, text


def start(code: str, *args: object) -> subprocess.Popen[str]:
    """A new process that runs this code."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
