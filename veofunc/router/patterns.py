"""How a choice of experts shows in what a module is called with and in what it returns.

By dtypes and shapes, and where they can be read by values; never by names. A choice shows as

- `"ids"`: integers [..., K] beside weights of the same shape. A router returns them, with its logits
  [..., E]; experts are called with them and with the rows [..., D] that they are for. Or an embedding that
  has a row for each expert is indexed with them.
- `"mask"`: 0 or 1 for each expert, [..., E].
- `"scores"`: floats [..., E], 0 for each expert that is not chosen.
- `"sizes"`: how many slots each expert got, [E].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from veofunc.levels import plain_of

__all__ = [
    "ByIndices",
    "Choice",
    "Reading",
    "Sighting",
    "are_probabilities",
    "describe",
    "equal_values",
    "num_stacked",
    "rows",
    "said_num_experts",
    "seen_by",
    "seen_in",
    "seen_out",
]

INDEX_DTYPES = (torch.int32, torch.int64)
MASK_DTYPES = (torch.bool, torch.uint8, *INDEX_DTYPES)
MAX_TOP_K = 64  # what is wider are no choices

Path = tuple[Any, ...]  # of a tensor in nested tuples, lists and mappings
Shown = dict[Path, Tensor]
Found = tuple["Reading", int | None, int]  # with E and K


@dataclass(frozen=True, eq=False)
class Choice:
    """Which experts the tokens of one call were given.

    Attributes:
        kind: `"ids"`, `"mask"`, `"scores"` or `"sizes"`.
        values: int [..., K]; int or bool [..., E]; float [..., E]; int [E]. Leading dimensions hold tokens.
        weights: of ids: weight of each slot, float [..., K]; None if it does not show.
        logits: float [..., E] beside it, perhaps probabilities; None if it does not show.
        num_tokens: N.
    """

    kind: str
    values: Tensor
    weights: Tensor | None
    logits: Tensor | None
    num_tokens: int


@dataclass(frozen=True)
class Reading:
    """Where a choice stands in what a module is called with or returns.

    Attributes:
        kind: as of `Choice`.
        is_input: whether the module is called with it.
        values, weights, logits: path of each; None if it does not show.
    """

    kind: str
    is_input: bool
    values: Path
    weights: Path | None = None
    logits: Path | None = None

    def choice(self, shown: Any) -> Choice | None:
        """The choice in what a module of that kind is called with or returned; None if it is not there."""
        tensors = _tensors(shown)
        values, weights, logits = (tensors.get(path) for path in (self.values, self.weights, self.logits))
        if values is None:
            return None
        tokens = logits if self.kind == "sizes" else values
        return None if tokens is None else _choice(self.kind, values, weights, logits, rows(tokens))


@dataclass(frozen=True)
class ByIndices:
    """A reading by the user's function from what a router returns to the ids. `said`: its `num_experts`."""

    indices: Callable[[Any], Tensor]
    said: int | None = None
    is_input = False

    def choice(self, shown: Any) -> Choice:
        ids, tensors = self.indices(shown), _tensors(shown)
        if not isinstance(ids, Tensor) or ids.dtype not in INDEX_DTYPES:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"indices= must return an int32 or int64 tensor of expert ids, got {kind}")
        if ids.dim() < 2 or ids.shape[-1] == 0:
            raise ValueError(f"indices= must return ids of shape [..., K], got {list(ids.shape)}")
        weights, logits = _beside(tensors, ids), _logits(tensors, ids, self.said)
        return _choice("ids", ids, tensors.get(weights), tensors.get(logits), rows(ids))


def _choice(
    kind: str, values: Tensor, weights: Tensor | None, logits: Tensor | None, num_tokens: int
) -> Choice:
    """None of it belongs to a graph."""
    values = values.detach() if values.is_floating_point() else values  # ids are known by their identity
    weights = None if weights is None else weights.detach()
    logits = None if logits is None else logits.detach()
    return Choice(kind, values, weights, logits, num_tokens)


def _copied(choice: Choice) -> Choice:
    """With a memory of its own: somebody may change the tensors before they are counted."""
    weights = None if choice.weights is None else choice.weights.clone()
    return replace(choice, values=choice.values.clone(), weights=weights)


@dataclass(frozen=True, eq=False)
class Sighting:
    """A choice that a call of a module showed.

    Attributes:
        module: the module.
        reading: where it stands.
        choice: what it is, as it was then.
        shown: the tensor itself, by which it is known.
        num_experts: E; None if it does not show there.
        top_k: K.
    """

    module: nn.Module
    reading: Reading | ByIndices
    choice: Choice
    shown: Tensor
    num_experts: int | None
    top_k: int


