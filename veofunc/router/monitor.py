"""`monitor_router`: which experts every mixture-of-experts layer chose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from veofunc.router.detect import Router, Search, known_routers, select_routers
from veofunc.transform import Transformed, find_model, merge_obs, module_hooks, observing

__all__ = ["monitor_router"]


def monitor_router(
    fn: Callable,
    *,
    model: nn.Module | None = None,
    routers: str | tuple[str, ...] | tuple[Router, ...] | Callable[[str, nn.Module], bool] | None = None,
    indices: Callable[[Any], Tensor] | None = None,
    has_aux: bool = False,
) -> Transformed:
    """`fn` as a function that returns `(out, obs)`, with the experts that each router chose in it.

    Routers are found by structure in the first call (see `find_routers`), or named by `routers`. A class of
    routers that does not run in the first call is not found, and what counts is what a router returns, not
    what somebody makes of it later: name the routers if that matters. Each choice of each token is counted
    once, however often activation checkpointing computes it: wrap the forward or the loss, not a step that
    runs backward.

    Args:
        fn: a module or any function that runs `model`.
        model: the module to look into. Found by itself if `fn` is a module or a wrapper around one.
        routers: globs over whole module paths (`"layers.*.router"`), a predicate on (path, module), or what
            `find_routers` returned: then `.routers` is known from the start.
        indices: from what a router returns to the expert ids, int [..., K]; needs `routers`.
        has_aux: `fn` returns `(out, aux)`.

    Returns:
        A function that returns `(out, obs)`, with `routers`: a tuple of `(path, num_experts, top_k)` in
        `named_modules` order, known after the first call. `obs["router"]` has, int64, L routers and E
        the largest number of experts:
        `tokens_per_expert` [L, E], slots with a weight other than 0, or whose weight cannot be seen;
        `zero_weight` [L, E], slots with weight 0, which are no load;
        `tokens` [L], tokens that came by;
        `dropped` [L], slots whose id names no expert (negative, or E and more).

    Raises:
        ValueError: no model, no such router, or (in the first call) no router found.
        TypeError: an option is of the wrong kind, or `indices` returns no integers.

    Laws: transparency, additivity, purity, order, recompute, ranks, threads; works under
    `torch.func.grad` and `vmap`, and under `torch.compile` if compiled after wrapping.

    Example:
        >>> import torch, veofunc as vf
        >>> class Router(torch.nn.Linear):
        ...     def forward(self, x):
        ...         logits = super().forward(x)
        ...         weights, ids = logits.softmax(-1).topk(2)
        ...         return logits, weights, ids
        >>> monitored = vf.monitor_router(torch.nn.Sequential(Router(8, 4)))
        >>> out, obs = monitored(torch.ones(3, 8))
        >>> int(obs["router", "tokens_per_expert"].sum()), obs["router", "tokens"]
        (6, tensor([3]))
        >>> monitored.routers
        (Router(path='0', num_experts=4, top_k=2),)

    Source: the routing monitor of VeOmni; counting with `scatter_add` after OLMo-core.
    """
    observed = observing(fn, has_aux)
    model = find_model(fn, model)
    if model is None:
        raise ValueError("monitor_router needs the module that fn runs: pass model=")
    _check_indices(indices, routers)
    found = known_routers(model, routers)
    named = select_routers(model, routers) if routers is not None and found is None else None

    @functools.partial(torch.compiler.disable, recursive=False)  # fn may be compiled, hooks may not
    def call(*args, **kwargs):
        nonlocal found
        search = Search(model, named if found is None else _modules(found), indices)
        counter = _Counter(search, found or ())
        with module_hooks(search.modules, after=counter.add):
            out, obs = observed(*args, **kwargs)
        if found is None:
            found = search.result()
        return out, merge_obs(obs, "router", counter.sums(found))

    def routers_found() -> tuple[Router, ...]:
        if found is None:
            raise AttributeError(
                "routers are known after the first call, or at once with "
                "routers=vf.find_routers(model, *args)"
            )
        return tuple(router for router, _ in found)

    exposes = {"routers": routers_found}
    return Transformed("monitor_router", fn, call, model=model, observes="router", exposes=exposes)


def _check_indices(indices: Any, routers: Any) -> None:
    if indices is not None and routers is None:
        raise ValueError("indices= says how to read a router's output; name the routers with routers=")
    if indices is not None and not callable(indices):
        raise TypeError(f"indices must be a function from what a router returns to ids, got {indices!r}")


class _Counter:
    """Counts the choices of one call, per router."""

    def __init__(self, search: Search, found: tuple[tuple[Router, nn.Module], ...]):
        self.search = search
        self.num_experts = {module: router.num_experts for router, module in found}
        self.slots: dict[nn.Module, Tensor] = {}  # [2, 1 + E]: (used, zero weight) x (none, experts)
        self.tokens: dict[nn.Module, Tensor] = {}  # []

    @torch.no_grad()
    def add(self, module: nn.Module, output: Any) -> None:
        choice = self.search.look(module, output)
        if choice is None:
            return
        num_experts = self.num_experts.setdefault(module, choice.num_experts)
        if choice.num_experts != num_experts:
            raise ValueError(
                f"router {type(module).__name__} chooses among {choice.num_experts} experts, not "
                f"{num_experts} as the first call let assume, in which it did not run: give it an attribute "
                "num_experts"
            )
        ids = choice.ids.detach().reshape(-1).long()  # [N * K]
        unused = torch.zeros_like(ids) if choice.weights is None else choice.weights.detach() == 0
        named = (ids >= 0) & (ids < num_experts)
        column = torch.where(named, ids + 1, 0)
        zeros = ids.new_zeros(2 * (1 + num_experts))
        slot = column + unused.reshape(-1) * (1 + num_experts)
        slots = zeros.scatter_add(0, slot, torch.ones_like(slot)).view(2, 1 + num_experts)
        tokens = ids.new_full((), choice.ids.numel() // choice.ids.shape[-1])
        for sums, counted in ((self.slots, slots), (self.tokens, tokens)):
            sums[module] = sums[module] + counted if module in sums else counted

    def sums(self, found: tuple[tuple[Router, nn.Module], ...]) -> TensorDict:
        width = max(router.num_experts for router, _ in found)
        like = next(iter(self.tokens.values()), torch.zeros((), dtype=torch.int64))
        none, never = like.new_zeros(2, 1), like.new_zeros(())
        slots = [self.slots.get(module, none) for _, module in found]
        per_layer = torch.stack([F.pad(s, (0, 1 + width - s.shape[-1])) for s in slots])  # [L, 2, 1 + E]
        return TensorDict(
            {
                "tokens_per_expert": per_layer[:, 0, 1:].clone(),
                "zero_weight": per_layer[:, 1, 1:].clone(),
                "tokens": torch.stack([self.tokens.get(module, never) for _, module in found]),
                "dropped": per_layer[:, :, 0].sum(-1),
            }
        )


def _modules(found: tuple[tuple[Router, nn.Module], ...]) -> tuple[tuple[str, nn.Module], ...]:
    return tuple((router.path, module) for router, module in found)
