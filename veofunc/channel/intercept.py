"""Seeing the token losses inside of the one `F.cross_entropy` that a function calls.

The call is made as PyTorch makes it, in two steps: log-probabilities, then their negative mean or sum at the
labels. So loss and gradients have the same bits, what backward needs is the same, and the token losses are
picked from the log-probabilities between the steps: there is no second pass over the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode

from veofunc.channel.linear import linear_cross_entropy

__all__ = ["CrossEntropy", "Seen", "seeing_cross_entropies"]


@contextlib.contextmanager
def seeing_cross_entropies() -> Generator[list[Seen]]:
    """Gives a list to which every `F.cross_entropy` and `linear_cross_entropy` of this thread is added.

    Not those of a backward pass that starts inside, where activation checkpointing computes again.
    """
    mode = _Seeing()
    with mode:
        yield mode.calls


class _Seeing(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls: list[Seen] = []
        self._task = _task()

    def __torch_function__(self, func, types, args: tuple = (), kwargs=None):
        kwargs = kwargs or {}
        if _task() != self._task or any(map(_has_its_own, types)):
            return func(*args, **kwargs)
        if func is linear_cross_entropy:
            loss, token_loss = func(*args, **kwargs)
            labels = kwargs["labels"] if "labels" in kwargs else args[2]
            self.calls.append(SeenLinear(loss, token_loss, labels.long(), kwargs.get("ignore_index", -100)))
            return loss, token_loss
        if func is F.cross_entropy:
            self.calls.append(_cross_entropy(*args, **kwargs))
            return self.calls[-1].loss
        return func(*args, **kwargs)


def _has_its_own(kind: type) -> bool:
    """Whether these tensors make losses in their own way."""
    plain = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return getattr(kind, "__torch_function__") not in plain  # noqa: B009


def _task() -> int:
    """The backward pass that runs in this thread; while compiling, one for all."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


class Seen(Protocol):
    """One call.

    Attributes:
        loss: what it returned.
        token_loss: pure cross entropy of every label, whatever weights and smoothing do to the loss; 0 where
            the label is ignored.
        labels: int64.
        counted: whether the label is not ignored.
    """

    @property
    def loss(self) -> Tensor: ...

    @property
    def token_loss(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...

    @property
    def counted(self) -> Tensor: ...


@dataclass(frozen=True)
class SeenLinear:
    """A call of `linear_cross_entropy`."""

    loss: Tensor
    token_loss: Tensor
    labels: Tensor
    ignore_index: int

    @property
    def counted(self) -> Tensor:
        return self.labels != self.ignore_index


@dataclass(frozen=True)
class CrossEntropy:
    """A call of `F.cross_entropy`: what it returned, and what it made on the way.

    Attributes:
        loss: the loss as the caller asked for it.
        logits: [N, V], [V], or [N, V, ...].
        log_probs: the same, normalised over V.
        labels: int64, [N], [] or [N, ...].
        weight: of each class [V], or None.
        ignore_index: the label that does not count.
        label_smoothing: from 0 to 1.
    """

    loss: Tensor
    logits: Tensor
    log_probs: Tensor
    labels: Tensor
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float

    @property
    def counted(self) -> Tensor:
        return self.labels != self.ignore_index

    @property
    def token_loss(self) -> Tensor:
        """See `Seen`."""
        return torch.where(self.counted, -self._at_labels(self.log_probs), 0)

    @property
    def log_partition(self) -> Tensor:
        """Of every label: the logarithm of the sum of the exponentials of its logits, a pass over them."""
        return self.logits.detach().to(self.log_probs.dtype).logsumexp(_classes(self.logits))

    @property
    def correct(self) -> Tensor:
        """Whether the label has the largest logit: a pass over the vocabulary."""
        return self.log_probs.detach().argmax(_classes(self.log_probs)) == self.labels

    def reduced(self, reduction: str) -> Tensor:
        """The loss that the call would have returned with this `reduction`."""
        return _reduced(
            self.log_probs, self.labels, self.weight, self.ignore_index, reduction, self.label_smoothing
        )

    def _at_labels(self, values: Tensor) -> Tensor:
        labels = torch.where(self.counted, self.labels, 0)
        dim = _classes(values)
        return values.detach().gather(dim, labels.unsqueeze(dim)).squeeze(dim)


def _cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
) -> CrossEntropy:
    """`F.cross_entropy`, argument by argument."""
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    if target.is_floating_point():
        raise ValueError(
            "F.cross_entropy was called with probabilities of classes, got a target of "
            f"{target.dtype}: they have no token losses. Name per_token='pair' and return (loss, token_loss)"
        )
    if input.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # which casts it as a whole there
        with torch.autocast("cpu", enabled=False):
            logits, weight = _widened(input), None if weight is None else _widened(weight)
            return _cross_entropy(
                logits, target, weight, None, ignore_index, None, reduction, label_smoothing
            )
    log_probs = F.log_softmax(input, _classes(input), dtype=input.dtype)
    loss = _reduced(log_probs, target, weight, ignore_index, reduction, label_smoothing)
    return CrossEntropy(loss, input, log_probs, target.long(), weight, ignore_index, label_smoothing)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _classes(logits: Tensor) -> int:
    """The dimension of the vocabulary."""
    return min(logits.dim() - 1, 1)


def _reduced(log_probs, labels, weight, ignore_index, reduction, label_smoothing) -> Tensor:
    if label_smoothing > 1:  # which raises
        return F.cross_entropy(log_probs, labels, label_smoothing=label_smoothing)
    loss = F.nll_loss(log_probs, labels, weight, ignore_index=ignore_index, reduction=reduction)
    if label_smoothing <= 0:
        return loss
    dim, ignored = _classes(log_probs), labels == ignore_index
    if weight is None:
        smooth = -log_probs.sum(dim)
    else:
        smooth = -(log_probs * weight.view([-1 if i == dim else 1 for i in range(log_probs.dim())])).sum(dim)
    smooth = smooth.masked_fill(ignored, 0)
    if reduction == "mean" and weight is None:
        smooth = smooth.sum() / (~ignored).sum()
    elif reduction == "mean":
        smooth = smooth.sum() / weight.gather(0, labels.masked_select(~ignored)).sum()
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / log_probs.shape[dim])
