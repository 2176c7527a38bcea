"""Finding routers, and the choice in a router's output, by structure: shapes and dtypes, no names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veofunc.transform import bare_module, matches, module_hooks, some_paths

__all__ = ["Choice", "Router", "Search", "find_routers", "known_routers", "select_routers"]

INDEX_DTYPES = (torch.int32, torch.int64)


class Router(NamedTuple):
    """One mixture-of-experts router of a model."""

    path: str
    """as in `model.named_modules()`"""
    num_experts: int
    """experts it chooses from, E"""
    top_k: int
    """experts per token, K"""


@dataclass(frozen=True, eq=False)
class Choice:
    """Which experts N tokens were given.

    Attributes:
        ids: expert of each slot, int [..., K]; the leading dimensions hold the tokens.
        weights: weight of each slot, float [..., K], or None if the output does not show it.
        num_experts: E.
    """

    ids: Tensor
    weights: Tensor | None
    num_experts: int


def find_routers(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Router, ...]:
    """The routers of `model`, seen in one forward pass without gradients.

    The model runs as it stands: in training mode it draws dropout and moves the statistics of BatchNorm.

    A router is a module that returns integer ids beside float weights of the same shape [..., K] and,
    with the same number of rows, logits or probabilities [..., E], E > K (or that has an attribute
    `num_experts`), and has no router inside. Every module of the same class is a router too.

    Args:
        model: the module to look into.
        args: what to call it with, and `kwargs`.

    Returns:
        One `(path, num_experts, top_k)` per router, in `named_modules` order.

    Raises:
        ValueError: no router was seen; the message lists what was looked at.
        TypeError: `model` is not a module.

    Example:
        >>> import torch, veofunc as vf
        >>> class Router(torch.nn.Linear):
        ...     def forward(self, x):
        ...         logits = super().forward(x)
        ...         weights, ids = logits.softmax(-1).topk(2)
        ...         return logits, weights, ids
        >>> vf.find_routers(torch.nn.Sequential(Router(8, 4)), torch.ones(3, 8))
        (Router(path='0', num_experts=4, top_k=2),)
    """
    search = Search(bare_module(model))
    with torch.no_grad(), module_hooks(search.modules, after=search.look):
        model(*args, **kwargs)
    return tuple(router for router, _ in search.result())


class Search:
    """Reads the choices that modules make during one call, and then says which modules are routers.

    Args:
        model: what runs in the call.
        named: the routers as (path, module), if they are known; else they are found by structure.
        indices: from what a named router returns to the ids.
    """

    def __init__(
        self,
        model: nn.Module,
        named: tuple[tuple[str, nn.Module], ...] | None = None,
        indices: Callable[[Any], Tensor] | None = None,
    ):
        self.model, self.named, self.indices = model, named, indices
        self.choices: dict[nn.Module, Choice] = {}
        self.looked_at: dict[str, str] = {}

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules whose outputs to look at."""
        if self.named is None:
            return tuple(self.model.modules())
        return tuple(module for _, module in self.named)

    def look(self, module: nn.Module, output: Any) -> Choice | None:
        """The choice that `module` made, if it is a router and nobody inside it made the same one.

        Raises:
            ValueError: a named router's output does not show the ids, or not among how many experts.
            TypeError: `indices` did not return integer ids.
        """
        if self.named is not None:
            choice = _read_named(module, output, self.indices)
        else:
            choice = _find_choice(module, output)
            if choice is None:
                self.looked_at.setdefault(type(module).__name__, _describe(output))
            if choice is None or self._passes_on(module, choice):
                return None
        self.choices[module] = replace(choice, weights=None)  # they may belong to a graph
        return choice

    def _passes_on(self, module: nn.Module, choice: Choice) -> bool:
        """Whether `module` returns what a router inside it, or a router of another class, has chosen."""
        inside = set(module.modules()) - {module}
        return any(
            router in inside or (_same(choice.ids, made.ids) and type(router) is not type(module))
            for router, made in self.choices.items()
        )

    def result(self) -> tuple[tuple[Router, nn.Module], ...]:
        """The routers in `named_modules` order, also those that the call did not run."""
        if not self.choices:
            raise ValueError(self._nothing_found())
        like = {type(module): choice for module, choice in self.choices.items()}
        routers = self.named or tuple(
            (path, module) for path, module in self.model.named_modules() if type(module) in like
        )
        found = []
        for path, module in routers:
            if module in self.choices:
                choice, num_experts = self.choices[module], self.choices[module].num_experts
            else:  # it did not run: what it says, or what its class, or else anyone, showed
                choice = like.get(type(module)) or next(iter(self.choices.values()))
                num_experts = _says_num_experts(module) or choice.num_experts
            found.append((Router(path, num_experts, choice.ids.shape[-1]), module))
        return tuple(found)

    def _nothing_found(self) -> str:
        if self.named is not None:
            paths = ", ".join(path for path, _ in self.named)
            return f"none of the routers {paths} ran in the call"
        seen = "\n".join(f"  {name} returned {what}" for name, what in self.looked_at.items())
        return (
            f"no router found in {type(self.model).__name__}: no module returned integer ids beside float "
            "weights of the same shape [..., K] and logits [..., E]. Name the routers with routers= (globs, "
            "or a predicate on path and module), and with indices= how to get the ids from what they "
            "return. If the model was compiled before it was wrapped, wrap first. Looked at:\n"
            f"{seen or '  no module: none ran in the call'}"
        )


