"""`plan_offload`: what `offload` would do, found out without memory and without an accelerator."""

from __future__ import annotations

import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from veofunc.offload.call import Call, Settings
from veofunc.offload.layout import is_plain
from veofunc.offload.ledger import Ledger
from veofunc.offload.offload import make_settings
from veofunc.offload.recompute import Ref
from veofunc.offload.saved import Fate, Handle, SavedTensor, op_of
from veofunc.offload.stores import Store
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

    Runs `fn` on fake tensors, which have shapes and no elements: no memory, no time, nothing is written and
    no state changes. Bytes and fates are those of a real run on the same device.

    Args:
        fn, policy, model, store, keep, prefetch, blocks: as in `offload`.

    Returns:
        A function of the arguments of `fn` that returns a `Plan`.

    Raises:
        ValueError, TypeError: as `offload`; when called, ValueError if `fn` needs the value of a tensor.

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
        settings = replace(settings, paths={module: path for path, module in settings.model.named_modules()})

    def plan(*args, **kwargs) -> Plan:
        # Real parameters that fn closes over are turned into fake ones where they are used.
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, FlopCounterMode(display=False) as flops:
            args, kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            call = _DryCall(settings, mode, flops)
            try:
                with call.active():
                    out = fn(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"plan_offload runs {name_of(fn)} on tensors without elements, but it needs them in "
                    f"{error.func}; plan a function without that step"
                ) from error
            planned = call.plan(f"offload({name_of(fn)}, {policy!r})")
            del out  # what was saved lived until here
            return planned

    return plan


@dataclass(frozen=True)
class PlannedTensor:
    """One saved tensor of a plan.

    Attributes:
        saved: its description, as the policy sees it.
        fate: what becomes of it.
        is_shared: whether it is moved together with another that is the same tensor.
        is_fixed: whether it is a parameter, a buffer, or of a kind that always stays; no policy is asked.
        flops: floating-point operations of the forward pass until it is saved.
    """

    saved: SavedTensor
    fate: Fate
    is_shared: bool
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
        axes.axvline(len(self.forward) - 0.5, color="grey", linewidth=0.8)
        axes.set_xlabel("saved tensors: forward, then backward")
        axes.set_ylabel("held on the device, MiB")
        axes.set_ylim(0, 1.25 * max(*held, self.plain_bytes / MIB, 1e-6))
        axes.set_title(self.title)
        axes.legend(loc="upper left")
        return figure

    def _sums(self, amount: Callable[[PlannedTensor], int]) -> dict[str, int]:
        sums = dict.fromkeys(("packed", "kept", "deduplicated", "moved", "recomputed"), 0)
        kinds = {Fate.KEEP: "kept", Fate.RECOMPUTE: "recomputed"}
        for tensor in self.tensors:
            moved = "deduplicated" if tensor.is_shared else "moved"
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


@dataclass(eq=False)
class _Row:
    """A saved tensor while the dry run goes on."""

    saved: SavedTensor
    storage: StorageWeakRef  # also keeps its address from being given to another
    storage_bytes: int
    flops: int
    block: int
    is_fixed: bool
    is_extra: bool  # held for recomputation; autograd does not save it
    fate: Fate = Fate.KEEP
    is_shared: bool = False
    is_held: bool = False


