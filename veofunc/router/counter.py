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
        self.found, self.tokens, self.extras, self.probabilities = found, tokens, extras, probabilities
        self.layers: list[dict[str, Tensor]] = [{} for _ in found]
        self.seen: list[str] = []  # routers and the numbers of tokens that they saw, where these do not fit
        self.inputs = {each.module: i for i, each in enumerate(found) if each.reading.is_input}
        self.outputs = {each.module: i for i, each in enumerate(found) if not each.reading.is_input}
        self.logits = {each.logits[0]: i for i, each in enumerate(found) if probabilities}

    @contextlib.contextmanager
    def counting(self) -> Generator[None]:
        """Counts what the routers choose while it lasts."""
        with (
            module_hooks(self.inputs, before=self._before),
            module_hooks({**self.outputs, **self.logits}, after=self._after),
        ):
            yield

    def count(self, sightings: Iterable[Sighting]) -> None:
        """Counts what a first look saw."""
        for layer, found in enumerate(self.found):
            for sighting in sightings:
                if sighting.module is found.module and sighting.reading == found.reading:
                    self.add(layer, sighting.choice)
                if self.probabilities and (sighting.module, sighting.reading) == found.logits:
                    self.add_logits(layer, sighting.choice)

    def check_tokens(self) -> None:
        """Refuses a mask or channels that are about another number of tokens than all routers saw."""
        if any("tokens" in sums for sums in self.layers) or not any(self.layers):
            return
        sizes = {"mask": self.tokens.mask, "by_channel": self.tokens.channel}
        given = ", ".join(f"{name} {x.numel()}" for name, x in sizes.items() if x is not None)
        raise ValueError(
            f"mask and by_channel must have one value for each token that a router sees, got {given} values, "
            f"and no router saw so many tokens: {', '.join(self.seen)}"
        )

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        layer = self.inputs.get(module)
        if layer is not None:  # else a copy that was made in the call, hooks and all
            self.add(layer, self.found[layer].reading.choice((args, kwargs)))

    def _after(self, module: nn.Module, output: Any) -> None:
        layer = self.outputs.get(module)
        if layer is not None:
            self.add(layer, self.found[layer].reading.choice(output))
        layer = self.logits.get(module)
        if layer is not None:
            self.add_logits(layer, self.found[layer].logits[1].choice(output))

    @torch.no_grad()
    def add(self, layer: int, choice: Choice | None) -> None:
        """A choice of `found[layer]`."""
        if choice is None:
            raise ValueError(
                f"router {self.found[layer].router.path} shows its choice elsewhere than in the first call: "
                "call it, or its experts, in one way, or say with routers= and indices= where to look"
            )
        num_tokens = choice.values.new_full((), choice.num_tokens, dtype=torch.int64)
        if not self.tokens.fits(choice.num_tokens) or (choice.kind == "sizes" and self.tokens.given):
            self._sum(layer, unattributed_tokens=num_tokens)
            self.seen.append(f"{self.found[layer].router.path} {choice.num_tokens}")
            return
        mask = self.tokens.mask
        self._sum(layer, tokens=num_tokens if mask is None else mask.sum())
        count = {"ids": self._count_ids, "sizes": self._count_sizes}.get(choice.kind, self._count_chosen)
        count(layer, choice, self.found[layer].router.num_experts)

    @torch.no_grad()
    def add_logits(self, layer: int, choice: Choice | None) -> None:
        """The logits beside a choice of `found[layer]`, [..., E]."""
        logits = None if choice is None else choice.logits
        if logits is None or not self.tokens.fits(rows(logits)):
            return
        logits = logits.reshape(-1, logits.shape[-1]).float()  # [N, E]
        probabilities = logits if self.probabilities[layer] or self.extras == ("z",) else logits.softmax(-1)
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
            self._sum(layer, **{names[extra]: values.sum(0)})

    def _count_ids(self, layer: int, choice: Choice, num_experts: int) -> None:
        if choice.logits is not None:
            self._check_width(layer, choice.logits.shape[-1], num_experts)
        ids = choice.values.reshape(-1, choice.values.shape[-1]).long()  # [N, K]
        weights = None if choice.weights is None else choice.weights.reshape(ids.shape)
        column = ids.clamp(-1, num_experts).add_(1)  # the first and the last are for ids that name no expert
        width = num_experts + 2
        used, unused = _both(column, weights, self.tokens.mask, width)
        dropped = used[0] + used[-1] + unused[0] + unused[-1]
        self._sum(layer, load=used[1:-1], zero_weight=unused[1:-1], dropped=dropped)
        if self.tokens.channel is None and "coactivation" not in self.extras:
            return
        load = column if weights is None else torch.where(weights == 0, 0, column)
        mask = self.tokens.mask
        ones = torch.ones_like(load) if mask is None else mask[:, None].expand(ids.shape).long()
        if self.tokens.channel is not None:
            slot = load + self.tokens.channel[:, None] * width
            by_channel = _scattered(slot, ones, (self.tokens.num_channels + 1) * width)
            self._sum(layer, by_channel=by_channel.view(-1, width)[:-1, 1:-1])
        if "coactivation" in self.extras:
            pairs = load[:, :, None] * width + load[:, None, :]  # [N, K, K]
            together = _scattered(pairs, ones[:, :, None].expand(pairs.shape), width * width)
            self._sum(layer, coactivation=together.view(width, width)[1:-1, 1:-1])

    def _count_chosen(self, layer: int, choice: Choice, num_experts: int) -> None:
        """Of a mask, or of scores that are 0 where an expert is not chosen."""
        self._check_width(layer, choice.values.shape[-1], num_experts)
        chosen = choice.values.reshape(-1, num_experts) != 0  # [N, E]
        if self.tokens.mask is not None:
            chosen = chosen & self.tokens.mask[:, None]
        load = chosen.sum(0)
        self._sum(layer, load=load)
        if choice.kind == "mask" and self.found[layer].router.top_k == 1:  # rows without a 1 found no room
            counted = choice.num_tokens if self.tokens.mask is None else self.tokens.mask.sum()
            self._sum(layer, dropped=counted - load.sum())
        if self.tokens.channel is not None:
            zeros = load.new_zeros(self.tokens.num_channels + 1, num_experts)
            self._sum(layer, by_channel=zeros.index_add(0, self.tokens.channel, chosen.long())[:-1])
        if "coactivation" in self.extras:
            self._sum(layer, coactivation=(chosen.double().mT @ chosen.double()).long())

    def _count_sizes(self, layer: int, choice: Choice, num_experts: int) -> None:
        self._check_width(layer, len(choice.values), num_experts)
        if "coactivation" in self.extras:
            raise ValueError(
                f"coactivation needs the experts of each token, router {self.found[layer].router.path} shows "
                "only how many tokens each expert got"
            )
        device = choice.values.device if choice.logits is None else choice.logits.device
        self._sum(layer, load=choice.values.long().to(device))

    def _check_width(self, layer: int, width: int, num_experts: int) -> None:
        if width != num_experts:
            raise ValueError(
                f"router {self.found[layer].router.path} chooses among {width} experts, not {num_experts} as "
                "the first call let assume, in which it did not run: give it an attribute num_experts"
            )

    def _sum(self, layer: int, **values: Tensor) -> None:
        sums = self.layers[layer]
        for name, value in values.items():
            sums[name] = sums[name] + value if name in sums else value

    def sums(self) -> TensorDict:
        """`obs["router"]`."""
        width = max(found.router.num_experts for found in self.found)
        like = next((value for sums in self.layers for value in sums.values()), torch.zeros(()))
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
            num_experts = [found.router.num_experts for found in self.found]
            total = load.sum(-1)
            mean = total.clamp(min=1) / torch.tensor(num_experts, device=load.device)
            seen = total > 0
            sums["batch_max_vio_sum"] = torch.where(seen, load.amax(-1) / mean - 1, 0)
            sums["batches"] = seen.long()
        return sums

    def _stacked(self, name: str, shape: tuple[int, ...], like: Tensor, dtype=torch.int64) -> Tensor:
        """That sum of all layers, [L, *shape]: those with fewer experts are filled up."""
        zeros = like.new_zeros(shape, dtype=dtype)
        return torch.stack([_filled(sums.get(name, zeros), shape) for sums in self.layers])


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