def seen_in(module: nn.Module, owner: nn.Module | None, args: tuple, kwargs: dict) -> list[Sighting]:
    """The choices that `module` is called with. `owner` is the module that it is an attribute of."""
    shown = args, kwargs
    tensors = _tensors(shown)
    said = said_num_experts(module) or said_num_experts(owner)
    if isinstance(module, nn.Embedding) and module.num_embeddings == said:
        found = [
            (Reading("ids", True, at), said, ids.shape[-1]) for at, ids in tensors.items() if _may_be_ids(ids)
        ]
    else:
        found = _ids_for_rows(tensors, said)
    return _sightings(module, shown, found)


def seen_out(module: nn.Module, output: Any) -> list[Sighting]:
    """The choices that `module` returns: of one kind, if any."""
    tensors, said = _tensors(output), said_num_experts(module)
    for find in (_ids_with_logits, _masks, _scores, _sizes):
        if found := list(find(tensors, said)):
            return _sightings(module, output, found[:1])
    return []


def seen_by(indices: Callable[[Any], Tensor], module: nn.Module, output: Any) -> Sighting:
    """The choice that `indices` reads in what `module` returned."""
    reading = ByIndices(indices, said_num_experts(module))
    choice = reading.choice(output)
    num_experts = _num_experts(_tensors(output), choice.values, reading.said)
    return Sighting(module, reading, _copied(choice), choice.values, num_experts, choice.values.shape[-1])


def are_probabilities(logits: Tensor) -> bool:
    """Whether rows sum to 1, as those of logits do not; a first look at values."""
    logits = logits.detach()
    return _holds(lambda: (logits >= 0) & ((logits.sum(-1, keepdim=True) - 1).abs() < 1e-2))


def equal_values(one: Choice, other: Choice) -> bool:
    """Whether they are the same choice, by a look at values."""
    a, b = one.values, other.values
    return a.numel() == b.numel() and _holds(lambda: a.reshape(-1) == b.reshape(-1))


def rows(tensor: Tensor) -> int:
    """How many tokens the leading dimensions hold."""
    return tensor.numel() // max(tensor.shape[-1], 1) if tensor.dim() else 0


def said_num_experts(module: nn.Module | None) -> int | None:
    said = getattr(module, "num_experts", None)
    return said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else None


def describe(shown: Any) -> str:
    """Dtypes and shapes, in one line."""
    parts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(shown).values()]
    return f"({', '.join(parts)})" if parts else type(shown).__name__


def _sightings(module: nn.Module, shown: Any, found: Iterable[Found]) -> list[Sighting]:
    sightings = []
    for reading, num_experts, top_k in found:
        choice = reading.choice(shown)
        if choice is not None:
            sightings.append(Sighting(module, reading, _copied(choice), choice.values, num_experts, top_k))
    return sightings


def _ids_for_rows(tensors: Shown, num_experts: int | None) -> Iterator[Found]:
    """As experts are called: ids and weights of the same shape, and as many rows."""
    for at, ids in tensors.items():
        weights = _beside(tensors, ids) if _may_be_ids(ids) else None
        if weights is None:
            continue
        floats = [t for path, t in tensors.items() if path != weights and t.is_floating_point()]
        is_mask = num_experts is not None and ids.shape[-1] >= num_experts
        if any(t.dim() > 1 and rows(t) == rows(ids) for t in floats) and not is_mask:
            yield Reading("ids", True, at, weights), num_experts, ids.shape[-1]


def _ids_with_logits(tensors: Shown, said: int | None) -> Iterator[Found]:
    """As routers return them: ids and weights of the same shape, and logits or a module that says E."""
    for at, ids in tensors.items():
        weights = _beside(tensors, ids) if _may_be_ids(ids) else None
        if weights is None:
            continue
        num_experts = _num_experts(tensors, ids, said)
        if num_experts is not None and ids.shape[-1] < num_experts:  # else a mask
            yield Reading("ids", False, at, weights, _logits(tensors, ids, said)), num_experts, ids.shape[-1]


def _num_experts(tensors: Shown, ids: Tensor, said: int | None) -> int | None:
    """The width of the logits beside `ids`; if there are none, or it says K, what the module says."""
    logits = _logits(tensors, ids, said)
    return said if logits is None or said == ids.shape[-1] else tensors[logits].shape[-1]


def _logits(tensors: Shown, ids: Tensor, said: int | None) -> Path | None:
    """The path of the logits beside `ids`; of several, the one as wide as `said`, or the first."""
    wider = {
        path: t.shape[-1]
        for path, t in tensors.items()
        if t.is_floating_point() and t.dim() > 1 and t.shape[-1] > ids.shape[-1] and rows(t) == rows(ids)
    }
    return next((path for path, width in wider.items() if width == said), next(iter(wider), None))


