"""States whose every value tells which save, which tensor and which position it belongs to.

A save has a stamp, an int that no other save has; the stamps of one directory only grow. Every
value is a function of it, so that a checkpoint made of two saves, or of half of one, is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from zlib import crc32

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SAVES_PER_STEP = 1_000_000
SECTIONS = ("model", "optimizer", "rng", "ema")
PER_RANK = "rng"
MODULI = {  # below which a dtype holds every integer
    torch.int64: (1 << 61) - 1,
    torch.float32: (1 << 24) - 3,
    torch.bfloat16: 251,
    torch.uint8: 251,
}


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state. Its name is unique in the state: the files are searched for it."""

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool = False

    @property
    def is_per_rank(self) -> bool:
        return self.section == PER_RANK

    @property
    def is_stamp(self) -> bool:
        return self.name.startswith("stamp_")


def draw_leaves(rng: Random, largest: int = 1 << 18) -> tuple[Leaf, ...]:
    """Some leaves of every section, and its stamp; the largest has up to `largest` values."""
    numel = int(2 ** rng.uniform(4, math.log2(largest)))
    leaves = []
    for section in SECTIONS:
        leaves.append(Leaf(section, f"stamp_{section}", (), torch.int64))
        for index in range(rng.randint(1, 3)):
            columns = rng.randint(1, 5)
            rows = max(4, (numel if index == 0 else rng.randint(1, numel)) // columns)
            dtype = rng.choice(list(MODULI))
            is_sharded = section != PER_RANK and rng.random() < 0.6
            leaves.append(Leaf(section, f"{section}_w{index}", (rows, columns), dtype, is_sharded))
    return tuple(leaves)


def num_bytes(leaves: tuple[Leaf, ...]) -> int:
    """Of all their values."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def stamp_of(step: int, life: int, attempt: int) -> int:
    """The stamp of a save: of the `attempt`-th save of the `life`-th process that writes there."""
    return step * SAVES_PER_STEP + life * 100_000 + attempt


def step_of(stamp: int) -> int:
    return stamp // SAVES_PER_STEP


def values_of(leaf: Leaf, stamp: int, rank: int = 0) -> Tensor:
    """What the whole of `leaf` must be in the save with that stamp."""
    if leaf.is_stamp:
        return torch.tensor(stamp)
    start = crc32(f"{leaf.name} {rank if leaf.is_per_rank else 0}".encode()) + 7 * stamp
    numbers = torch.arange(math.prod(leaf.shape)).mul_(97).add_(start % MODULI[leaf.dtype])
    return numbers.remainder_(MODULI[leaf.dtype]).to(leaf.dtype).view(leaf.shape)


def new_state(leaves: tuple[Leaf, ...], stamp: int, rank: int = 0, mesh=None) -> TensorDict:
    """The state of that save; without a mesh nothing is sharded."""
    state = TensorDict()
    for leaf in leaves:
        state[leaf.section, leaf.name] = _placed(leaf, values_of(leaf, stamp, rank), mesh)
    for path in _json_paths(leaves):
        state.set_non_tensor(path, _json_of(stamp))
    return state


def fill_(state: TensorDict, leaves: tuple[Leaf, ...], stamp: int, rank: int = 0, mesh=None) -> None:
    """Make it the state of that save, in place, as an optimizer does."""
    for leaf in leaves:
        new = _placed(leaf, values_of(leaf, stamp, rank), mesh)
        _local(state[leaf.section, leaf.name]).copy_(_local(new))
    for path in _json_paths(leaves):
        state.set_non_tensor(path, _json_of(stamp))


def differences(
    state: TensorDict, leaves: tuple[Leaf, ...], stamp: int, rank: int = 0, mesh=None
) -> list[str]:
    """The names of what is not as in that save."""
    found = []
    for leaf in leaves:
        mine = _local(state[leaf.section, leaf.name])
        if not torch.equal(mine, _local(_placed(leaf, values_of(leaf, stamp, rank), mesh))):
            found.append(leaf.name)
    for path in _json_paths(leaves):
        if state[path] != _json_of(stamp):
            found.append(".".join(path))
    return found


def _json_of(stamp: int) -> dict:
    return {"stamp": stamp, "text": f"é {stamp}", "list": [None, True, 0.1 * stamp]}


def _json_paths(leaves: tuple[Leaf, ...]) -> list[tuple[str, ...]]:
    return [(section, "progress") for section in sorted({leaf.section for leaf in leaves})]


def _placed(leaf: Leaf, whole: Tensor, mesh) -> Tensor:
    if mesh is None or not leaf.is_sharded:
        return whole
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
