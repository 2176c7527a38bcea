"""A second reader of checkpoints, which shares nothing with veofunc: plain files and `dcp.load`."""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.faults.states import Leaf, step_of, values_of


@dataclass(frozen=True)
class Seen:
    """What is in one directory of steps.

    Attributes:
        stamps: step to the stamp of its values, for all steps that are whole.
        torn: what is wrong with the others.
        leftovers: names of what is no step.
    """

    stamps: dict[int, int]
    torn: list[str]
    leftovers: list[str]


def look(directory: Path, leaves_of, num_ranks: int) -> Seen:
    """Read everything in `directory`; `leaves_of(step)` must be in a step, saved by `num_ranks`."""
    stamps, torn, leftovers = {}, [], []
    for path in sorted(directory.iterdir()):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if not match:
            leftovers += [path.name] if path.name != ".lock" else []
            continue
        step = int(match[1])
        problems = damaged_files(path)
        if not problems:
            stamp, problems = read_stamp(path, leaves_of(step), num_ranks)
            stamps[step] = stamp
            if not problems and step_of(stamp) != step:
                problems = [f"its values are of step {step_of(stamp)}"]
        if problems:
            stamps.pop(step, None)
            torn.append(f"{path.name}: {'; '.join(problems)}")
    return Seen(stamps, torn, leftovers)


def damaged_files(step: Path) -> list[str]:
    """Which files of the step's manifest are not as it says, or it has none."""
    try:
        files = json.loads((step / "manifest.json").read_bytes())["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"manifest.json: {error!r}"]
    problems = []
    for name, record in files.items():
        file = step / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != record["size"]:
            problems.append(f"{name} has {file.stat().st_size} bytes, not {record['size']}")
        elif zlib.crc32(file.read_bytes()) != record["crc32"]:
            problems.append(f"{name} has another CRC-32")
    return problems


def read_stamp(step: Path, leaves: tuple[Leaf, ...], num_ranks: int) -> tuple[int, list[str]]:
    """The stamp of the step, and what in it is not of the save with that stamp."""
    try:
        tensors = _load_all(step)
    except Exception as error:  # whatever it is, the step cannot be read
        return -1, [f"dcp.load: {error!r}"]
    found = {int(tensor) for name, tensor in tensors if name.startswith("stamp_")}
    found |= set(_stamps_in(json.loads((step / "manifest.json").read_bytes())))
    if len(found) != 1:
        return -1, [f"is made of the saves {sorted(found)}"]
    (stamp,) = found
    problems = [leaf.name for leaf in leaves if not _is_right(leaf, stamp, tensors, num_ranks)]
    return stamp, [f"{name} is wrong" for name in problems]


def _is_right(leaf: Leaf, stamp: int, tensors: list[tuple[str, Tensor]], num_ranks: int) -> bool:
    """Whether the tensors of that name are exactly those of the ranks, in any order."""
    mine = [tensor for name, tensor in tensors if name == leaf.name]
    ranks = range(num_ranks if leaf.is_per_rank else 1)
    expected = [values_of(leaf, stamp, rank) for rank in ranks]
    return len(mine) == len(expected) and all(any(map(_same(e), mine)) for e in expected)


def _same(expected: Tensor):
    def same(tensor: Tensor) -> bool:
        return tensor.dtype == expected.dtype and torch.equal(tensor, expected)

    return same


def _load_all(step: Path) -> list[tuple[str, Tensor]]:
    """All tensors of all slots by the last part of their key."""
    tensors: list[tuple[str, Tensor]] = []
    for metadata in sorted(step.glob("*/.metadata")):
        slot = metadata.parent
        entries = dcp.FileSystemReader(slot).read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            key: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=slot, no_dist=True)
        tensors += [(key.split(".")[-1], tensor) for key, tensor in state.items()]
    return tensors


def _stamps_in(value: Any) -> Iterator[int]:
    """Those of all JSON values of the state, wherever the manifest has them."""
    if isinstance(value, dict):
        if isinstance(value.get("stamp"), int):
            yield value["stamp"]
        for item in value.values():
            yield from _stamps_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _stamps_in(item)