def _masks(tensors: Shown, said: int | None) -> Iterator[Found]:
    for at, mask in tensors.items():
        if mask.dtype not in MASK_DTYPES or mask.dim() < 2 or mask.shape[-1] < 2 or not mask.numel():
            continue
        width = mask.shape[-1]
        floats = {p: t for p, t in tensors.items() if t.is_floating_point() and rows(t) == rows(mask)}
        wide = {path: t for path, t in floats.items() if t.shape[-1] == width}
        if said not in (None, width) or not (wide or (said and floats)):
            continue
        if not _holds(
            lambda mask=mask: ((mask == 0) | (mask == 1)) & (mask.sum(-1, keepdim=True) < mask.shape[-1])
        ):
            continue
        logits = next(iter(wide), None)
        # The weights beside it may show more: of a mask of each token's first expert, its others too.
        for path, weights in wide.items():
            if top_k := _num_chosen(weights, exact=False):
                others = [other for other in wide if other != path]
                yield Reading("scores", False, path, None, next(iter(others), None)), width, top_k
                return
        top_k = _largest(lambda mask=mask: mask.sum(-1))
        yield Reading("mask", False, at, None, logits), width, max(top_k or 1, 1)


def _scores(tensors: Shown, said: int | None) -> Iterator[Found]:
    """Two floats of one shape, one of which has as many zeros in every row."""
    floats = {
        path: t for path, t in tensors.items() if t.is_floating_point() and t.dim() > 1 and t.shape[-1] > 1
    }
    for path, scores in floats.items():
        logits = next((p for p, t in floats.items() if p != path and t.shape == scores.shape), None)
        if logits is not None and (top_k := _num_chosen(scores, exact=True)):
            yield Reading("scores", False, path, None, logits), scores.shape[-1], top_k


def _sizes(tensors: Shown, said: int | None) -> Iterator[Found]:
    for at, sizes in tensors.items():
        if sizes.dim() != 1 or sizes.dtype not in INDEX_DTYPES or len(sizes) < 2:
            continue
        for path, logits in tensors.items():
            if (
                logits.is_floating_point()
                and logits.dim() > 1
                and logits.shape[-1] == len(sizes)
                and rows(logits)
            ):
                total = _largest(lambda sizes=sizes: torch.where((sizes >= 0).all(), sizes.sum(), -1))
                if total and total > 0 and total % rows(logits) == 0:
                    yield Reading("sizes", False, at, None, path), len(sizes), total // rows(logits)


def _num_chosen(scores: Tensor, *, exact: bool) -> int | None:
    """How many of each row are not 0, if that are as many in all rows (or, if not `exact`, never all)."""
    chosen = scores.detach() != 0
    most = _largest(lambda: chosen.sum(-1))
    least = _largest(lambda: -chosen.sum(-1))
    if most is None or least is None or not 0 < most < scores.shape[-1] or (exact and most != -least):
        return None
    return most if _holds(lambda: scores.detach() >= 0) else None


def _may_be_ids(tensor: Tensor) -> bool:
    return tensor.dtype in INDEX_DTYPES and tensor.dim() > 1 and 0 < tensor.shape[-1] <= MAX_TOP_K


def _beside(tensors: Shown, ids: Tensor) -> Path | None:
    """The path of weights of the shape of `ids`."""
    return next((path for path, t in tensors.items() if t.is_floating_point() and t.shape == ids.shape), None)


def num_stacked(experts: nn.Module) -> int | None:
    """How many experts a module has whose parameters hold one after the other."""
    return next((len(p) for p in experts.parameters(recurse=False) if p.dim() == 3), None)


def _holds(check: Callable[[], Tensor]) -> bool:
    """Whether that holds for all values; False while they cannot be read."""
    return not torch.compiler.is_compiling() and bool(plain_of(check()).all())


def _largest(of: Callable[[], Tensor]) -> int | None:
    """The largest value; None if there is none, or while they cannot be read."""
    if torch.compiler.is_compiling():
        return None
    values = plain_of(of())
    return int(values.max()) if values.numel() else None


def _tensors(shown: Any) -> Shown:
    return dict(_walk(shown, ()))


def _walk(shown: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(shown, Tensor):
        yield path, shown
    elif _is_list_of_ints(shown):
        yield path, torch.tensor(shown)
    else:
        for key, value in _parts(shown):
            yield from _walk(value, (*path, key))


def _is_list_of_ints(shown: Any) -> bool:
    return isinstance(shown, list | tuple) and len(shown) > 1 and all(type(value) is int for value in shown)


def _parts(shown: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(shown, Mapping):
        return shown.items()
    if is_dataclass(shown) and not isinstance(shown, type):
        return [(field.name, getattr(shown, field.name)) for field in fields(shown)]
    return enumerate(shown) if isinstance(shown, tuple | list) else ()
