"""The token losses of a call of `loss_fn`, by whichever of four routes it shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from veofunc.channel.arguments import Batch, aligned, per_token
from veofunc.channel.intercept import CrossEntropy
from veofunc.transform import name_of

__all__ = ["Tokens", "recognised", "token_losses"]


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
        labels = aligned(batch.labels, loss.shape, following=True) if isinstance(loss, Tensor) else None
        channel = None if labels is None else aligned(ids, labels.shape)
        if labels is None or channel is None:
            raise _no_token_losses(loss, batch.labels, fn)
        return cls(loss, labels, labels != ignore_index, channel)

    @classmethod
    def seen(cls, call: CrossEntropy, batch: Batch) -> Tokens:
        """Those of a cross entropy that was seen inside."""
        ids = batch.channel if batch.labels is None else per_token(batch.channel, batch.labels)
        channel = aligned(ids, call.labels.shape)
        one_per_row = batch.labels is None and ids.dim() == 1 and call.labels.numel() % max(len(ids), 1) == 0
        if channel is None and one_per_row:
            channel = ids.view(-1, 1).expand(-1, call.labels.numel() // len(ids)).reshape(call.labels.shape)
        if channel is None:
            raise ValueError(
                f"F.cross_entropy has {call.labels.numel()} labels, got {ids.numel()} channel ids: ids are "
                "one per token, also of the last one in each row, which may predict nothing, or one per row"
            )
        return cls(call.token_loss, call.labels, call.counted, channel)


def recognised(out: Any, calls: list[CrossEntropy], batch: Batch, fn: Callable) -> str:
    """The route by which `fn` shows its token losses, from what it returned and called.

    Raises:
        TypeError: it returned no tensor, and called `F.cross_entropy` not once.
        ValueError: it returned a tensor of another shape, or there are no labels to compare it with.
    """
    if _is_per_token(out, batch):
        return "output"
    if isinstance(out, tuple) and len(out) == 2 and _is_per_token(out[1], batch):
        return "pair"
    if len(calls) == 1:
        return "intercept"
    raise _unrecognised(out, len(calls), batch, fn)


def token_losses(
    route: str, out: Any, calls: list[CrossEntropy], batch: Batch, ignore_index: int, fn: Callable
) -> Tokens:
    """The token losses of a call of `fn` that returned `out`; `calls` are its cross entropies.

    Raises:
        TypeError: `out` is not what `route` says.
        ValueError: shapes disagree, there are no labels, or `fn` called `F.cross_entropy` not exactly once.
    """
    if route == "intercept" or (route == "reduction" and len(calls) == 1 and out is calls[0].loss):
        if len(calls) != 1:
            raise ValueError(_calls(len(calls), fn))
        return Tokens.seen(calls[0], batch)
    if route == "pair":
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"per_token='pair' says that {name_of(fn)} returns (loss, token_loss), got "
                f"{type(out).__name__}"
            )
        out = out[1]
    return Tokens.returned(out, batch, ignore_index, fn)


def _is_per_token(out: Any, batch: Batch) -> bool:
    labels = batch.labels
    return isinstance(out, Tensor) and labels is not None and aligned(labels, out.shape) is not None


def _unrecognised(out: Any, num_calls: int, batch: Batch, fn: Callable) -> Exception:
    if num_calls > 1:
        return ValueError(_calls(num_calls, fn))
    if batch.labels is None:
        return ValueError(batch.missing)
    return _no_token_losses(out, batch.labels, fn)


def _no_token_losses(out: Any, labels: Tensor, fn: Callable) -> Exception:
    if isinstance(out, Tensor):
        return ValueError(
            f"{name_of(fn)} must return one loss per label, shape {list(labels.shape)}, got "
            f'{list(out.shape)}. F.cross_entropy does with reduction="none". Or return (loss, token_loss), '
            "or have F.cross_entropy called once inside"
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
