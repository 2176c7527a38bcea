"""Finding routers by structure: `find_routers`, and what the first call of `monitor_router` learns.

A first look watches every module. Each choice that shows is one decision, though the router returns it, the
block around it returns it again, and experts are called with it. From each decision comes a rule: in which
class of modules, and where, such a choice stands. The rule then holds for every module of that class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veofunc.router.patterns import (
    ByIndices,
    Reading,
    Sighting,
    describe,
    equal_values,
    num_stacked,
    said_num_experts,
    seen_by,
    seen_in,
    seen_out,
)
from veofunc.transform import bare_module, matches, module_hooks, some_paths

__all__ = ["FirstLook", "Found", "Router", "find_routers", "known_routers", "select_routers"]


class Router(NamedTuple):
    """One mixture-of-experts router of a model."""

    path: str
    """as in `model.named_modules()`"""
    num_experts: int
    """experts it chooses from, E"""
    top_k: int
    """experts per token, K"""


@dataclass(frozen=True, eq=False)
class Found:
    """A router, and how to read its choices.

    Attributes:
        router: what users see of it.
        module: the module whose calls show the choices.
        reading: where they stand.
        logits: the router itself, and the reading that has its logits, if they show.
    """

    router: Router
    module: nn.Module
    reading: Reading | ByIndices
    logits: tuple[nn.Module, Reading | ByIndices]


def find_routers(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Router, ...]:
    """The routers of `model`, seen in one forward pass without gradients.

    The model runs as it stands: in training mode it draws dropout and moves the statistics of BatchNorm.

    A router is a module that shows which experts its tokens were given, in one of the ways that
    `veofunc.router.patterns` lists: most return ids, weights and logits. Where only the experts show it, by
    what they are called with, they are named instead. Every module of the same class is a router too.

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
    look = FirstLook(bare_module(model))
    with torch.no_grad(), look.watching():
        model(*args, **kwargs)
    return tuple(found.router for found in look.result())


