"""Numbers to log, from the sums per channel."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tensordict import TensorDictBase

from veofunc.channel.channels import Channels
from veofunc.transform import read_obs

__all__ = ["channel_metrics", "metric_names"]

OPTIONAL = ("bytes", "correct", "z_sum")


def channel_metrics(obs: TensorDictBase, channels: Sequence[str] | Channels) -> dict[str, float]:
    """Loss, share of the loss, tokens and perplexity per channel, from sums.

    A `<name>` has letters, digits and `_`, `.`, `-`, `/`; other characters of the channel's become `_`, as
    sinks would make them. If an earlier channel has that name, `-<id>` is appended. So keys are different,
    and stay when channels are added. A channel without a name is called by its id.

    Args:
        obs: what `with_channel_loss` returned, or any sum of that: its `"channel"` is read.
        channels: the names, as in `.channels` of the transformed function, or `Channels`; there may be
            fewer than `obs` has sums.

    Returns:
        For each channel with tokens: `channel_loss/<name>`, mean loss in nats per token;
        `channel_loss_weighted/<name>`, its part of the mean over all tokens, so that these add up to that
        mean; `channel_tokens/<name>`; `channel_perplexity/<name>`, exp of the mean loss. Of sums that are
        there: of `bytes`, unless 0, `channel_bits_per_byte/<name>`; of `correct`,
        `channel_accuracy/<name>`; of `z_sum`, `channel_z/<name>`, the mean of the squared log-partition.
        Tokens of no channel, if there are any: `channel_unattributed_loss` and
        `channel_unattributed_tokens`. `{}` for an empty window.

    Raises:
        ValueError: `obs` has sums but none of channels, or there are more names than sums.
        TypeError: `obs` is not a TensorDict or mapping, or `channels` is a str.

    Example:
        >>> import torch, veofunc as vf
        >>> labels, channel = torch.tensor([1, 1, 1]), torch.tensor([0, 0, 1])
        >>> sums = vf.channel_sums(torch.tensor([1.0, 2.0, 6.0]), labels, channel, 2)
        >>> metrics = vf.channel_metrics({"channel": sums}, ("code", "prose"))
        >>> metrics["channel_loss/code"], metrics["channel_loss_weighted/prose"]
        (1.5, 2.0)

    Source: bits per byte as in the Pile (https://arxiv.org/abs/2101.00027), z as in PaLM
    (https://arxiv.org/abs/2204.02311).
    """
    names = channels.names if isinstance(channels, Channels) else channels
    if isinstance(names, str):
        raise TypeError(f"channels must be the names of all channels or Channels, got the str {names!r}")
    sums = read_obs(obs, "channel", "with_channel_loss")
    if sums is None:
        return {}
    loss_sums, token_counts = sums["loss_sum"].tolist(), sums["token_count"].tolist()
    if len(names) > len(loss_sums):
        raise ValueError(f"obs has {len(loss_sums)} channels, got {len(names)} names: {names}")
    more = {key: sums[key].tolist() for key in OPTIONAL if key in sums.keys()}
    other_loss = sums["unattributed_loss_sum"].item()
    other_tokens = sums["unattributed_token_count"].item()
    all_tokens = sum(token_counts) + other_tokens
    unnamed = map(str, range(len(names), len(loss_sums)))
    metrics = {}
    for c, name in enumerate(metric_names([*names, *unnamed])):
        loss_sum, tokens = loss_sums[c], token_counts[c]
        if tokens:
            metrics[f"channel_loss/{name}"] = loss_sum / tokens
            metrics[f"channel_loss_weighted/{name}"] = loss_sum / all_tokens
            metrics[f"channel_tokens/{name}"] = float(tokens)
            metrics[f"channel_perplexity/{name}"] = _exp(loss_sum / tokens)
            extra = {key: values[c] for key, values in more.items()}
            metrics |= {f"channel_{key}/{name}": value for key, value in _optional(extra, loss_sum, tokens)}
    if other_tokens:
        metrics["channel_unattributed_loss"] = other_loss / other_tokens
        metrics["channel_unattributed_tokens"] = float(other_tokens)
    return metrics


def metric_names(names: Iterable[str]) -> Iterator[str]:
    """A key for each name that depends on it and the names before it only, and that none of these has."""
    taken = set()
    for c, name in enumerate(names):
        key = re.sub(r"[^\w./-]", "_", name)
        while key in taken:
            key += f"-{c}"
        taken.add(key)
        yield key


def _optional(sums: Mapping[str, float], loss_sum: float, tokens: int) -> Iterator[tuple[str, float]]:
    if sums.get("bytes"):
        yield "bits_per_byte", loss_sum / sums["bytes"] / math.log(2)
    if "correct" in sums:
        yield "accuracy", sums["correct"] / tokens
    if "z_sum" in sums:
        yield "z", sums["z_sum"] / tokens


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
