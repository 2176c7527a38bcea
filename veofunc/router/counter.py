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

from veofunc.router.detect import Found
from veofunc.router.patterns import Choice, Sighting, rows
from veofunc.transform import module_hooks

__all__ = ["EXTRAS", "OF_LOGITS", "Counter", "Tokens"]

OF_LOGITS = ("probabilities", "entropy", "z")
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
                f"router {self.found[layer].router.path} shows its choice elsewhere than in the first call"
            )
        num_tokens = choice.values.new_full((), choice.num_tokens, dtype=torch.int64)
        if not self.tokens.fits(choice.num_tokens) or (choice.kind == "sizes" and self.tokens != Tokens()):
            self._sum(layer, unattributed_tokens=num_tokens)
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
        probabilities = logits if self.probabilities[layer] else logits.softmax(-1)
        entropy = torch.special.entr(probabilities).sum(-1)
        per_token = {"probabilities": probabilities, "entropy": entropy}
        if "z" in self.extras:
            per_token["z"] = logits.logsumexp(-1).square()
        names = {"probabilities": "probability_sum", "entropy": "entropy_sum", "z": "z_sum"}
        for extra in set(self.extras) & set(per_token):
            values, mask = per_token[extra], self.tokens.mask
            if mask is not None:
                values = torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, 0)
            self._sum(layer, **{names[extra]: values.sum(0)})

    def _count_ids(self, layer: int, choice: Choice, num_experts: int) -> None:
        if choice.logits is not None:
            self._check_width(layer, choice.logits.shape[-1], num_experts)
        ids = choice.values.reshape(-1, choice.values.shape[-1]).long()  # [N, K]
        unused = torch.zeros_like(ids, dtype=torch.bool)
        if choice.weights is not None:
            unused = (choice.weights == 0).reshape(ids.shape)
        if self.tokens.mask is None:
            ones = torch.ones_like(ids)
        else:
            ones = self.tokens.mask[:, None].expand(ids.shape).long()
        width = 1 + num_experts  # column 0 is for ids that name no expert
        column = torch.where((ids >= 0) & (ids < num_experts), ids + 1, 0)
        slots = _scattered(column + unused * width, ones, 2 * width).view(2, width)
        self._sum(layer, slots=slots)
        load = torch.where(unused, 0, column)
        if self.tokens.channel is not None:
            slot = load + self.tokens.channel[:, None] * width
            by_channel = _scattered(slot, ones, (self.tokens.num_channels + 1) * width)
            self._sum(layer, by_channel=by_channel.view(-1, width)[:-1, 1:])
        if "coactivation" in self.extras:
            pairs = load[:, :, None] * width + load[:, None, :]  # [N, K, K]
            together = _scattered(pairs, ones[:, :, None].expand(pairs.shape), width * width)
            self._sum(layer, coactivation=together.view(width, width)[1:, 1:])

    def _count_chosen(self, layer: int, choice: Choice, num_experts: int) -> None:
        """Of a mask, or of scores that are 0 where an expert is not chosen."""
        self._check_width(layer, choice.values.shape[-1], num_experts)
        chosen = choice.values.reshape(-1, num_experts) != 0  # [N, E]
        if self.tokens.mask is not None:
            chosen = chosen & self.tokens.mask[:, None]
        load, none = chosen.sum(0), chosen.new_zeros(num_experts, dtype=torch.int64)
        dropped = load.new_zeros(1)
        if choice.kind == "mask":  # rows without a 1 found no room at their expert
            dropped = self._slots_of(layer, choice.num_tokens, load) - load.sum(0, keepdim=True)
        slots = torch.stack([torch.cat([dropped, load]), torch.cat([torch.zeros_like(dropped), none])])
        self._sum(layer, slots=slots)
        if self.tokens.channel is not None:
            zeros = chosen.new_zeros(self.tokens.num_channels + 1, num_experts, dtype=torch.int64)
            self._sum(layer, by_channel=zeros.index_add(0, self.tokens.channel, chosen.long())[:-1])
        if "coactivation" in self.extras:
            self._sum(layer, coactivation=(chosen.double().mT @ chosen.double()).long())

    def _count_sizes(self, layer: int, choice: Choice, num_experts: int) -> None:
        self._check_width(layer, len(choice.values), num_experts)
        load = choice.values.long()
        if choice.logits is not None:
            load = load.to(choice.logits.device)
        none = F.pad(torch.zeros_like(load), (1, 0))
        self._sum(layer, slots=torch.stack([F.pad(load, (1, 0)), none]))
        if "coactivation" in self.extras:
            raise ValueError(
                f"coactivation needs the experts of each token, router {self.found[layer].router.path} shows "
                "only how many tokens each expert got"
            )

    def _slots_of(self, layer: int, num_tokens: int, like: Tensor) -> Tensor:
        counted = (
            like.new_full((1,), num_tokens) if self.tokens.mask is None else self.tokens.mask.sum()[None]
        )
        return counted * self.found[layer].router.top_k

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
        slots = self._stacked("slots", (2, 1 + width), like)  # [L, 2, 1 + E]
        sums = {
            "tokens_per_expert": slots[:, 0, 1:].clone(),
            "zero_weight": slots[:, 1, 1:].clone(),
            "tokens": self._stacked("tokens", (), like),
            "dropped": slots[:, :, 0].sum(-1),
        }
        if self.tokens != Tokens():
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


def _scattered(slot: Tensor, ones: Tensor, num_slots: int) -> Tensor:
    return slot.new_zeros(num_slots).scatter_add(0, slot.reshape(-1), ones.reshape(-1))


def _filled(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    missing = [want - have for want, have in zip(shape, values.shape, strict=True)]
    return F.pad(values, [x for n in reversed(missing) for x in (0, n)]) if any(missing) else values
