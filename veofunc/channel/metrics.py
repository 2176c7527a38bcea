"""Numbers to log, from the sums per channel."""

from __future__ import annotations

import math

from tensordict import TensorDictBase

from veofunc.transform import read_obs

__all__ = ["channel_metrics"]


def channel_metrics(obs: TensorDictBase, channels: tuple[str, ...]) -> dict[str, float]:
    """Loss, share of the loss, tokens and perplexity per channel, from sums.

    Args:
        obs: what `with_channel_loss` returned, or any sum of that: its `"channel"` is read.
        channels: the names, as in `.channels` of the transformed function.

    Returns:
        For each channel with tokens: `channel_loss/<name>`, mean loss in nats per token;
        `channel_loss_weighted/<name>`, its part of the mean over all tokens, so that these add up to that
        mean; `channel_tokens/<name>`; `channel_perplexity/<name>`, exp of the mean loss. Tokens of no
        channel, if there are any: `channel_unattributed_loss` and `channel_unattributed_tokens`.
        `{}` for an empty window.

    Raises:
        ValueError: `obs` has sums but none of channels, or of another number of channels.
        TypeError: `obs` is not a TensorDict or mapping.

    Example:
        >>> import torch, veofunc as vf
        >>> labels, channel = torch.tensor([1, 1, 1]), torch.tensor([0, 0, 1])
        >>> sums = vf.channel_sums(torch.tensor([1.0, 2.0, 6.0]), labels, channel, 2)
        >>> metrics = vf.channel_metrics({"channel": sums}, ("code", "prose"))
        >>> metrics["channel_loss/code"], metrics["channel_loss_weighted/prose"]
        (1.5, 2.0)
    """
    sums = read_obs(obs, "channel", "with_channel_loss")
    if sums is None:
        return {}
    loss_sums, token_counts = sums["loss_sum"].tolist(), sums["token_count"].tolist()
    if len(channels) != len(loss_sums):
        raise ValueError(f"obs has {len(loss_sums)} channels, got {len(channels)} names: {channels}")
    other_loss = sums["unattributed_loss_sum"].item()
    other_tokens = sums["unattributed_token_count"].item()
    all_tokens = sum(token_counts) + other_tokens
    metrics = {}
    for name, loss_sum, tokens in zip(channels, loss_sums, token_counts, strict=True):
        if tokens:
            metrics[f"channel_loss/{name}"] = loss_sum / tokens
            metrics[f"channel_loss_weighted/{name}"] = loss_sum / all_tokens
            metrics[f"channel_tokens/{name}"] = float(tokens)
            metrics[f"channel_perplexity/{name}"] = _exp(loss_sum / tokens)
    if other_tokens:
        metrics["channel_unattributed_loss"] = other_loss / other_tokens
        metrics["channel_unattributed_tokens"] = float(other_tokens)
    return metrics


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