class FirstLook:
    """Watches every module of `model` during one call, and then says which are routers.

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
        # What `torch.compile` puts around a module may have no hooks while it compiles.
        self.modules = {p: m for p, m in model.named_modules() if not hasattr(m, "_orig_mod")}
        self.paths = {module: path for path, module in self.modules.items()}
        self.sightings: list[Sighting] = []
        self.returned: dict[nn.Module, str] = {}  # what modules returned, in words

    def watching(self) -> AbstractContextManager[None]:
        if self.indices is not None and self.named is not None:
            return module_hooks([module for _, module in self.named], after=self._after)
        return module_hooks(self.paths, before=self._before, after=self._after)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module in self.paths:  # else a copy that was made in the call, hooks and all
            self.sightings += seen_in(module, self._owner(module), args, kwargs)

    def _after(self, module: nn.Module, output: Any) -> None:
        if module not in self.paths:
            return
        self.returned.setdefault(module, describe(output))
        if self.indices is None:
            self.sightings += seen_out(module, output)
        else:
            self.sightings.append(seen_by(self.indices, module, output))

    def result(self) -> tuple[Found, ...]:
        """The routers in `named_modules` order, also those that the call did not run.

        Raises:
            ValueError: there are none, or of a named one its choices or its number of experts do not show.
        """
        decisions = self._decisions()
        if self.named is None:
            known = [decision for decision in decisions if self._is_backed(decision)]
        else:
            known = [decision for _, module in self.named for decision in self._of_named(module, decisions)]
        if not known:
            raise ValueError(self._nothing_found())
        of_module = {decision.name.module: decision for decision in reversed(known)}
        of_kind = {self._kind(module): decision for module, decision in of_module.items()}
        routers = self.named or [(p, m) for p, m in self.modules.items() if self._kind(m) in of_kind]
        return tuple(
            self._found(path, module, of_module.get(module) or of_kind.get(self._kind(module), known[0]))
            for path, module in routers
        )

    def _of_named(self, module: nn.Module, decisions: list[_Decision]) -> Iterator[_Decision]:
        """The decision that `module` showed, whatever else did; nothing if it did not run."""
        for decision in decisions:
            if any(sighting.module is module for sighting in decision.sightings):
                decision = replace(decision, router=module)
                if decision.num_experts is None:
                    raise ValueError(
                        f"cannot see the number of experts of router {type(module).__name__}, which returned "
                        f"{self.returned.get(module, 'nothing')}: give it an attribute num_experts, or "
                        "return its logits [..., E], too"
                    )
                yield decision
                return
        if module in self.returned:
            raise ValueError(
                f"router {self.paths[module]} ({type(module).__name__}) returned {self.returned[module]}, "
                "where no expert ids can be seen: pass indices=, a function from that to ids [..., K]. If "
                "they are there, but no logits [..., E], give it an attribute num_experts"
            )

    def _is_backed(self, decision: _Decision) -> bool:
        """Whether it is a choice among experts: of as many as a parameter is wide, or as the module says.

        Ids are, unless they may be of tokens, as in attention.
        """
        module, number, choice = decision.name.module, decision.num_experts, decision.name.choice
        owner = self._owner(module)
        if number is None or said_num_experts(module) or said_num_experts(owner):
            return number is not None
        if choice.kind == "ids" and number != choice.num_tokens:
            return True
        owned = [] if owner is None else owner.parameters(recurse=owner is not self.model)
        return any(number in p.shape for p in itertools.chain(module.parameters(), owned) if p.dim() > 1)

    def _decisions(self) -> list[_Decision]:
        """What was seen, each choice once."""
        decisions: list[_Decision] = []
        for sighting in self.sightings:
            newest_first = [*reversed(decisions)]
            for belongs in (self._is_of_module, self._is_passed_on, self._is_used_beside):
                those = [decision for decision in newest_first if belongs(sighting, decision)]
                of = those[0] if those else None
                if len(those) > 1 and belongs == self._is_used_beside:
                    of = next((d for d in those if equal_values(d.name.choice, sighting.choice)), of)
                if of is not None:
                    of.sightings.append(sighting)
                    break
            else:
                decisions.append(_Decision([sighting]))
        return decisions

    def _is_of_module(self, sighting: Sighting, decision: _Decision) -> bool:
        """Whether the same module showed `decision` in the same place: it was called again."""
        return any(
            seen.module is sighting.module and seen.reading == sighting.reading for seen in decision.sightings
        )

    def _is_passed_on(self, sighting: Sighting, decision: _Decision) -> bool:
        """Whether `sighting` shows the very tensor, or is the output of a module around that showed it."""
        around = set(sighting.module.modules()) - {sighting.module}
        of_outputs = not sighting.reading.is_input
        for seen in decision.sightings:
            alike = of_outputs and type(seen.module) is type(sighting.module)  # routers may share their ids
            if _same(sighting.shown, seen.shown) and not alike:
                return True
            if of_outputs and seen.module in around:
                return True
        return False

    def _is_used_beside(self, sighting: Sighting, decision: _Decision) -> bool:
        """Whether experts are called with it whose router, beside them, showed `decision`."""
        owner = self._owner(sighting.module)
        routers = [seen.module for seen in decision.sightings if not seen.reading.is_input]
        return sighting.reading.is_input and any(self._owner(router) is owner for router in routers)

    def _found(self, path: str, module: nn.Module, decision: _Decision) -> Found:
        """How to read the choices of `module`: as `decision` showed, for which it or one of its kind ran."""
        name, reader = decision.name, decision.reader
        num_experts, top_k = decision.num_experts, decision.name.top_k
        assert num_experts is not None, "others were left out"
        if module is not name.module:  # it did not run: what it says, or what its kind showed
            num_experts = said_num_experts(module) or num_experts
        shown_at, reading = module, name.reading
        if reader.module is not name.module:
            # Experts that stand beside this router as those of `decision` stand beside theirs.
            beside = self.modules.get(f"{path.rpartition('.')[0]}.{self._leaf(reader.module)}".lstrip("."))
            if beside is not None and type(beside) is type(reader.module):
                shown_at, reading = beside, reader.reading
        router = Router(path, num_experts, top_k)
        return Found(router, shown_at, reading, (module, name.reading))

    def _kind(self, module: nn.Module) -> Any:
        """Modules of one kind show their choices in one way. PyTorch's own classes say nothing of that."""
        if type(module).__module__.startswith("torch.nn."):
            return type(self._owner(module)), self._leaf(module)
        return type(module)

    def _leaf(self, module: nn.Module) -> str:
        return self.paths[module].rpartition(".")[2]

    def _owner(self, module: nn.Module) -> nn.Module | None:
        path = self.paths[module]
        while path:
            path = path.rpartition(".")[0]
            if path in self.modules:
                return self.modules[path]
        return None

    def _nothing_found(self) -> str:
        if self.named is not None:
            paths = ", ".join(path for path, _ in self.named)
            return f"none of the routers {paths} ran in the call"
        returned = {type(module).__name__: what for module, what in reversed(self.returned.items())}
        seen = "\n".join(f"  {name} returned {what}" for name, what in reversed(returned.items()))
        return (
            f"no router found in {type(self.model).__name__}: no module returned, or was called with, "
            "integer ids beside float weights of the same shape [..., K], and none returned a mask, scores "
            "or sizes of experts. Name the routers with routers= (globs, or a predicate on path and module), "
            "and with indices= how to get the ids from what they return. If the model was compiled before it "
            f"was wrapped, wrap first. Looked at:\n{seen or '  no module: none ran in the call'}"
        )


@dataclass
class _Decision:
    """One choice, and everything that showed it. The user may name one of these as the router."""

    sightings: list[Sighting]
    router: nn.Module | None = None

    @property
    def name(self) -> Sighting:
        """The router: what the user named, or else the first that returned it, or else the experts."""
        if self.router is not None:
            return next(sighting for sighting in self.sightings if sighting.module is self.router)
        return self._first

    @property
    def _first(self) -> Sighting:
        return next((s for s in self.sightings if not s.reading.is_input), self.sightings[0])

    @property
    def reader(self) -> Sighting:
        """What the experts are called with, if with all of it: what counts is what they do."""
        if self.name is not self._first:
            return self.name
        used = (s for s in self.sightings if s.reading.is_input and s.choice.weights is not None)
        of = (self.name.choice.num_tokens, self.name.top_k)
        return next((s for s in used if (s.choice.num_tokens, s.top_k) == of), self.name)

    @property
    def num_experts(self) -> int | None:
        said = (s.num_experts for s in (self.name, *self.sightings))
        stacked = (num_stacked(s.module) for s in self.sightings if s.reading.is_input)
        return next((number for number in itertools.chain(said, stacked) if number is not None), None)


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


def known_routers(model: nn.Module, routers: Any) -> tuple[tuple[str, nn.Module], ...] | None:
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
    return tuple((router.path, modules[router.path]) for router in known)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are one tensor, or views of one."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():  # views know no base there
        return a.data_ptr() == b.data_ptr()
    return (a if a._base is None else a._base) is (b if b._base is None else b._base)
