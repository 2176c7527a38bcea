"""`with_channel_loss`: the loss, and the same loss split by data source, in one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from veofunc.channel.arguments import Caller, per_token
from veofunc.channel.channels import Channels
from veofunc.channel.intercept import Seen, seeing_cross_entropies
from veofunc.channel.tokens import (
    Ran,
    Tokens,
    check_labels,
    check_reduction,
    loss_of,
    recognised,
    seen_tokens,
    token_losses,
)
from veofunc.transform import Transformed, merge_obs, name_of, observing

__all__ = ["channel_sums", "with_channel_loss"]

REDUCTIONS = ("mean", "sum")
ROUTES = ("auto", "output", "reduction", "pair", "intercept")
EXTRAS = ("correct", "z_sum")
MAX_CHANNELS = 1 << 20  # each costs a name and two sums; more is a mistake


def with_channel_loss(
    loss_fn: Callable,
    channels: int | Sequence[str] | Channels = 64,
    *,
    per_token: str = "auto",
    reduction: str = "mean",
    channel_key: str = "channel",
    label_key: str = "labels",
    ignore_index: int = -100,
    extras: Sequence[str] = (),
    token_bytes: Tensor | None = None,
    deterministic: bool = False,
    has_aux: bool = False,
) -> Transformed:
    """`loss_fn` as a function that returns `(loss, obs)`, its loss and the sums of that per channel.

    The loss has the same bits as without. `obs["channel"]` holds the sums of the token losses (see
    `channel_sums`); these are pure cross entropy wherever `F.cross_entropy` is seen. A token counts if its
    label is not `ignore_index`. The batch is the mapping among the arguments that has the labels, or the
    arguments themselves; its channel ids are one per token or one per row.

    Args:
        loss_fn: any function or module from which the token losses can be had, in nats.
        channels: names, a number C of channels that are called `"0"` to `"C-1"`, or `Channels`.
        per_token: where the token losses come from. `"output"`: `loss_fn` returns them, of the labels'
            shape, flat, or without those of the last tokens of rows. `"reduction"`: it has an argument
            `reduction`, and is called with `"none"`. `"pair"`: it returns `(loss, token_loss)`.
            `"intercept"`: it calls `F.cross_entropy` once, as `nn.CrossEntropyLoss` and Hugging Face's
            models do; then what it returns is returned as it is. `"auto"`: the first call shows which.
        reduction: how the loss is made of token losses that `loss_fn` returned: `"mean"` over the tokens that
            count (without any it is NaN, as torch's, with gradients of zero), or `"sum"`.
        channel_key: name of the channel ids in the batch; int of the labels' shape [B, T], or [B]. The
            keyword argument `channel=` of the returned function takes precedence; `loss_fn` sees it only
            if it has an argument of that name.
        label_key: name of the labels in the batch; int [B, T] or any other shape. Not needed where
            `F.cross_entropy` is seen, which has them.
        ignore_index: the label that does not count, where `F.cross_entropy` is not seen.
        extras: more sums, where it is seen: `"correct"` (int64, tokens whose label has the largest logit;
            reads the logits once more), `"z_sum"` (squared log-partitions).
        token_bytes: int [V], how many bytes of text each label is: adds the sum `bytes` (int64).
        deterministic: sum in one order on accelerators, too.
        has_aux: `loss_fn` returns `(out, aux)`.

    Returns:
        A function that returns `(loss, obs)`, with `channels`: the names. `obs["channel"]` has
        `loss_sum` [C], `token_count` [C], the sums asked for [C], and an `unattributed_` one [] of each.

    Raises:
        ValueError: an option is out of range; at the call, no batch is found, shapes disagree, or
            `F.cross_entropy` is called several times.
        TypeError: an option is of the wrong kind; at the call, `loss_fn` returned no token losses.

    Laws: additivity, purity, order, recompute, ranks, threads; works under `torch.func.grad` and `vmap`.

    Example:
        >>> import torch, torch.nn.functional as F, veofunc as vf
        >>> logits, labels = torch.zeros(1, 4, 8), torch.tensor([[1, 2, 3, -100]])
        >>> def loss_fn(logits, labels):
        ...     return F.cross_entropy(logits.mT, labels)
        >>> objective = vf.with_channel_loss(loss_fn, ("code", "prose"))
        >>> loss, obs = objective(logits, labels, channel=torch.tensor([[0, 0, 1, 1]]))
        >>> loss.equal(loss_fn(logits, labels)), obs["channel", "token_count"]
        (True, tensor([2, 1]))

    Source: the per-source loss of VeOmni and ms-swift, as sums.
    """
    num_channels, names = _channels(channels)
    _check_options(per_token, reduction, channel_key, label_key, ignore_index, extras, token_bytes)
    observed = observing(loss_fn, has_aux)
    caller = Caller(loss_fn, channel_key, label_key)
    if per_token == "reduction" and caller.reduction is None:
        raise ValueError(f"per_token='reduction', but {name_of(loss_fn)} has no argument 'reduction'")
    known, is_first = per_token, True

    def run(route: str, args: tuple, kwargs: dict) -> tuple[Ran, TensorDictBase]:
        asked = "none"
        if route == "reduction":
            args, kwargs, asked = caller.unreduced(args, kwargs)
        with _seeing(route, extras) as calls:
            out, obs = observed(*args, **kwargs)
        return Ran(route, out, calls, asked), obs

    def call(*args, **kwargs):
        nonlocal known, is_first
        kwargs, batch = caller.read(args, kwargs)
        ran, obs = run(known, args, kwargs)
        if ran.route == "auto":
            route, whole = recognised(ran, batch, loss_fn, caller.reduction is not None), ran.out
            ran = replace(ran, route=route)
            if route == "reduction":  # it was reduced out of sight: this once it is called twice
                ran, obs = run(route, args, kwargs)
                check_reduction(ran, whole, batch, ignore_index, reduction, loss_fn)
            if not torch.compiler.is_compiling():
                known = route
        tokens = token_losses(ran, batch, ignore_index, loss_fn)
        if is_first and ran.route == "intercept":
            check_labels(ran, batch)
        is_first = is_first and torch.compiler.is_compiling()
        more = _more(extras, ran, tokens, token_bytes, loss_fn)
        sums = _sums(tokens, num_channels, more, deterministic)
        return loss_of(ran, tokens, reduction), merge_obs(obs, "channel", sums)

    return Transformed(
        "with_channel_loss",
        loss_fn,
        call,
        observes="channel",
        takes={"channel", channel_key},
        exposes={"channels": names},
    )


def channel_sums(
    token_loss: Tensor,
    labels: Tensor,
    channel: Tensor,
    num_channels: int,
    ignore_index: int = -100,
    *,
    deterministic: bool = False,
) -> TensorDict:
    """Sums of token losses and numbers of tokens per channel: what `with_channel_loss` observes.

    Args:
        token_loss: loss per token in nats, [B, T] or any shape; never differentiated.
        labels: int of the same shape; a token counts if its label is not `ignore_index`.
        channel: int, one id per token (same shape) or per row ([B]). Ids outside of [0, num_channels),
            -1 ("nobody's") among them, count as unattributed.
        num_channels: C.
        ignore_index: the label that does not count.
        deterministic: sum in one order on accelerators, too.

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
    counted = labels.long() != ignore_index
    tokens = Tokens(token_loss, labels, counted, per_token(channel, labels))
    return _sums(tokens, num_channels, {}, deterministic)


def _seeing(route: str, extras: Sequence[str]) -> contextlib.AbstractContextManager[list[Seen]]:
    """Gives the list of the cross entropies that are called; always empty if nobody asks for them."""
    asked = extras or route not in ("output", "pair")
    return seeing_cross_entropies() if asked else contextlib.nullcontext([])


def _more(extras, ran: Ran, tokens: Tokens, token_bytes: Tensor | None, fn: Callable) -> dict[str, Tensor]:
    """A value for each token of each sum that was asked for."""
    values = {}
    if extras:
        call = seen_tokens(ran, fn)
        if "correct" in extras:
            values["correct"] = call.correct.reshape(tokens.loss.shape)
        if "z_sum" in extras:
            values["z_sum"] = call.log_partition.square().reshape(tokens.loss.shape)
    if token_bytes is not None:
        values["bytes"] = token_bytes[torch.where(tokens.counted, tokens.labels, 0)]
    return values


def _sums(tokens: Tokens, num_channels: int, more: Mapping[str, Tensor], deterministic: bool) -> TensorDict:
    """The sums per channel, and those of nobody's tokens."""
    channel = tokens.channel.long()
    known = (channel >= 0) & (channel < num_channels)
    slot = torch.where(known, channel, num_channels).reshape(-1)
    sums = {}
    for name, values in {"loss_sum": tokens.loss, "token_count": tokens.counted, **more}.items():
        values = torch.where(tokens.counted, values.detach(), 0).reshape(-1)
        whole = not values.is_floating_point()
        total = _added(values.long() if whole else _exact(values), slot, num_channels + 1, deterministic)
        total = total if whole else total.to(torch.promote_types(values.dtype, torch.float32))
        sums[name], sums[f"unattributed_{name}"] = total[:-1].clone(), total[-1].clone()
    return TensorDict(sums)


def _exact(values: Tensor) -> Tensor:
    """They are added one by one: in float32 the sum of a million equal ones would be off by a per cent."""
    return values if values.device.type == "mps" else values.double()  # MPS has no float64


def _added(values: Tensor, slot: Tensor, num_slots: int, deterministic: bool) -> Tensor:
    zeros = values.new_zeros(num_slots)
    if deterministic and values.device.type != "cpu":  # sorts; what index_add does is atomic, in any order
        return zeros.index_put((slot,), values, accumulate=True)
    return zeros.index_add(0, slot, values)


def _channels(channels: int | Sequence[str] | Channels) -> tuple[int, Callable[[], tuple[str, ...]]]:
    """How many there are, and what gives their names."""
    if isinstance(channels, Channels):
        return channels.capacity, lambda: channels.names
    names = _channel_names(channels)
    return len(names), lambda: names


def _channel_names(channels: int | Sequence[str]) -> tuple[str, ...]:
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


def _check_options(per_token, reduction, channel_key, label_key, ignore_index, extras, token_bytes) -> None:
    for option, value, accepted in (("per_token", per_token, ROUTES), ("reduction", reduction, REDUCTIONS)):
        if value not in accepted:
            raise ValueError(f"{option} must be one of {', '.join(accepted)}, got {value!r}")
    for option, key in (("channel_key", channel_key), ("label_key", label_key)):
        if not isinstance(key, str):
            raise TypeError(f"{option} must be a str, the name of an entry of the batch, got {key!r}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if isinstance(extras, str) or not set(extras) <= set(EXTRAS):
        raise ValueError(f"extras must be some of {EXTRAS}, got {extras!r}")
    if token_bytes is not None and (
        not isinstance(token_bytes, Tensor) or token_bytes.dim() != 1 or token_bytes.is_floating_point()
    ):
        raise TypeError(f"token_bytes must be an integer tensor [V], got {token_bytes!r}")
