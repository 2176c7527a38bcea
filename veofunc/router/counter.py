"""The sums of one call: which experts its tokens were given. Static shapes, and nobody waits for a device."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from veofunc.levels import is_functorch_wrapped_tensor
from veofunc.router.detect import Found
from veofunc.router.patterns import Choice, Sighting, rows
from veofunc.transform import module_hooks

__all__ = ["EXTRAS", "OF_LOGITS", "Counter", "Tokens"]

OF_LOGITS = ("probabilities", "entropy", "z")
PACK = 1 << 26
EXTRAS = (*OF_LOGITS, "coactivation", "batch_max_vio")


@dataclass(frozen=True)
class Tokens:
    """What the user says of the tokens of a call, each flat with one value for each token, or None.

    Attributes:
        mask: bool; whether it counts.
        channel: int64; its channel, C for none.
        num_channels: C.
    """

    mask: Tensor | None = None
    channel: Tensor | None = None
    num_channels: int = 0

    @property
    def given(self) -> bool:
        return self.mask is not None or self.channel is not None

    def fits(self, num_tokens: int) -> bool:
        """Whether they are about so many tokens."""
        return all(x is None or x.numel() == num_tokens for x in (self.mask, self.channel))


class Counter:
    """Adds up what `found` chose in one call."""

    def __init__(
        self,
        found: Sequence[Found],
        tokens: Tokens,
        extras: Sequence[str] = (),
        probabilities: Sequence[bool] = (),
    ):
        self.tokens, self.extras = tokens, extras
        kinds = probabilities or [None] * len(found)
        self.layers = [_Layer(each, tokens, extras, kind) for each, kind in zip(found, kinds, strict=True)]

    @property
    def is_empty(self) -> bool:
        """Whether no router was seen."""
        return not any(layer.sums for layer in self.layers)

    @contextlib.contextmanager
    def counting(self) -> Generator[None]:
        """Counts what the routers choose while it lasts."""
        with contextlib.ExitStack() as stack:
            # Each has hooks of its own that look alike, so that compiled blocks can share their code.
            for layer in self.layers:
                found = layer.found
                if found.reading.is_input:
                    stack.enter_context(module_hooks([found.module], before=layer.before))
                else:
                    stack.enter_context(module_hooks([found.module], after=layer.after))
                if layer.are_probabilities is not None:
                    stack.enter_context(module_hooks([found.logits[0]], after=layer.after_logits))
            yield

    def count(self, sightings: Iterable[Sighting]) -> None:
        """Counts what a first look saw."""
        for layer in self.layers:
            for sighting in sightings:
                if sighting.module is layer.found.module and sighting.reading == layer.found.reading:
                    layer.add(sighting.choice)
                shows_logits = (sighting.module, sighting.reading) == layer.found.logits
                if layer.are_probabilities is not None and shows_logits:
                    layer.add_logits(sighting.choice)

    def check_tokens(self) -> None:
        """Refuses a mask or channels that are about another number of tokens than all routers saw."""
        if self.is_empty or any("tokens" in layer.sums for layer in self.layers):
            return
        sizes = {"mask": self.tokens.mask, "by_channel": self.tokens.channel}
        given = ", ".join(f"{name} {x.numel()}" for name, x in sizes.items() if x is not None)
        saw = ", ".join(f"{layer.found.router.path} {layer.num_unfit}" for layer in self.layers if layer.sums)
        raise ValueError(
            f"mask and by_channel must have one value for each token that a router sees, got {given} values, "
            f"and no router saw so many tokens: {saw}"
        )

    def sums(self) -> TensorDict:
        """`obs["router"]`."""
        width = max(layer.found.router.num_experts for layer in self.layers)
        like = next((value for layer in self.layers for value in layer.sums.values()), torch.zeros(()))
        sums = {
            "tokens_per_expert": self._stacked("load", (width,), like),
            "zero_weight": self._stacked("zero_weight", (width,), like),
            "tokens": self._stacked("tokens", (), like),
            "dropped": self._stacked("dropped", (), like),
        }
        if self.tokens.given:
            sums["unattributed_tokens"] = self._stacked("unattributed_tokens", (), like)
        if self.tokens.num_channels:
            shape = self.tokens.num_channels, width
            by_channel = self._stacked("by_channel", shape, like)  # [L, C, E]
            sums["tokens_per_expert_by_channel"] = by_channel.movedim(1, 0).clone()
        return TensorDict(sums | self._extras(width, like, sums["tokens_per_expert"]))

    def _extras(self, width: int, like: Tensor, load: Tensor) -> dict[str, Tensor]:
        shapes = {
            "probabilities": ("probability_sum", (width,)),
            "entropy": ("entropy_sum", ()),
            "z": ("z_sum", ()),
        }
        sums = {
            name: self._stacked(name, shape, like, torch.float32)
            for extra, (name, shape) in shapes.items()
            if extra in self.extras
        }
        if "coactivation" in self.extras:
            sums["coactivation"] = self._stacked("coactivation", (width, width), like)
        if "batch_max_vio" in self.extras:
            num_experts = [layer.found.router.num_experts for layer in self.layers]
            total = load.sum(-1)
            mean = total.clamp(min=1) / torch.tensor(num_experts, device=load.device)
            seen = total > 0
            sums["batch_max_vio_sum"] = torch.where(seen, load.amax(-1) / mean - 1, 0)
            sums["batches"] = seen.long()
        return sums

    def _stacked(self, name: str, shape: tuple[int, ...], like: Tensor, dtype=torch.int64) -> Tensor:
        """That sum of all layers, [L, *shape]: those with fewer experts are filled up."""
        zeros = like.new_zeros(shape, dtype=dtype)
        return torch.stack([_filled(layer.sums.get(name, zeros), shape) for layer in self.layers])


class _Layer:
    """The sums of one router in one call.

    Attributes:
        found: the router.
        are_probabilities: whether its logits are; None if nobody asks for them.
        sums: by name.
        num_unfit: the tokens of a call that are not as many as `tokens` is about.
    """

    def __init__(self, found: Found, tokens: Tokens, extras: Sequence[str], are_probabilities: bool | None):
        self.found, self.tokens, self.extras = found, tokens, extras
        self.are_probabilities = are_probabilities
        self.sums: dict[str, Tensor] = {}
        self.num_unfit = 0

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._is_meant(module, self.found.module):
            self.add(self.found.reading.choice((args, kwargs)))

    def after(self, module: nn.Module, output: Any) -> None:
        if self._is_meant(module, self.found.module):
            self.add(self.found.reading.choice(output))

    def after_logits(self, module: nn.Module, output: Any) -> None:
        if self._is_meant(module, self.found.logits[0]):
            self.add_logits(self.found.logits[1].choice(output))

    def _is_meant(self, module: nn.Module, mine: nn.Module) -> bool:
        """Whether it is no copy that was made in the call, hooks and all. Compiled code cannot ask."""
        return torch.compiler.is_compiling() or module is mine

    @torch.no_grad()
    def add(self, choice: Choice | None) -> None:
        """A choice of the router."""
        if choice is None:
            raise ValueError(
                f"router {self.found.router.path} shows its choice elsewhere than in the first call: "
                "call it, or its experts, in one way, or say with routers= and indices= where to look"
            )
        num_tokens = choice.values.new_full((), choice.num_tokens, dtype=torch.int64)
        if not self.tokens.fits(choice.num_tokens) or (choice.kind == "sizes" and self.tokens.given):
            self._sum(unattributed_tokens=num_tokens)
            self.num_unfit = choice.num_tokens
            return
        mask = self.tokens.mask
        self._sum(tokens=num_tokens if mask is None else mask.sum())
        count = {"ids": self._count_ids, "sizes": self._count_sizes}.get(choice.kind, self._count_chosen)
        count(choice, self.found.router.num_experts)

    @torch.no_grad()
    def add_logits(self, choice: Choice | None) -> None:
        """The logits beside a choice of the router, [..., E]."""
        logits = None if choice is None else choice.logits
        if logits is None or not self.tokens.fits(rows(logits)):
            return
        logits = logits.reshape(-1, logits.shape[-1]).float()  # [N, E]
        only_z = not {"probabilities", "entropy"} & {*self.extras}
        probabilities = logits if self.are_probabilities or only_z else logits.softmax(-1)
        per_token = {
            "probabilities": lambda: probabilities,
            "entropy": lambda: torch.special.entr(probabilities).sum(-1),
            "z": lambda: logits.logsumexp(-1).square(),
        }
        names = {"probabilities": "probability_sum", "entropy": "entropy_sum", "z": "z_sum"}
        for extra in set(self.extras) & set(per_token):
            values, mask = per_token[extra](), self.tokens.mask
            if mask is not None:
                values = torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, 0)
            self._sum(**{names[extra]: values.sum(0)})

    def _count_ids(self, choice: Choice, num_experts: int) -> None:
        if choice.logits is not None:
            self._check_width(choice.logits.shape[-1], num_experts)
        ids = choice.values.reshape(-1, choice.values.shape[-1]).long()  # [N, K]
        weights = None if choice.weights is None else choice.weights.reshape(ids.shape)
        column = ids.clamp(-1, num_experts).add_(1)  # the first and the last are for ids that name no expert
        width = num_experts + 2
        used, unused = _both(column, weights, self.tokens.mask, width)
        dropped = used[0] + used[-1] + unused[0] + unused[-1]
        self._sum(load=used[1:-1], zero_weight=unused[1:-1], dropped=dropped)
        if self.tokens.channel is None and "coactivation" not in self.extras:
            return
        load = column if weights is None else torch.where(weights == 0, 0, column)
        mask = self.tokens.mask
        ones = torch.ones_like(load) if mask is None else mask[:, None].expand(ids.shape).long()
        if self.tokens.channel is not None:
            slot = load + self.tokens.channel[:, None] * width
            by_channel = _scattered(slot, ones, (self.tokens.num_channels + 1) * width)
            self._sum(by_channel=by_channel.view(-1, width)[:-1, 1:-1])
        if "coactivation" in self.extras:
            pairs = load[:, :, None] * width + load[:, None, :]  # [N, K, K]
            together = _scattered(pairs, ones[:, :, None].expand(pairs.shape), width * width)
            self._sum(coactivation=together.view(width, width)[1:-1, 1:-1])

    def _count_chosen(self, choice: Choice, num_experts: int) -> None:
        """Of a mask, or of scores that are 0 where an expert is not chosen."""
        self._check_width(choice.values.shape[-1], num_experts)
        chosen = choice.values.reshape(-1, num_experts) != 0  # [N, E]
        if self.tokens.mask is not None:
            chosen = chosen & self.tokens.mask[:, None]
        load = chosen.sum(0)
        self._sum(load=load)
        if choice.kind == "mask" and self.found.router.top_k == 1:  # rows without a 1 found no room
            counted = choice.num_tokens if self.tokens.mask is None else self.tokens.mask.sum()
            self._sum(dropped=counted - load.sum())
        if self.tokens.channel is not None:
            zeros = load.new_zeros(self.tokens.num_channels + 1, num_experts)
            self._sum(by_channel=zeros.index_add(0, self.tokens.channel, chosen.long())[:-1])
        if "coactivation" in self.extras:
            self._sum(coactivation=(chosen.double().mT @ chosen.double()).long())

    def _count_sizes(self, choice: Choice, num_experts: int) -> None:
        self._check_width(len(choice.values), num_experts)
        if "coactivation" in self.extras:
            raise ValueError(
                f"coactivation needs the experts of each token, router {self.found.router.path} shows "
                "only how many tokens each expert got"
            )
        device = choice.values.device if choice.logits is None else choice.logits.device
        self._sum(load=choice.values.long().to(device))

    def _check_width(self, width: int, num_experts: int) -> None:
        if width != num_experts:
            raise ValueError(
                f"router {self.found.router.path} chooses among {width} experts, not {num_experts} as "
                "the first call let assume, in which it did not run: give it an attribute num_experts"
            )

    def _sum(self, **values: Tensor) -> None:
        for name, value in values.items():
            if torch.compiler.is_compiling():  # hooks cannot ask then whether it is computed again
                value = torch.where(_is_forward(torch.zeros((), device=value.device)), value, 0)
            self.sums[name] = self.sums[name] + value if name in self.sums else value


@torch.library.custom_op("veofunc::is_forward", mutates_args=())
def _is_forward(like: Tensor) -> Tensor:
    """Whether no backward pass runs in this thread, on the device of `like`."""
    return torch.full((), torch._C._current_graph_task_id() == -1, dtype=torch.bool, device=like.device)


@_is_forward.register_fake
def _(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.bool)


def _both(column: Tensor, weights: Tensor | None, mask: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """How many slots with and without weight are in each column, [width] each, int64.

    Where there is float64 one pass counts both, in its high and low bits, which hold `PACK` slots exactly.
    """
    if weights is None or column.numel() >= PACK or column.device.type == "mps" or _is_transformed(weights):
        unused = torch.zeros_like(column) if weights is None else (weights == 0).long()
        counted = torch.ones_like(column) if mask is None else mask[:, None].expand(column.shape).long()
        none = _scattered(column, unused * counted, width)
        return _scattered(column, counted, width) - none, none
    packed = weights.to(torch.float64, copy=True).eq_(0).mul_(PACK - 1).add_(1)
    if mask is not None:
        packed = packed * mask[:, None]
    both = packed.new_zeros(width).scatter_add(0, column.reshape(-1), packed.reshape(-1)).long()
    return both % PACK, both // PACK


def _is_transformed(weights: Tensor) -> bool:
    """Whether a compiler or a transform of `torch.func` is at work, which has its own ways with memory."""
    return torch.compiler.is_compiling() or is_functorch_wrapped_tensor(weights)


def _scattered(slot: Tensor, ones: Tensor, num_slots: int) -> Tensor:
    return slot.new_zeros(num_slots).scatter_add(0, slot.reshape(-1), ones.reshape(-1))


def _filled(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    missing = [want - have for want, have in zip(shape, values.shape, strict=True)]
    return F.pad(values, [x for n in reversed(missing) for x in (0, n)]) if any(missing) else values
