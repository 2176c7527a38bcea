"""Sums over steps and over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["Window", "all_reduce"]


@dataclass(frozen=True, eq=False)
class Window:
    """Observations added up over steps. Immutable: `add` returns a new window.

    It can live in a train state (`train_state(model, optimizer, window=window)`) and comes back as
    `Window(**state["window"])`.

    Attributes:
        obs: the sums, as the transforms returned them; empty in an empty window.
        first_step: first step that was added; 0 in an empty window.
        last_step: last step that was added; 0 in an empty window.
        num_steps: number of different steps; micro-batches of one step count once.

    Example:
        >>> import torch, veofunc as vf
        >>> from tensordict import TensorDict
        >>> obs = TensorDict({"channel": {"token_count": torch.tensor([2, 1])}})
        >>> window = vf.Window().add(obs, step=1).add(obs, step=2)
        >>> window.obs["channel", "token_count"]
        tensor([4, 2])
        >>> window
        Window(steps 1-2)
        >>> vf.Window().empty
        True
    """

    obs: TensorDictBase = field(default_factory=TensorDict)
    first_step: int = 0
    last_step: int = 0
    num_steps: int = 0

    @property
    def empty(self) -> bool:
        """Whether nothing was added yet."""
        return self.num_steps == 0

    def add(self, obs: TensorDictBase, step: int) -> Window:
        """A new window with `obs` of `step` added.

        Args:
            obs: sums, as an observing transform returns them; the same structure at every step.
            step: the step it belongs to, an int that never falls.

        Returns:
            A window over the steps of this one and `step`.

        Raises:
            TypeError: `step` is not an int, or `obs` is not a TensorDict.
            ValueError: `step` is smaller than the last one, or `obs` has other names or shapes.
        """
        _check_sums(obs)
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step must be an int, got {step!r}")
        if self.empty:
            return Window(obs.clone(), step, step, 1)
        if step < self.last_step:
            raise ValueError(f"step must be at least the window's last step {self.last_step}, got {step}")
        ours, theirs = _structure(self.obs), _structure(obs)
        if ours != theirs:
            raise ValueError(
                "obs must have the names, shapes and dtypes of the window's sums.\n"
                f"window: {ours}\nobs:    {theirs}"
            )
        # A window that was restored is in host memory; the new sums say where it goes on.
        total = self.obs.apply(lambda mine, new: mine.to(new.device) + new, obs)
        assert total is not None  # only an `apply` that drops its results returns None
        return Window(total, self.first_step, step, self.num_steps + (step > self.last_step))

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Window:
        """This window with its sums added over the ranks of `group`. A collective: every rank calls it.

        Raises:
            ValueError: see `all_reduce`.
        """
        return Window(all_reduce(self.obs, group), self.first_step, self.last_step, self.num_steps)

    def __repr__(self) -> str:
        return "Window(empty)" if self.empty else f"Window(steps {self.first_step}-{self.last_step})"


def all_reduce(obs: TensorDictBase, group: dist.ProcessGroup | None = None) -> TensorDictBase:
    """The sum of `obs` over the ranks of `group`, as a new TensorDict. A collective: every rank calls it.

    Without an initialised process group there is one rank, and the result is a copy. One small collective
    compares the structure, then there is one per dtype.

    Args:
        obs: sums; the same names, shapes and dtypes on every rank.
        group: the ranks whose sums add; by default all.

    Returns:
        The sums over the ranks, in the structure of `obs`; `obs` is unchanged.

    Raises:
        ValueError: on every rank, if the structure differs between ranks; names who has what.
        TypeError: `obs` is not a TensorDict.

    Example:
        >>> import torch, veofunc as vf
        >>> from tensordict import TensorDict
        >>> vf.all_reduce(TensorDict({"count": torch.tensor(3)}))["count"]
        tensor(3)
    """
    _check_sums(obs)
    total = obs.clone()
    if not (dist.is_available() and dist.is_initialized()):
        return total
    _check_same_structure(total, group)
    leaves = _leaves(total)
    for dtype in sorted({leaf.dtype for _, leaf in leaves}, key=str):
        same = [leaf for _, leaf in leaves if leaf.dtype == dtype]
        flat = torch.cat([leaf.reshape(-1) for leaf in same])
        dist.all_reduce(flat, group=group)
        for leaf, part in zip(same, flat.split([leaf.numel() for leaf in same]), strict=True):
            leaf.copy_(part.view_as(leaf))
    return total


def _check_sums(obs: TensorDictBase) -> None:
    if not isinstance(obs, TensorDictBase):
        raise TypeError(
            "obs must be a TensorDict of sums, as an observing transform returns it (of a window: "
            f"window.obs), got {type(obs).__name__}"
        )


def _check_same_structure(obs: TensorDictBase, group: dist.ProcessGroup | None) -> None:
    structures: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(structures, _structure(obs), group=group)
    if len(set(structures)) > 1:
        ranks = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(structures))
        raise ValueError(
            "obs must have the same names, shapes and dtypes on every rank of the group (a rank without "
            f"tokens still has its zeros).\n{ranks}"
        )


def _structure(obs: TensorDictBase) -> str:
    """Names, shapes and dtypes of all sums, in words that compare equal iff the sums can be added."""
    parts = [f"{' > '.join(key)} {list(leaf.shape)} {leaf.dtype}" for key, leaf in _leaves(obs)]
    return ", ".join(parts) or "empty"


def _leaves(obs: TensorDictBase) -> list[tuple[tuple[str, ...], Tensor]]:
    items = cast(Iterable[tuple[Any, Any]], obs.items(include_nested=True, leaves_only=True))
    leaves = [(key if isinstance(key, tuple) else (key,), leaf) for key, leaf in items]
    return sorted(leaves, key=lambda item: item[0])
