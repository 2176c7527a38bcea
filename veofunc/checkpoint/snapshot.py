"""A state as flat leaves: described, and compared with a saved one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast
from zlib import crc32

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from veofunc.checkpoint.manifest import CheckpointError, Entry, Json, TreePath
from veofunc.checkpoint.values import to_json

__all__ = [
    "REST",
    "SMALL_BYTES",
    "Empty",
    "Leaf",
    "Sections",
    "describe_leaves",
    "describe_values",
    "digests_of_small",
    "flatten",
    "local",
    "match",
    "memory_of",
    "name_of",
    "unflatten",
]


REST = "rest"
SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Sections:
    """How the top-level keys of a state are saved.

    Attributes:
        slots: the slot of a key, each a directory written by itself; the other keys share `REST`.
        per_rank: keys whose values differ from rank to rank: each saves, and gets back, its own.
    """

    slots: Mapping[str, str]
    per_rank: frozenset[str]

    def slot_of(self, path: TreePath) -> str:
        """The slot of a tensor."""
        return self.slots.get(path[0], REST)


logger = logging.getLogger(__name__)


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


def describe_leaves(leaves: Mapping[TreePath, Leaf], sections: Sections, rank: int) -> list[Entry]:
    """What a checkpoint says about the leaves of `rank`. Of tensors that are the same memory one is saved.

    Raises:
        ValueError: two tensors would have the same key.
    """
    entries: list[Entry] = []
    owners: dict[tuple[str, str], TreePath] = {}
    holders: dict[tuple[Any, ...], str] = {}
    for path, leaf in leaves.items():
        entry = _describe(path, leaf, sections, rank)
        if isinstance(leaf, Tensor):
            owner = owners.setdefault((entry.slot, entry.key), path)
            if owner != path:
                raise ValueError(f"{owner} and {path} would both be saved as {entry.key!r}; rename one")
            if local(leaf).numel():  # what is empty has no memory to tell it by
                holder = holders.setdefault((entry.slot, entry.rank, *memory_of(leaf)), entry.key)
                entry = replace(entry, tie=holder if holder != entry.key else "")
        entries.append(entry)
    return entries


def describe_values(leaves: Mapping[TreePath, Leaf], sections: Sections, rank: int) -> Iterator[Entry]:
    """What a checkpoint says about the leaves that are no tensors: all there is to save of them."""
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            yield _describe(path, leaf, sections, rank)


def digests_of_small(leaves: Mapping[TreePath, Leaf], sections: Sections) -> dict[str, int]:
    """A checksum for each section besides model and optimizer of the small tensors that ranks share."""
    digests: dict[str, int] = {}
    for path, leaf in leaves.items():
        shared = sections.slot_of(path) == REST and path[0] not in sections.per_rank
        plain = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.device.type == "cpu"
        if shared and plain and leaf.nbytes <= SMALL_BYTES:
            values = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            digests[path[0]] = crc32(values.numpy(), digests.get(path[0], 0))
    return digests


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same values of the same memory."""
    layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    tensor = local(tensor)
    lazy = (tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), *lazy, *layout


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def match(
    entries: Mapping[TreePath, Entry], like: Mapping[TreePath, Leaf], *, strict: bool, cast: bool
) -> list[Entry]:
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
    problems = [_difference(entry, like[path], cast) for path, entry in wanted.items() if path in like]
    missing = [_dotted(p) for p, leaf in like.items() if p not in entries and not isinstance(leaf, Empty)]
    unexpected = [_dotted(p) for p, e in entries.items() if p not in wanted and e.kind != "empty"]
    if strict:
        problems += [f"{name}: missing, it was not saved" for name in missing]
        problems += [f"{name}: unexpected, the state has none" for name in unexpected]
    elif missing or unexpected:
        logger.warning(
            "kept, as it was not saved: %s; left out: %s", missing or "nothing", unexpected or "nothing"
        )
    if any(problems):
        listed = "\n".join(f"  {problem}" for problem in problems if problem)
        raise CheckpointError(f"what was saved differs from the state to restore:\n{listed}")
    return list(wanted.values())


def _walk(node: TensorDictBase, above: TreePath) -> Iterator[tuple[TreePath, Leaf]]:
    if isinstance(node, LazyStackedTensorDict):  # shows only the keys that all its parts have
        hidden = {key for part in node.tensordicts for key in part.keys()} - {*node.keys()}
        if hidden:
            where = _dotted(above) or "state"
            raise TypeError(
                f"{where} is a stack of which not all parts have {sorted(hidden)}; save them apart"
            )
    for name, value in node.items():
        path = (*above, name)
        if type(value) in (Tensor, nn.Parameter) and _holds_data(value):  # nearly all
            yield path, cast(Tensor, value)
        elif is_non_tensor(value):
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
    if not _holds_data(value):
        raise TypeError(f"{where} must be dense and hold data, got {value.layout} on {value.device}")
    if is_sharded and any(placement.is_partial() for placement in value.placements):
        raise TypeError(f"{where} must be sharded or replicated, got {value.placements}")
    return value if is_sharded else value.as_subclass(Tensor)


def _holds_data(tensor: Any) -> bool:
    """Whether it is dense and not meta."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _describe(path: TreePath, leaf: Leaf, sections: Sections, rank: int) -> Entry:
    owner = rank if path[0] in sections.per_rank else None
    if isinstance(leaf, Empty):
        return Entry(path, "empty", owner)
    if not isinstance(leaf, Tensor):
        return Entry(path, "json", owner, value=leaf)
    slot = sections.slot_of(path)
    names = path[1:] if slot == path[0] and len(path) > 1 else path
    prefix = () if owner is None else (f"rank_{owner}",)
    key = ".".join((*prefix, *names))
    return Entry(path, "tensor", owner, slot, key, tuple(leaf.shape), name_of(leaf.dtype))


def _difference(entry: Entry, leaf: Leaf, cast: bool) -> str:
    """What keeps `entry` from being read in the place of `leaf`; empty if nothing does."""
    saved, here, can_cast = _words(entry.kind, entry.dtype, entry.shape), "JSON", False
    if isinstance(leaf, Tensor):
        here = _words("tensor", name_of(leaf.dtype), leaf.shape)
        are_floats = leaf.is_floating_point() and getattr(torch, entry.dtype or "int8").is_floating_point
        can_cast = are_floats and leaf.shape == entry.shape
    if saved == here or isinstance(leaf, Empty) or (cast and can_cast):
        return ""
    hint = "; cast=True converts it" if can_cast else ""
    return f"{_dotted(entry.path)}: saved as {saved}, in the state {here}{hint}"


def _words(kind: str, dtype: str, shape: Sequence[int]) -> str:
    if kind == "tensor":
        return f"{dtype}{list(shape)}"
    return "JSON" if kind == "json" else "an empty TensorDict"


def name_of(dtype: torch.dtype) -> str:
    """As in "float32"."""
    return str(dtype).removeprefix("torch.")


def _dotted(path: TreePath) -> str:
    return ".".join(path)
