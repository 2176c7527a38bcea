"""`plan_offload`: what `offload` would do, found out without memory and without an accelerator."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from veofunc.compiling import as_written
from veofunc.offload.call import Settings
from veofunc.offload.dry import dry_run
from veofunc.offload.offload import make_settings
from veofunc.offload.saved import Fate, SavedTensor
from veofunc.offload.stores.store import Store
from veofunc.transform import name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Plan", "PlannedTensor", "plan_offload"]

MIB = 1 << 20


def plan_offload(
    fn: Callable,
    policy: Callable[[SavedTensor], Fate],
    *,
    model: nn.Module | None = None,
    store: Store | None = None,
    keep: int = 0,
    prefetch: int = 64 << 20,
    blocks: str | None = None,
) -> Callable[..., Plan]:
    """A dry run of `offload(fn, policy, ...)`: which tensors are saved, and what becomes of each.

    Runs `fn` on fake tensors, which have shapes and no elements: no memory, no time, and nothing is written.
    The model, its gradients and the random generators end up as they were; what `fn` does to other objects,
    such as a list, is done. Bytes and fates are those of a real run on the same device, except that what is
    compiled runs as it was written (the compiler stays as it was, and pauses meanwhile in all threads), and
    that workspaces of recurrent layers have no known size: they count as kept, with 0 bytes.

    Args:
        fn, policy, model, store, keep, prefetch, blocks: as in `offload`.

    Returns:
        A function of the arguments of `fn` that returns a `Plan`.

    Raises:
        ValueError, TypeError: as `offload`; when called, ValueError if `fn` needs the value of a tensor or is
            given a nested one.
        RuntimeError: when called, `fn` runs a kernel that is no operation of PyTorch, or wants a NumPy array.

    Example:
        >>> import tempfile, torch, veofunc as vf
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> store = vf.DiskStore(tempfile.mkdtemp())
        >>> plan = vf.plan_offload(model, vf.policies.everything, store=store)(torch.ones(2, 8))
        >>> plan.count["moved"], plan.bytes["moved"], plan.held_bytes
        (2, 128, 0)
    """
    settings = make_settings(fn, policy, model, store, keep, prefetch, blocks)
    if settings.model is not None:  # for the table, also if the policy does not ask for paths
        paths = {module: path for path, module in settings.model.named_modules()}
        settings = replace(settings, paths=paths, all_paths=paths)
    if settings.compiled is not None:  # nothing is compiled in a plan
        settings = replace(settings, blocks=settings.compiled.blocks, compiled=None)
    return _Planner(fn, settings)


@dataclass(frozen=True, eq=False, repr=False)
class _Planner:
    """What makes the plan, once it has the arguments of `fn`."""

    fn: Callable
    settings: Settings

    @torch.compiler.disable
    def __call__(self, *args, **kwargs) -> Plan:
        with as_written():
            run = dry_run(self.fn, self.settings, args, kwargs)
        place = {row: i for i, row in enumerate(run.rows)}
        return Plan(
            tuple(
                PlannedTensor(
                    row.saved,
                    row.fate,
                    None if row.same_as is None else place[row.same_as],
                    row.is_fixed,
                    row.flops,
                )
                for row in run.rows
            ),
            tuple(run.forward),
            tuple(run.backward),
            run.plain_bytes,
            run.flops,
            f"offload({name_of(self.fn)}, {self.settings.policy!r})",
        )

    def __getattr__(self, name: str):
        of_a_plan = name in {*dir(Plan), *Plan.__annotations__}
        raise AttributeError(f"no attribute {name!r}" + (f" of {self!r}" if of_a_plan else ""))

    def __repr__(self) -> str:
        name = name_of(self.fn)
        return (
            f"plan_offload({name}, {self.settings.policy!r}): not a plan yet, call it with the arguments of "
            f"{name}, as in plan_offload(...)(x)"
        )


@dataclass(frozen=True)
class PlannedTensor:
    """One saved tensor of a plan.

    Attributes:
        saved: its description, as the policy sees it.
        fate: what becomes of it.
        same_as: place in the plan's `tensors` of the one that it is moved together with, as they are the
            same tensor; else None.
        is_fixed: whether it is a parameter, a buffer, or of a kind that always stays; no policy is asked.
        flops: floating-point operations of the forward pass until it is saved.
    """

    saved: SavedTensor
    fate: Fate
    same_as: int | None
    is_fixed: bool
    flops: int


@dataclass(frozen=True, repr=False)
class Plan:
    """What one call of an offloaded function would do. Prints as a table.

    Attributes:
        tensors: every saved tensor, in the order in which they are saved.
        count, bytes: sums as in `stats()` of the transform: `packed`, `kept`, `deduplicated`, `moved`,
            `recomputed`.
        forward: bytes that saved tensors (parameters apart) hold on the device, after each of `tensors`.
        backward: the same while backward goes through them from the last to the first, with what is brought
            back or computed again; a prediction.
        plain_bytes: what they would hold at the end of forward without `offload`.
        flops: floating-point operations of the forward pass, as `torch.utils.flop_counter` counts them.
    """

    tensors: tuple[PlannedTensor, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    plain_bytes: int
    flops: int
    title: str

    @property
    def count(self) -> dict[str, int]:
        return self._sums(lambda tensor: 1)

    @property
    def bytes(self) -> dict[str, int]:
        return self._sums(lambda tensor: tensor.saved.nbytes)

    @property
    def held_bytes(self) -> int:
        """What saved tensors, parameters apart, hold on the device at the end of forward."""
        return self.forward[-1] if self.forward else 0

    @property
    def peak_bytes(self) -> int:
        """The most that they hold, in forward and backward."""
        return max((*self.forward, *self.backward), default=0)

    def plot(self) -> Figure:
        """The bytes held over forward and backward, as a matplotlib figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot()
        held = [nbytes / MIB for nbytes in (*self.forward, *self.backward)]
        axes.fill_between(range(len(held)), held, step="post", alpha=0.3)
        axes.step(range(len(held)), held, where="post", label="with this policy")
        axes.axhline(
            self.plain_bytes / MIB, linestyle="--", color="grey", label="everything kept, at the peak"
        )
        axes.axvline(len(self.forward) - 0.5, color="grey", linewidth=0.8, label="forward ends")
        axes.set_xlabel("saved tensors: forward, then backward")
        axes.set_ylabel("held on the device, MiB")
        axes.set_ylim(0, 1.25 * max(*held, self.plain_bytes / MIB, 1e-6))
        axes.set_title(textwrap.fill(self.title, 80))
        axes.legend(loc="upper left")
        return figure

    def _sums(self, amount: Callable[[PlannedTensor], int]) -> dict[str, int]:
        sums = dict.fromkeys(("packed", "kept", "deduplicated", "moved", "recomputed"), 0)
        kinds = {Fate.KEEP: "kept", Fate.RECOMPUTE: "recomputed"}
        for tensor in self.tensors:
            moved = "moved" if tensor.same_as is None else "deduplicated"
            sums["packed"] += amount(tensor)
            sums[kinds.get(tensor.fate, moved)] += amount(tensor)
        return sums

    def __repr__(self) -> str:
        return "\n".join((self.title, *_table(self.tensors), *self._totals()))

    def _totals(self) -> Iterable[str]:
        for event, nbytes in self.bytes.items():
            if self.count[event]:
                yield f"{event:<14}{self.count[event]:>7} tensors {_amount(nbytes):>11}"
        yield f"held after forward {_amount(self.held_bytes)}, without offload {_amount(self.plain_bytes)}"
        yield f"predicted peak {_amount(self.peak_bytes)}"


