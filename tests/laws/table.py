"""The table of all transforms. A new transform adds a row, and every law is checked for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensordict import TensorDictBase
from torch import Tensor, nn

import veofunc as vf
from tests.laws.subject import CHANNELS


@dataclass(frozen=True)
class Row:
    """One transform and what the laws must know of it.

    Attributes:
        name: shown in test names.
        wrap: from (fn, model, an empty directory) to the transformed function.
        observes: its name in `obs`, None for a strategy transform.
        out: what its output must be, from the token losses and the batch.
        under_torch_func: whether it works there; else it must refuse with a message that names
            `veofunc.grad_and_value`.
    """

    name: str
    wrap: Callable[[Callable, nn.Module, Path], Callable]
    observes: str | None
    out: Callable[[Tensor, TensorDictBase], Tensor] = lambda token_loss, batch: token_loss
    under_torch_func: bool = True


def mean_of_counted(token_loss: Tensor, batch: TensorDictBase) -> Tensor:
    counted = batch["labels"] != -100
    return (token_loss * counted).sum() / counted.sum()


TRANSFORMS = (
    Row(
        "offload",
        lambda fn, model, directory: vf.offload(
            fn, vf.policies.everything, model=model, store=vf.DiskStore(directory)
        ),
        observes=None,
        under_torch_func=False,
    ),
    Row(
        "offload blocks",
        lambda fn, model, directory: vf.offload(
            fn,
            vf.policies.first_of(vf.policies.recompute, vf.policies.everything),
            model=model,
            store=vf.DiskStore(directory),
            blocks="layers.*",
        ),
        observes=None,
    ),
    Row(
        "with_channel_loss",
        lambda fn, model, directory: vf.with_channel_loss(fn, CHANNELS),
        observes="channel",
        out=mean_of_counted,
    ),
    Row(
        "monitor_router",
        lambda fn, model, directory: vf.monitor_router(fn, model=model),
        observes="router",
    ),
)
