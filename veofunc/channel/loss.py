"""`with_channel_loss`: the loss, and the same loss split by data source, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from veofunc.transform import Transformed, has_parameter, merge_obs, name_of, observing

__all__ = ["channel_sums", "with_channel_loss"]

REDUCTIONS = ("mean", "sum")
NOT_IDS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
MAX_CHANNELS = 1 << 20  # each costs a name and two sums; more is a mistake


def with_channel_loss(
    loss_fn: Callable,
    channels: int | tuple[str, ...] = 64,
    *,
    reduction: str = "mean",
    channel_key: str = "channel",
    label_key: str = "labels",
    ignore_index: int = -100,
    has_aux: bool = False,
) -> Transformed:
    """`loss_fn`, which returns one loss per token, as a function that returns `(loss, obs)`.

    `loss` is the mean or the sum of the token losses that count (without any the mean is NaN, as torch's, and
    its gradients are zeros); `obs["channel"]` holds their sums per
    channel (see `channel_sums`). A token counts if its label is not `ignore_index`. The batch is the
    mapping among the arguments that has the labels, or the keyword arguments themselves; its channel ids
    are one per token or one per row.

    Args:
        loss_fn: returns the token losses, of the labels' shape, in nats, e.g. from
            `F.cross_entropy(..., reduction="none")`.
        channels: names, or a number C of channels that are called `"0"` to `"C-1"`.
        reduction: `"mean"` over the tokens that count, or `"sum"`.
        channel_key: name of the channel ids in the batch; int of the labels' shape [B, T], or [B]. The
            keyword argument `channel=` of the returned function takes precedence; `loss_fn` sees it only
            if it has an argument of that name.
        label_key: name of the labels in the batch; int [B, T] or any other shape.
        ignore_index: the label that does not count.
        has_aux: `loss_fn` returns `(token_loss, aux)`.

    Returns:
        A function that returns `(loss, obs)`, with `channels`: the names. `obs["channel"]` has
        `loss_sum` [C], `token_count` [C], `unattributed_loss_sum` [] and `unattributed_token_count` [].

    Raises:
        ValueError: an option is out of range; at the call, no batch is found, or shapes disagree.
        TypeError: an option is of the wrong kind; at the call, `loss_fn` returned no token losses.

    Laws: additivity, purity, order, recompute, ranks, threads; works under `torch.func.grad` and `vmap`.

    Example:
        >>> import torch, torch.nn.functional as F, veofunc as vf
        >>> batch = {
        ...     "logits": torch.zeros(1, 4, 8),
        ...     "labels": torch.tensor([[1, 2, 3, -100]]),
        ...     "channel": torch.tensor([[0, 0, 1, 1]]),
        ... }
        >>> def loss_fn(batch):
        ...     return F.cross_entropy(batch["logits"].mT, batch["labels"], reduction="none")
        >>> loss, obs = vf.with_channel_loss(loss_fn, ("code", "prose"))(batch)
        >>> obs["channel", "token_count"]
        tensor([2, 1])

    Source: the per-source loss of VeOmni and ms-swift, as sums.
    """
    names = _channel_names(channels)
    for option, key in (("channel_key", channel_key), ("label_key", label_key)):
        if not isinstance(key, str):
            raise TypeError(f"{option} must be a str, the name of an entry of the batch, got {key!r}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    observed = observing(loss_fn, has_aux)
    takes_channel = has_parameter(loss_fn, "channel")

    def call(*args, **kwargs):
        given = kwargs.get("channel") if takes_channel else kwargs.pop("channel", None)
        labels, channel = _labels_and_channel(args, kwargs, label_key, channel_key, given)
        token_loss, obs = observed(*args, **kwargs)
        _check_token_loss(token_loss, labels, loss_fn)
        counted = labels != ignore_index
        sums = _sums(token_loss, counted, _per_token(channel, labels), len(names))
        return _reduce(token_loss, counted, reduction), merge_obs(obs, "channel", sums)

    return Transformed(
        "with_channel_loss", loss_fn, call, observes="channel", exposes={"channels": lambda: names}
    )


def channel_sums(
    token_loss: Tensor, labels: Tensor, channel: Tensor, num_channels: int, ignore_index: int = -100
) -> TensorDict:
    """Sums of token losses and numbers of tokens per channel: what `with_channel_loss` observes.

    Args:
        token_loss: loss per token in nats, [B, T] or any shape; never differentiated.
        labels: int of the same shape; a token counts if its label is not `ignore_index`.
        channel: int, one id per token (same shape) or per row ([B]). Ids outside of [0, num_channels),
            -1 ("nobody's") among them, count as unattributed.
        num_channels: C.
        ignore_index: the label that does not count.

    Returns:
        `loss_sum` [C] in nats, float32 (float64 for float64 losses); `token_count` [C], int64;
        `unattributed_loss_sum` [], `unattributed_token_count` []. With the unattributed ones they add up
        to all tokens that count.

    Raises:
        ValueError: shapes disagree, or `num_channels` is less than 1.
        TypeError: ids that are not integers.

    Laws: additivity. No host synchronisation; static shapes.

    Example:
        >>> import torch, veofunc as vf
        >>> loss, labels = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([5, 5, 5])
        >>> vf.channel_sums(loss, labels, torch.tensor([0, -1, 0]), 2)["loss_sum"]
        tensor([5., 0.])
    """
    if num_channels < 1:
        raise ValueError(f"num_channels must be at least 1, got {num_channels}")
    if token_loss.shape != labels.shape:
        raise ValueError(
            f"token_loss must have the labels' shape {list(labels.shape)}, got {list(token_loss.shape)}"
        )
    return _sums(token_loss, labels != ignore_index, _per_token(channel, labels), num_channels)


def _channel_names(channels: int | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(channels, int) and not isinstance(channels, bool):
        if not 1 <= channels <= MAX_CHANNELS:
            raise ValueError(f"channels must be a number from 1 to {MAX_CHANNELS}, got {channels}")
        return tuple(map(str, range(channels)))
    sequence = isinstance(channels, tuple | list)
    if not sequence or not all(isinstance(name, str) and name for name in channels):
        raise TypeError(f"channels must be a tuple of non-empty names or a number, got {channels!r}")
    names = tuple(channels)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"channels must be one or more different names, got {names!r}")
    return names


def _labels_and_channel(args, kwargs, label_key, channel_key, channel) -> tuple[Tensor, Tensor]:
    """The labels and channel ids of the one batch among the arguments."""
    arguments = (*args, *kwargs.values(), kwargs)
    mappings = [arg for arg in arguments if isinstance(arg, TensorDictBase | Mapping)]
    batches = [mapping for mapping in mappings if label_key in mapping.keys()]
    if len(batches) != 1:
        keys = [str(sorted(map(str, mapping.keys()))) for mapping in mappings if mapping.keys()]
        raise ValueError(
            f"exactly one argument must be a TensorDict or mapping with {label_key!r} (label_key=), or "
            f"{label_key}= be given by keyword, found {len(batches)}. Keys of the mappings among the "
            f"arguments, and of the keyword arguments: {'; '.join(keys) or 'none'}"
        )
    batch = batches[0]
    if channel is None:
        if channel_key not in batch.keys():
            raise ValueError(
                f"the batch has no {channel_key!r} (channel_key=): put the channel ids there, one per "
                f"token or row, or pass channel=. It has {sorted(map(str, batch.keys()))}"
            )
        channel = batch[channel_key]
    return batch[label_key], channel


def _check_token_loss(token_loss: Any, labels: Any, loss_fn: Callable) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"the labels must be a tensor, got {type(labels).__name__}")
    name = name_of(loss_fn)
    if not isinstance(token_loss, Tensor):
        hint = ". If it returns (token_loss, aux), pass has_aux=True" * isinstance(token_loss, tuple)
        raise TypeError(
            f"{name} must return a tensor with one loss per token, got {type(token_loss).__name__}{hint}"
        )
    if token_loss.shape != labels.shape:
        raise ValueError(
            f"{name} must return one loss per label, shape {list(labels.shape)}, got "
            f'{list(token_loss.shape)}. F.cross_entropy does with reduction="none"'
        )


def _per_token(channel: Tensor, labels: Tensor) -> Tensor:
    """`channel` with one id per label, from one per label or one per row."""
    if not isinstance(channel, Tensor) or channel.dtype in NOT_IDS or channel.is_floating_point():
        kind = channel.dtype if isinstance(channel, Tensor) else type(channel).__name__
        raise TypeError(f"channel must be an integer tensor, got {kind}")
    if channel.shape == labels.shape:
        return channel
    if channel.dim() == 1 and labels.dim() > 1 and len(channel) == len(labels):
        return channel.view(-1, *[1] * (labels.dim() - 1)).expand(labels.shape)
    raise ValueError(
        f"channel must have shape {list(labels.shape)} or {list(labels.shape[:1])}, got "
        f"{list(channel.shape)}; ids are one per label or one per row"
    )


def _sums(token_loss: Tensor, counted: Tensor, channel: Tensor, num_channels: int) -> TensorDict:
    """The sums per channel; `counted` and `channel` have one value per token loss."""
    channel = channel.long()
    known = (channel >= 0) & (channel < num_channels)
    slot = torch.where(known, channel, num_channels).reshape(-1)
    # Added one by one, so in float64: a million equal float32 losses would be off by a per cent.
    exact = torch.float32 if token_loss.device.type == "mps" else torch.float64  # MPS has no float64
    losses = torch.where(counted, token_loss.detach(), 0).to(exact).reshape(-1)
    loss_sum = losses.new_zeros(num_channels + 1).index_add(0, slot, losses)
    loss_sum = loss_sum.to(torch.promote_types(token_loss.dtype, torch.float32))
    ones = counted.reshape(-1).long()
    token_count = ones.new_zeros(num_channels + 1).index_add(0, slot, ones)
    return TensorDict(
        {
            "loss_sum": loss_sum[:-1].clone(),
            "token_count": token_count[:-1].clone(),
            "unattributed_loss_sum": loss_sum[-1].clone(),
            "unattributed_token_count": token_count[-1].clone(),
        }
    )


def _reduce(token_loss: Tensor, counted: Tensor, reduction: str) -> Tensor:
    wide = torch.promote_types(token_loss.dtype, torch.float32)  # a sum may not fit where its mean does
    total = torch.where(counted, token_loss, 0).sum(dtype=wide)
    loss = total if reduction == "sum" else total / counted.sum()
    return loss.to(token_loss.dtype)