def select_routers(
    model: nn.Module, routers: str | tuple[Any, ...] | Callable[[str, nn.Module], bool]
) -> tuple[tuple[str, nn.Module], ...]:
    """The modules that `routers` names: globs over whole paths, or a predicate on (path, module).

    Raises:
        ValueError: a glob, or the predicate, matches nothing.
        TypeError: `routers` is neither.
    """
    named = [(path, module) for path, module in model.named_modules() if path]
    if callable(routers):
        chosen = [(path, module) for path, module in named if routers(path, module)]
        if not chosen:
            raise ValueError(
                f"routers= is a predicate that holds for none of the modules {some_paths(model)}"
            )
        return tuple(chosen)
    globs = (routers,) if isinstance(routers, str) else routers
    sequence = isinstance(globs, tuple | list)
    if not sequence or not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"routers must be globs or a predicate on (path, module), got {routers!r}")
    for glob in globs:
        if not any(matches(path, glob) for path, _ in named):
            raise ValueError(f"glob {glob!r} in routers= matches none of the modules {some_paths(model)}")
    return tuple((p, module) for p, module in named if any(matches(p, glob) for glob in globs))


def known_routers(model: nn.Module, routers: Any) -> tuple[tuple[Router, nn.Module], ...] | None:
    """The modules of `routers`, if that is what `find_routers` returns; else None.

    Raises:
        ValueError: `model` has no module of such a path.
    """
    if not isinstance(routers, tuple | list) or not routers:
        return None
    if not all(isinstance(router, tuple) and len(router) == 3 for router in routers):
        return None
    modules = dict(model.named_modules())
    known = [Router(*router) for router in routers]
    missing = [router.path for router in known if router.path not in modules]
    if missing:
        raise ValueError(
            f"routers= names {', '.join(missing)}, the model has the modules {some_paths(model)}"
        )
    return tuple((router, modules[router.path]) for router in known)


def _find_choice(module: nn.Module, output: Any) -> Choice | None:
    """The choice in a router's output, or None if there is none to be seen."""
    tensors = list(_tensors(output))
    for ids in tensors:
        if ids.dtype not in INDEX_DTYPES or ids.dim() < 2:
            continue
        weights, num_experts = _weights(tensors, ids), _num_experts(module, tensors, ids)
        if weights is not None and num_experts is not None and 0 < ids.shape[-1] < num_experts:  # else a mask
            return Choice(ids, weights, num_experts)
    return None


def _read_named(module: nn.Module, output: Any, indices: Callable[[Any], Tensor] | None) -> Choice:
    """The choice in the output of a module that is known to be a router."""
    if indices is None:
        choice = _find_choice(module, output)
        if choice is None:
            raise ValueError(
                f"router {type(module).__name__} returned {_describe(output)}, where no expert ids can be "
                "seen: pass indices=, a function from that to ids [..., K]. If they are there, but no logits "
                "[..., E], give it an attribute num_experts"
            )
        return choice
    tensors, ids = list(_tensors(output)), _checked_ids(indices(output))
    num_experts = _num_experts(module, tensors, ids)
    if num_experts is None:
        raise ValueError(
            f"cannot see the number of experts of router {type(module).__name__}, which returned "
            f"{_describe(output)}: give it an attribute num_experts, or return its logits [..., E], too"
        )
    return Choice(ids, _weights(tensors, ids), num_experts)


def _checked_ids(ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype not in INDEX_DTYPES:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"indices= must return an int32 or int64 tensor of expert ids, got {kind}")
    if ids.dim() < 2 or ids.shape[-1] == 0:
        raise ValueError(f"indices= must return ids of shape [..., K], got {list(ids.shape)}")
    return ids


def _weights(tensors: list[Tensor], ids: Tensor) -> Tensor | None:
    """The float tensor of the shape of `ids`, if there is one."""
    return next((t for t in tensors if t.is_floating_point() and t.shape == ids.shape), None)


def _num_experts(module: nn.Module, tensors: list[Tensor], ids: Tensor) -> int | None:
    """The width of the logits beside `ids`; of several, the first, or the one that the module confirms.

    Without logits it is what the module says; and if that is K, then `ids` are no ids but a mask.
    """
    wider = [t for t in tensors if t.is_floating_point() and t.dim() >= 2 and t.shape[-1] > ids.shape[-1]]
    widths = [t.shape[-1] for t in wider if prod(t.shape[:-1]) == prod(ids.shape[:-1])]
    said = _says_num_experts(module)
    if said in widths or said == ids.shape[-1] or not widths:
        return said
    return widths[0]


def _says_num_experts(module: nn.Module) -> int | None:
    said = getattr(module, "num_experts", None)
    return said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are one tensor, or views of one."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():  # views know no base there
        return a.data_ptr() == b.data_ptr()
    return (a if a._base is None else a._base) is (b if b._base is None else b._base)


def _describe(output: Any) -> str:
    """Dtypes and shapes of what a module returned, in one line."""
    parts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(output)]
    return f"({', '.join(parts)})" if parts else type(output).__name__


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    else:
        for value in _parts(output):
            yield from _tensors(value)


def _parts(output: Any) -> Iterable[Any]:
    if isinstance(output, Mapping):
        return output.values()
    if is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in fields(output)]
    return output if isinstance(output, tuple | list) else ()