class _DryCall(Call):
    """A call on fake tensors that moves nothing, and notes what it would do."""

    def __init__(self, settings: Settings, mode: FakeTensorMode, flops: FlopCounterMode):
        super().__init__(replace(settings, ledger=Ledger()))
        self.owned = {
            mode.from_tensor(tensor).untyped_storage()._cdata
            for tensor in _tensors_of(settings.model)
            if is_plain(tensor)
        }
        self.flop_counter = flops
        self.rows: list[_Row] = []
        self.row_of: weakref.WeakKeyDictionary[Handle, _Row] = weakref.WeakKeyDictionary()
        self.num_blocks = 0
        self.holders: Counter[int] = Counter()  # handles that hold each storage
        self.live = 0
        self.forward: list[int] = []

    @staticmethod
    def is_plain(tensor: Tensor) -> bool:
        return is_plain(tensor) or (
            type(tensor) is FakeTensor and tensor.layout is torch.strided and tensor.numel() > 0
        )

    def _handle(self, tensor: Tensor, saved: SavedTensor | None = None) -> Handle:
        if self.rows:
            self.forward.append(self.live)
        handle = super()._handle(tensor, saved)
        storage = tensor.untyped_storage()
        row = _Row(
            saved=saved or self._describe(tensor, op_of(tensor)),
            storage=StorageWeakRef(storage),
            storage_bytes=storage.nbytes(),
            flops=self.flop_counter.get_total_flops(),
            block=self.num_blocks,
            is_fixed=not self._is_movable(tensor),
            is_extra=saved is not None,
        )
        self.rows.append(row)
        self.row_of[handle] = row
        if not row.is_fixed:
            row.is_held = True
            self.live += row.storage_bytes * (self.holders[row.storage.cdata] == 0)
            self.holders[row.storage.cdata] += 1
            weakref.finalize(handle, self._release, row)
        return handle

    def _release(self, row: _Row) -> None:
        if row.is_held:
            row.is_held = False
            self.holders[row.storage.cdata] -= 1
            self.live -= row.storage_bytes * (self.holders[row.storage.cdata] == 0)

    def _known_late(self, handle: Handle, saved: SavedTensor, ref: Ref, recomputable: bool) -> SavedTensor:
        saved = super()._known_late(handle, saved, ref, recomputable)
        self.row_of[handle].saved = saved
        return saved

    def _move(self, handle: Handle) -> None:
        row, before = self.row_of[handle], self.num_moved
        super()._move(handle)
        row.fate, row.is_shared = Fate.OFFLOAD, self.num_moved == before
        self._release(row)

    def _given_up(self, handle: Handle) -> None:
        super()._given_up(handle)
        self.row_of[handle].fate = Fate.RECOMPUTE
        self._release(self.row_of[handle])

    def _end_block(self) -> None:
        super()._end_block()
        self.num_blocks += 1

    def plan(self, title: str) -> Plan:
        if self.rows:
            self.forward.append(self.live)
        saved = {row.storage.cdata: row.storage_bytes for row in self.rows if not row.is_fixed | row.is_extra}
        return Plan(
            tuple(PlannedTensor(r.saved, r.fate, r.is_shared, r.is_fixed, r.flops) for r in self.rows),
            tuple(self.forward),
            tuple(_backward(self.rows, self.live, self.settings.prefetch)),
            sum(saved.values()),
            self.flop_counter.get_total_flops(),
            title,
        )


def _backward(rows: list[_Row], live: int, prefetch: int) -> Iterator[int]:
    """Bytes held while backward goes through `rows` from the last to the first."""
    first_of = {row.storage.cdata: i for i, row in reversed(list(enumerate(rows))) if row.is_held}
    computed: dict[int, int] = {}  # by block, bytes that were recomputed and not used yet
    for i, row in reversed(list(enumerate(rows))):
        if row.fate is Fate.RECOMPUTE and row.block not in computed:
            computed[row.block] = sum(
                r.saved.nbytes for r in rows if r.block == row.block and r.fate is Fate.RECOMPUTE
            )
        ahead = 0
        for earlier in reversed(rows[:i]):
            if ahead >= prefetch:
                break
            ahead += earlier.saved.nbytes * (earlier.fate is Fate.OFFLOAD and not earlier.is_shared)
        yield live + sum(computed.values()) + ahead + row.saved.nbytes * (row.fate is Fate.OFFLOAD)
        if row.fate is Fate.RECOMPUTE:
            computed[row.block] -= row.saved.nbytes
        elif row.is_held and first_of[row.storage.cdata] == i:
            live -= row.storage_bytes


def _tensors_of(model: nn.Module | None) -> Iterable[Tensor]:
    return () if model is None else itertools.chain(model.parameters(), model.buffers())


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
