"""`monitor_router`: which experts every mixture-of-experts layer chose."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from veofunc.compiling import as_written, compiled_modules
from veofunc.router.counter import EXTRAS, OF_LOGITS, Counter, Tokens
from veofunc.router.detect import FirstLook, Found, Router, known_routers, select_routers
from veofunc.router.patterns import are_probabilities
from veofunc.transform import Transformed, find_model, has_parameter, merge_obs, observing

__all__ = ["monitor_router"]

OfTokens = str | Callable[..., Tensor] | None


def monitor_router(
    fn: Callable,
    *,
    model: nn.Module | None = None,
    routers: str | tuple[str, ...] | tuple[Router, ...] | Callable[[str, nn.Module], bool] | None = None,
    indices: Callable[[Any], Tensor] | None = None,
    mask: str | Callable[..., Tensor] | None = None,
    by_channel: str | Callable[..., Tensor] | None = None,
    channels: int | Sequence[str] = 64,
    extras: Sequence[str] = (),
    has_aux: bool = False,
) -> Transformed:
    """`fn` as a function that returns `(out, obs)`, with the experts that each router chose in it.

    Routers are found by structure in the first call (see `find_routers`), or named by `routers`. What counts
    is what experts are called with, where that shows, else what the router returns. Each choice of each token
    is counted once, however often activation checkpointing computes it: wrap the forward or the loss, not a
    step that runs backward.

    Args:
        fn: a module or any function that runs `model`.
        model: the module to look into. Found by itself if `fn` is a module or a wrapper around one.
        routers: globs over whole module paths (`"layers.*.router"`), a predicate on (path, module), or what
            `find_routers` returned: then `.routers` is known from the start.
        indices: from what a router returns to the expert ids, int [..., K]; needs `routers`.
        mask: which tokens count, 0 or False on padding: the name of an argument, or of an entry of a mapping
            among the arguments, or a function of the arguments; one for each token that a router sees.
        by_channel: the channel of each token, int, in the same way; one per token, [B, T], or one per row,
            [B], beside tokens or labels [B, T]. Tokens of no channel are in no sum of one.
        channels: C, names, or `Channels`: how many there are.
        extras: more sums: `"probabilities"`, `"entropy"` and `"z"` of the router's logits,
            `"coactivation"`, `"batch_max_vio"`.
        has_aux: `fn` returns `(out, aux)`.

    Returns:
        A function that returns `(out, obs)`, with `routers`: a tuple of `(path, num_experts, top_k)` in
        `named_modules` order, known after the first call. `obs["router"]` has, int64, L routers and E
        the largest number of experts:
        `tokens_per_expert` [L, E], slots with a weight other than 0, or whose weight cannot be seen;
        `zero_weight` [L, E], slots with weight 0, which are no load;
        `tokens` [L], tokens that came by;
        `dropped` [L], slots whose id names no expert (negative, or E and more), or that found no room.
        With `mask` or `by_channel`, `unattributed_tokens` [L]: tokens of a router that saw another number of
        them, counted here alone. With `by_channel`, `tokens_per_expert_by_channel` [C, L, E].
        Extras: `probability_sum` [L, E] and `entropy_sum` [L] (nats) of the softmax of the logits,
        `z_sum` [L] of their squared log-partition, float32; `coactivation` [L, E, E], tokens that chose both;
        `batch_max_vio_sum` [L], the max violation of each call in which the layer had tokens, and `batches`
        [L], their number.

    Raises:
        ValueError: no model, no such router, or (in the first call) no router found; logits that are asked
            for do not show, or `"z"` is asked for and they are probabilities.
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
    _check_options(indices, routers, mask, by_channel, extras)
    num_channels = 0 if by_channel is None else _num_channels(channels)
    foreign = [key for key in {mask, by_channel} if isinstance(key, str) and not has_parameter(fn, key)]
    known = known_routers(model, routers)
    named = known if known is not None or routers is None else select_routers(model, routers)
    found: tuple[Found, ...] = ()
    probabilities: list[bool] = []

    @torch.compiler.disable  # compiled code would be made anew for it, module by module
    def first_call(look: FirstLook, args: tuple, kwargs: dict) -> tuple[Any, TensorDictBase]:
        with as_written(), look.watching():
            return observed(*args, **kwargs)

    @functools.partial(torch.compiler.disable, recursive=False)  # fn may be compiled, hooks may not
    def call(*args, **kwargs):
        nonlocal found, probabilities
        tokens = _tokens(args, kwargs, mask, by_channel, num_channels)
        kwargs = {key: value for key, value in kwargs.items() if key not in foreign}
        if found:
            counter = Counter(found, tokens, extras, probabilities)
            with counter.counting():
                out, obs = observed(*args, **kwargs)
            if counter.is_empty and compiled_modules(fn, model):
                warnings.warn(
                    "monitor_router saw no router in this call. If they ran, then in code that was compiled "
                    "in a call outside of it, where nobody watched: call torch.compiler.reset(), and the "
                    "wrapped function only, or compile what monitor_router returns",
                    stacklevel=2,
                )
        else:
            look = FirstLook(model, named, indices)
            out, obs = first_call(look, args, kwargs)
            seen = look.result()
            if known is not None:
                seen = tuple(replace(each, router=r) for each, r in zip(seen, routers_found(), strict=True))
            probabilities = _kinds_of_logits(look, seen, extras)
            counter = Counter(seen, tokens, extras, probabilities)
            counter.count(look.sightings)
            counter.check_tokens()
            found = seen
        return out, merge_obs(obs, "router", counter.sums())

    def routers_found() -> tuple[Router, ...]:
        if known is not None:
            return tuple(Router(*router) for router in cast(Iterable, routers))
        if not found:
            raise AttributeError(
                "routers are known after the first call, or at once with "
                "routers=vf.find_routers(model, *args)"
            )
        return tuple(each.router for each in found)

    return Transformed(
        "monitor_router",
        fn,
        call,
        model=model,
        observes="router",
        takes=[key for key in (mask, by_channel) if isinstance(key, str)],
        exposes={"routers": routers_found},
    )


