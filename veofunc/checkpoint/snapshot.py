"""A state as flat leaves: copied to host memory, described, compared with a saved one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from veofunc.checkpoint.manifest import CheckpointError, Entry, Json, TreePath
from veofunc.checkpoint.values import to_json

__all__ = [
    "RANK_SECTIONS",
    "Empty",
    "Leaf",
    "allocate_",
    "describe_leaves",
    "flatten",
    "match",
    "stage_",
    "tensors_of_slot",
    "unflatten",
]

SLOTS = ("model", "optimizer")  # sections with a directory of their own; the others share "rest"
RANK_SECTIONS = ("rng", "window")  # differ from rank to rank: each saves, and gets back, its own


@dataclass(frozen=True)
class Empty:
    """A TensorDict without entries."""


Leaf: TypeAlias = "Tensor | Empty | Json"


def flatten(state: TensorDictBase) -> dict[TreePath, Leaf]:
    """All leaves of `state` by their path: tensors as they are, JSON values as copies.

    Subclasses of Tensor with data of their own are taken for the plain tensors that they are.

    Raises:
        TypeError: a leaf is neither a dense tensor with data, a DTensor nor a JSON value; names its
            path.
    """
    if not isinstance(state, TensorDictBase):
        raise TypeError(f"state must be a TensorDict, as train_state makes it, got {type(state)}")
    return dict(_walk(state, ()))


def unflatten(leaves: Mapping[TreePath, Leaf]) -> TensorDict:
    """The state with these leaves, the inverse of `flatten`; all its batch sizes are empty."""
    state = TensorDict()
    for path, leaf in sorted(leaves.items(), key=lambda item: not isinstance(item[1], Empty)):
        if isinstance(leaf, Empty):
            state.set(path, TensorDict())
        elif isinstance(leaf, Tensor):
            state.set(path, leaf)
        else:
            state.set_non_tensor(path, leaf)
    return state


def stage_(buffers: dict[TreePath, Tensor], leaves: Mapping[TreePath, Leaf]) -> dict[TreePath, Leaf]:
    """Copy the tensors of `leaves` into `buffers`, after `allocate_` made those that fit.

    Returns:
        The leaves, with their tensors in host memory.
    """
    allocate_(buffers, leaves)
    if buffers:
        with torch.inference_mode(False):  # as the buffers were made
            sources = [_local(cast(Tensor, leaves[path])) for path in buffers]
            torch._foreach_copy_([_local(buffer) for buffer in buffers.values()], sources)
    return {**leaves, **buffers}


def allocate_(buffers: dict[TreePath, Tensor], leaves: Mapping[TreePath, Leaf]) -> None:
    """Make `buffers` one per tensor of `leaves`, in host memory; those that fit are kept.

    Buffers of leaves that are gone are freed.
    """
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    for path in buffers.keys() - tensors.keys():
        del buffers[path]
    with torch.inference_mode(False):  # else no save outside could write into the buffers
        for path, tensor in tensors.items():
            if path not in buffers or not _fits(buffers[path], tensor):
                # Zeroed to have its pages there: a copy into new ones takes five times as long.
                contiguous = torch.contiguous_format
                buffers[path] = torch.empty_like(tensor, device="cpu", memory_format=contiguous).zero_()


def describe_leaves(leaves: Mapping[TreePath, Leaf], rank: int) -> list[Entry]:
    """What the manifest says about the leaves of `rank`.

    Raises:
        ValueError: two tensors would have the same key.
    """
    entries = [_describe(path, leaf, rank) for path, leaf in leaves.items()]
    owners: dict[tuple[str, str], TreePath] = {}
    for entry in entries:
        owner = owners.setdefault((entry.slot, entry.key), entry.path)
        if entry.kind == "tensor" and owner != entry.path:
            raise ValueError(f"{owner} and {entry.path} would both be saved as {entry.key!r}; rename one")
    return entries


def tensors_of_slot(slot: str, entries: list[Entry], leaves: Mapping[TreePath, Leaf]) -> dict[str, Any]:
    """The tensors among `leaves` that `entries` put into `slot`, by key."""
    return {entry.key: leaves[entry.path] for entry in entries if entry.slot == slot}


def match(entries: Mapping[TreePath, Entry], like: Mapping[TreePath, Leaf], *, strict: bool) -> list[Entry]:
    """The saved leaves that belong into a state like `like`.

    What `like` lacks as a whole, a section or all that is below an empty TensorDict, comes as it
    was saved.

    Raises:
        CheckpointError: lists all leaves of another kind, shape or dtype, and if `strict` all that
            only one has.
    """
    sections = {path[0] for path in like}

    def is_wanted(path: TreePath) -> bool:
        above = (like.get(path[:depth]) for depth in range(1, len(path)))
        return path in like or path[0] not in sections or any(isinstance(a, Empty) for a in above)

    wanted = {path: entry for path, entry in entries.items() if is_wanted(path)}
    problems = [_difference(entry, like[path]) for path, entry in wanted.items() if path in like]
    if strict:
        here = [path for path, leaf in like.items() if not isinstance(leaf, Empty)]
        saved = [path for path, entry in entries.items() if entry.kind != "empty"]
        problems += [f"{_dotted(p)}: missing, it was not saved" for p in here if p not in entries]
        problems += [f"{_dotted(p)}: unexpected, the state has none" for p in saved if p not in wanted]
    if any(problems):
        listed = "\n".join(f"  {problem}" for problem in problems if problem)
        raise CheckpointError(f"what was saved differs from the state to restore:\n{listed}")
    return list(wanted.values())


def _walk(node: TensorDictBase, above: TreePath) -> Iterator[tuple[TreePath, Leaf]]:
    for name, value in node.items():
        path = (*above, name)
        if is_non_tensor(value):
            # The list of a NonTensorData repeats its value over the batch size.
            data = value.data if isinstance(value, NonTensorData) else value.tolist()
            yield path, to_json(data, _dotted(path))
        elif not isinstance(value, TensorDictBase):
            yield path, _checked(value, _dotted(path))
        elif list(value.keys()):
            yield from _walk(value, path)
        else:
            yield path, Empty()


def _checked(value: Any, where: str) -> Tensor:
    is_sharded = isinstance(value, DTensor)
    # Other subclasses that dispatch for themselves wrap tensors, and have no data of their own.
    is_plain = isinstance(value, Tensor) and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not (is_sharded or is_plain):
        raise TypeError(f"{where} must be a plain tensor or a DTensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        raise TypeError(f"{where} must be dense and hold data, got {value.layout} on {value.device}")
    if is_sharded and any(placement.is_partial() for placement in value.placements):
        raise TypeError(f"{where} must be sharded or replicated, got {value.placements}")
    # weights_only unpickling, which reads the files, knows no other subclass.
    return value.detach() if is_sharded else value.detach().as_subclass(Tensor)


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return _layout(buffer) == _layout(tensor)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, mesh


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(path: TreePath, leaf: Leaf, rank: int) -> Entry:
    owner = rank if path[0] in RANK_SECTIONS else None
    if isinstance(leaf, Empty):
        return Entry(path, "empty", owner)
    if not isinstance(leaf, Tensor):
        return Entry(path, "json", owner, value=leaf)
    slot = path[0] if path[0] in SLOTS else "rest"
    names = path[1:] if slot == path[0] and len(path) > 1 else path
    prefix = () if owner is None else (f"rank_{owner}",)
    key = ".".join((*prefix, *names))
    return Entry(path, "tensor", owner, slot, key, tuple(leaf.shape), _name(leaf.dtype))


def _difference(entry: Entry, leaf: Leaf) -> str:
    """What keeps `entry` from being read in the place of `leaf`; empty if nothing does."""
    saved, here = _words(entry), _words(_describe(entry.path, leaf, rank=0))
    if saved == here or isinstance(leaf, Empty):
        return ""
    return f"{_dotted(entry.path)}: saved as {saved}, in the state {here}"


def _words(entry: Entry) -> str:
    if entry.kind == "tensor":
        return f"{entry.dtype}{list(entry.shape)}"
    return "JSON" if entry.kind == "json" else "an empty TensorDict"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(path: TreePath) -> str:
    return ".".join(path)
