"""The token losses of a call of `loss_fn`, by whichever of four routes it shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veofunc.channel.arguments import Batch, aligned, per_token
from veofunc.channel.intercept import CrossEntropy, Seen
from veofunc.levels import is_functorch_wrapped_tensor
from veofunc.transform import name_of

__all__ = [
    "Ran",
    "Tokens",
    "check_labels",
    "check_reduction",
    "loss_of",
    "recognised",
    "seen_tokens",
    "token_losses",
]


@dataclass(frozen=True)
class Ran:
    """One call of `fn`.

    Attributes:
        route: how its token losses are to be had.
        out: what it returned.
        calls: the cross entropies in it, if somebody looked.
        asked: with "reduction", what the caller asked for, while `fn` was asked for "none".
    """

    route: str
    out: Any
    calls: list[Seen]
    asked: str = "none"

    @property
    def returned_the_seen(self) -> bool:
        """Whether it returned the losses of its one cross entropy, or a view of them in the same order."""
        if len(self.calls) != 1 or not isinstance(self.out, Tensor):
            return False
        loss = self.calls[0].loss
        whole_view = self.out._base is loss and self.out.is_contiguous() and self.out.numel() == loss.numel()
        return self.out is loss or whole_view


@dataclass(frozen=True)
class Tokens:
    """What was found of the tokens of one call: four tensors of one shape.

    Attributes:
        loss: of each, in nats.
        labels: what each predicts.
        counted: whether it counts.
        channel: its id.
    """

    loss: Tensor
    labels: Tensor
    counted: Tensor
    channel: Tensor

    @classmethod
    def returned(cls, loss: Any, batch: Batch, ignore_index: int, fn: Callable) -> Tokens:
        """Token losses that `fn` returned."""
        if batch.labels is None:
            raise ValueError(batch.missing)
        ids = per_token(batch.channel, batch.labels)
        labels = aligned(batch.labels.long(), loss.shape, following=True) if _is_float(loss) else None
        channel = None if labels is None else aligned(ids, labels.shape)
        if labels is None or channel is None:
            raise _no_token_losses(loss, batch.labels, fn)
        return cls(loss, labels, labels != ignore_index, channel)

    @classmethod
    def seen(cls, call: Seen, batch: Batch) -> Tokens:
        """Those of a cross entropy that was seen inside."""
        ids = batch.channel
        if batch.labels is not None and ids.numel() != call.labels.numel():
            ids = per_token(ids, batch.labels)
        channel = aligned(ids, call.labels.shape)
        if channel is None or (batch.labels is None and ids.numel() != channel.numel() and ids.dim() == 1):
            raise ValueError(
                f"the loss has {call.labels.numel()} labels, got {ids.numel()} channel ids: ids are one per "
                "token, also of the last one in each row, which may predict nothing; or, if the labels are "
                "in the batch or an argument, one per row"
            )
        return cls(call.token_loss, call.labels, call.counted, channel)


def recognised(ran: Ran, batch: Batch, fn: Callable, has_reduction: bool) -> str:
    """The route by which `fn` shows its token losses, from what it returned and called.

    Raises:
        TypeError: it returned no tensor, and called `F.cross_entropy` not once.
        ValueError: it returned a tensor of another shape, or there are no labels to compare it with, or two
            routes are possible.
    """
    out, calls = ran.out, ran.calls
    if _is_per_token(out, batch):
        return "output"
    if isinstance(out, tuple) and len(out) == 2 and _is_per_token(out[1], batch):
        if len(calls) == 1 and not any(out[1] is x for x in (calls[0].loss, calls[0].token_loss)):
            raise ValueError(
                f"{name_of(fn)} calls F.cross_entropy once and returns a pair. If the second are its token "
                "losses, name per_token='pair'; if not, per_token='intercept'"
            )
        return "pair"
    if len(calls) == 1:
        return "intercept"
    if has_reduction and not calls and isinstance(out, Tensor) and not out.dim():
        return "reduction"
    raise _unrecognised(out, len(calls), batch, fn)


def token_losses(ran: Ran, batch: Batch, ignore_index: int, fn: Callable) -> Tokens:
    """The token losses of a call of `fn`.

    Raises:
        TypeError: it did not return what the route says.
        ValueError: shapes disagree, there are no labels, or it called `F.cross_entropy` not exactly once.
    """
    if ran.route == "intercept" or (ran.route == "reduction" and ran.returned_the_seen):
        if len(ran.calls) != 1:
            raise ValueError(_calls(len(ran.calls), fn))
        return Tokens.seen(ran.calls[0], batch)
    loss = ran.out
    if ran.route == "pair":
        if not isinstance(ran.out, tuple) or len(ran.out) != 2:
            raise TypeError(
                f"per_token='pair' says that {name_of(fn)} returns (loss, token_loss), got "
                f"{type(ran.out).__name__}"
            )
        loss = ran.out[1]
    return Tokens.returned(loss, batch, ignore_index, fn)


def loss_of(ran: Ran, tokens: Tokens, reduction: str) -> Any:
    """What the wrapped function returns: the loss, or with "intercept" all that `fn` did."""
    if ran.route == "intercept":
        return ran.out
    if ran.route == "pair":
        return ran.out[0]
    if ran.asked == "none":
        return _reduced(ran.out, tokens.counted, reduction)
    (call,) = ran.calls if ran.returned_the_seen else (None,)
    return (
        call.reduced(ran.asked)
        if isinstance(call, CrossEntropy)
        else _reduced(ran.out, tokens.counted, ran.asked)
    )


def check_reduction(
    ran: Ran, whole: Tensor, batch: Batch, ignore_index: int, reduction: str, fn: Callable
) -> None:
    """Compares the loss that is made of token losses with `whole`, which `fn` returned by itself.

    Raises:
        ValueError: they differ by more than rounding.
    """
    loss = loss_of(ran, token_losses(ran, batch, ignore_index, fn), reduction)
    if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(whole):  # no values to be read
        return
    if not torch.allclose(loss.float(), whole.float(), rtol=1e-2, atol=1e-3, equal_nan=True):
        raise ValueError(
            f"{name_of(fn)} with reduction={ran.asked!r} returned {whole.item():.6g}, but the {ran.asked} of "
            f"what it returned with 'none' is {loss.item():.6g}. Return (loss, token_loss) and name "
            "per_token='pair'"
        )


def check_labels(ran: Ran, batch: Batch) -> None:
    """Compares the labels of a loss that leaves out one of each row with those of the batch.

    Raises:
        ValueError: it leaves out others, as many by chance.
    """
    labels, known = ran.calls[0].labels, batch.labels
    if known is None or batch.channel.numel() == labels.numel() or labels.numel() == known.numel():
        return
    following = aligned(known.long(), labels.shape, following=True)
    unread = torch.compiler.is_compiling() or any(map(is_functorch_wrapped_tensor, (labels, known)))
    if following is not None and not unread and not torch.equal(following, labels):
        raise ValueError(
            f"the loss has {labels.numel()} labels, as many as if it left out the first of each row, but "
            "others: pass channel ids that are picked as its labels are, one for each"
        )


def seen_tokens(ran: Ran, fn: Callable) -> CrossEntropy:
    """The one cross entropy whose losses, in their order, are the token losses.

    Raises:
        ValueError: there is none.
    """
    call = ran.calls[0] if len(ran.calls) == 1 else None
    if isinstance(call, CrossEntropy) and (ran.route == "intercept" or ran.returned_the_seen):
        return call
    raise ValueError(
        f"extras need the logits: {name_of(fn)} must call F.cross_entropy once for them, it did "
        f"{sum(isinstance(call, CrossEntropy) for call in ran.calls)} times, or its token losses are not as "
        "that call returned them"
    )


def _reduced(token_loss: Tensor, counted: Tensor, reduction: str) -> Tensor:
    wide = torch.promote_types(token_loss.dtype, torch.float32)  # a sum may not fit where its mean does
    total = torch.where(counted, token_loss, 0).sum(dtype=wide)
    loss = total if reduction == "sum" else total / counted.sum()
    return loss.to(token_loss.dtype)


def _is_per_token(out: Any, batch: Batch) -> bool:
    return _is_float(out) and batch.labels is not None and aligned(batch.labels, out.shape) is not None


def _is_float(out: Any) -> bool:
    return isinstance(out, Tensor) and out.is_floating_point()


def _unrecognised(out: Any, num_calls: int, batch: Batch, fn: Callable) -> Exception:
    if num_calls > 1:
        return ValueError(_calls(num_calls, fn))
    if batch.labels is None:
        return ValueError(batch.missing)
    return _no_token_losses(out, batch.labels, fn)


def _no_token_losses(out: Any, labels: Tensor, fn: Callable) -> Exception:
    if isinstance(out, Tensor):
        kind = "" if _is_float(out) else f" of {out.dtype}"
        return ValueError(
            f"{name_of(fn)} must return one loss per label, shape {list(labels.shape)}, got {list(out.shape)}"
            f'{kind}. F.cross_entropy does with reduction="none". Or return (loss, token_loss), or have '
            "F.cross_entropy called once inside"
        )
    hint = ". If it returns (token_loss, aux), pass has_aux=True" * isinstance(out, tuple)
    return TypeError(
        f"{name_of(fn)} must return a tensor with one loss per token, got {type(out).__name__}{hint}"
    )


def _calls(num_calls: int, fn: Callable) -> str:
    return (
        f"{name_of(fn)} must call F.cross_entropy once for its token losses to be seen, it did {num_calls} "
        "times. Return (loss, token_loss) and name per_token='pair'"
    )