def _table(tensors: Iterable[PlannedTensor]) -> Iterator[str]:
    """One line for each kind of tensor; layers that differ by their number only share a line."""
    groups: dict[tuple, list[PlannedTensor]] = {}
    fixed = []
    for tensor in tensors:
        saved = tensor.saved
        path = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", saved.path)
        dtype = str(saved.dtype).removeprefix("torch.")
        key = (path, saved.name or saved.op, f"{dtype}{list(saved.shape)}", tensor.fate.name.lower())
        (fixed if tensor.is_fixed else groups.setdefault(key, [])).append(tensor)
    lines = [("path", "op or name", "tensor", "fate", "count", "bytes")]
    for (path, op, shape, fate), group in groups.items():
        nbytes = sum(tensor.saved.nbytes for tensor in group)
        lines.append((path or "-", op or "-", shape, fate, str(len(group)), _amount(nbytes)))
    if fixed:
        nbytes = sum(tensor.saved.nbytes for tensor in fixed)
        lines.append(("parameters, buffers", "-", "-", "keep", str(len(fixed)), _amount(nbytes)))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    for line in lines:
        left = "  ".join(text.ljust(width) for text, width in zip(line[:4], widths[:4], strict=True))
        yield (
            left
            + "  "
            + "  ".join(text.rjust(width) for text, width in zip(line[4:], widths[4:], strict=True))
        )


def _amount(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f} MiB" if nbytes >= 1 << 14 else f"{nbytes} B"