def _kinds_of_logits(look: FirstLook, seen: Sequence[Found], extras: Sequence[str]) -> list[bool]:
    """Of each router, whether its logits are probabilities; nothing if no extra needs logits."""
    if not set(extras) & set(OF_LOGITS):
        return []
    kinds: dict[Any, bool] = {}
    for found in seen:
        shown = [
            sighting.choice.logits
            for sighting in look.sightings
            if (sighting.module, sighting.reading) == found.logits and sighting.choice.logits is not None
        ]
        if shown:
            kinds[found.logits[1]] = are_probabilities(shown[0])
    for found in seen:
        if found.logits[1] not in kinds:
            raise ValueError(
                f"extras {', '.join(set(extras) & set(OF_LOGITS))} need logits, router {found.router.path} "
                "returns none"
            )
        if "z" in extras and kinds[found.logits[1]]:
            raise ValueError(
                f"extras 'z' needs logits, router {found.router.path} returns probabilities, as rows sum to 1"
            )
    return [kinds[found.logits[1]] for found in seen]


def _tokens(args: tuple, kwargs: dict, mask: OfTokens, by_channel: OfTokens, num_channels: int) -> Tokens:
    """What the arguments of a call say of its tokens."""
    counted = _read("mask", mask, args, kwargs)
    if counted is not None and counted.is_floating_point():
        raise TypeError(
            f"mask must give a bool or integer tensor, got {counted.dtype}: of one that is added to scores, "
            "pass where it is 0"
        )
    channel = _read("by_channel", by_channel, args, kwargs)
    if channel is not None:
        if channel.is_floating_point() or channel.dtype == torch.bool:
            raise TypeError(f"by_channel must give an integer tensor, got {channel.dtype}")
        channel = _per_token(channel, args, kwargs).reshape(-1).long()
        channel = torch.where((channel >= 0) & (channel < num_channels), channel, num_channels)
    return Tokens(None if counted is None else counted.reshape(-1) != 0, channel, num_channels)


def _read(option: str, of_tokens: OfTokens, args: tuple, kwargs: dict) -> Tensor | None:
    if of_tokens is None:
        return None
    if callable(of_tokens):
        values = of_tokens(*args, **kwargs)
    else:
        holders = [holder for holder in _mappings(args, kwargs) if of_tokens in holder.keys()]
        if len(holders) != 1:
            raise ValueError(
                f"{option}={of_tokens!r} must name an argument, or an entry of one mapping among the "
                f"arguments, found {len(holders)}"
            )
        values = holders[0][of_tokens]
    if not isinstance(values, Tensor):
        raise TypeError(f"{option} must give a tensor, got {type(values).__name__}")
    return values


def _per_token(channel: Tensor, args: tuple, kwargs: dict) -> Tensor:
    """`channel` for each token, from one for each row beside integers [B, T], as tokens and labels are."""
    if channel.dim() == 1:
        for holder in (*_mappings(args, kwargs), dict(enumerate(args))):
            for value in holder.values():
                is_tokens = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
                if is_tokens and len(value) == len(channel):
                    return channel[:, None].expand(value.shape)
    return channel


def _mappings(args: tuple, kwargs: dict) -> list:
    arguments = (*args, *kwargs.values(), kwargs)
    return [value for value in arguments if isinstance(value, TensorDictBase | Mapping)]


def _num_channels(channels: Any) -> int:
    number = getattr(channels, "capacity", None) or (channels if isinstance(channels, int) else len(channels))
    if isinstance(channels, bool | str) or number < 1:
        raise ValueError(f"channels must be names or a number of at least 1, got {channels!r}")
    return number


def _check_options(indices: Any, routers: Any, mask: Any, by_channel: Any, extras: Any) -> None:
    if indices is not None and routers is None:
        raise ValueError("indices= says how to read a router's output; name the routers with routers=")
    if indices is not None and not callable(indices):
        raise TypeError(f"indices must be a function from what a router returns to ids, got {indices!r}")
    for option, value in (("mask", mask), ("by_channel", by_channel)):
        if value is not None and not isinstance(value, str) and not callable(value):
            raise TypeError(f"{option} must be a name or a function of the arguments, got {value!r}")
    if isinstance(extras, str) or not set(extras) <= set(EXTRAS):
        raise ValueError(f"extras must be some of {EXTRAS}, got {extras!r}")
