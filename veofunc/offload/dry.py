"""A dry run: a call on tensors that have shapes and no elements, to see what would become of them."""

from __future__ import annotations

import contextlib
import itertools
import random
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    maybe_get_fake_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from veofunc.offload.call import Call, Settings, is_parameter
from veofunc.offload.layout import is_strided
from veofunc.offload.ledger import Ledger
from veofunc.offload.saved import Fate, Handle, Moved, SavedTensor, op_of
from veofunc.offload.tape import Ref
from veofunc.transform import name_of

__all__ = ["DryCall", "dry_run"]

NEEDS_ELEMENTS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# Operations on real tensors, or asked of fake ones in the midst of another: no business of the tape.
UNSEEN = (torch.ops.prim.device.default, torch.ops.aten.lift_fresh.default)


def dry_run(fn: Callable, settings: Settings, args: tuple, kwargs: dict[str, Any]) -> DryCall:
    """Runs `fn` on fake tensors; the state of the model and the random generators end up as they were.

    Raises:
        ValueError: `fn` needs the elements of a tensor.
    """
    # Real tensors that fn closes over are turned into fake ones where they are used.
    mode, flops = FakeTensorMode(allow_non_fake_inputs=True), _FlopCounter()
    # A kernel that is no operation of PyTorch shall raise; else it would crash.
    mode._allow_unsafe_data_ptr_access = False
    with _undone(settings.model, mode):
        call = DryCall(settings, mode, flops)
        args, kwargs = tree_map_only(Tensor, call.given, (args, kwargs))
        try:
            with mode, flops, call.active(), _Faking(call):
                out = fn(*args, **kwargs)
        except NEEDS_ELEMENTS as error:
            raise ValueError(
                f"plan_offload runs {name_of(fn)} on tensors without elements, but it needs them in "
                f"{error.func}; plan a function without that step"
            ) from error
        call.finish()
        del out  # what was saved lived until here
    return call


class Held:
    """Bytes of the distinct storages that something holds."""

    def __init__(self):
        self.nbytes = 0
        self._holders: Counter[int] = Counter()

    def add(self, storages: Mapping[int, int]) -> None:
        for address, nbytes in storages.items():
            self.nbytes += nbytes * (self._holders[address] == 0)
            self._holders[address] += 1

    def remove(self, storages: Mapping[int, int]) -> None:
        for address, nbytes in storages.items():
            self._holders[address] -= 1
            self.nbytes -= nbytes * (self._holders[address] == 0)


@dataclass(eq=False)
class Row:
    """A saved tensor.

    Attributes:
        tensor: an alias, for a backward pass within `fn`.
        storages: by address, the bytes of those that it shows; none for a parameter or buffer.
        flops: of the forward pass until it was saved.
        block: how many blocks had ended before.
        is_fixed: whether no policy is asked about it.
        is_extra: whether it is held for recomputation only; autograd does not save it.
        same_as: the tensor that it is moved together with.
    """

    saved: SavedTensor
    tensor: Tensor
    storages: Mapping[int, int]
    flops: int
    block: int
    is_fixed: bool
    is_extra: bool
    fate: Fate = Fate.KEEP
    same_as: Row | None = None
    is_held: bool = True
    is_alive: bool = True


class DryCall(Call):
    """A call on fake tensors that moves nothing, and notes what it would do.

    Attributes:
        rows: what was saved, in order.
        forward: bytes that are held after each of them.
        backward: the same, in a backward pass from the last to the first; a prediction.
        plain_bytes: bytes that would be held in the end if all were kept.
        flops: of the whole forward pass.
    """

    def __init__(self, settings: Settings, mode: FakeTensorMode, flop_counter: _FlopCounter):
        super().__init__(replace(settings, ledger=Ledger()))
        self.rows: list[Row] = []
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.plain_bytes = self.flops = 0
        self._mode, self._flop_counter, self._num_blocks = mode, flop_counter, 0
        self._fakes: list[Tensor] = []  # of real tensors; held, as the mode forgets those that die
        self._ops: dict[tuple[int, str], str] = {}  # what made the arguments, really
        self._row_of: weakref.WeakKeyDictionary[Handle, Row] = weakref.WeakKeyDictionary()
        self._first: weakref.WeakKeyDictionary[Moved, Row] = weakref.WeakKeyDictionary()
        self._held = Held()
        of_model = [self.fake(tensor) for tensor in _tensors_of(settings.model)]
        self.owned = {part.untyped_storage()._cdata for tensor in of_model for part in self._parts(tensor)}

    @staticmethod
    def is_plain(tensor: Tensor) -> bool:
        return type(tensor) is FakeTensor and is_strided(tensor)

    def given(self, argument: Tensor) -> Tensor:
        """`argument` of `fn` without its elements."""
        if argument.grad_fn is None:
            return self.fake(argument)
        fake = _Computed.apply(torch.zeros((), requires_grad=True), self.fake(argument.detach()))
        self._ops[fake.untyped_storage()._cdata, op_of(fake)] = op_of(argument)
        return fake

    def fake(self, tensor: Tensor) -> Tensor:
        """`tensor` without its elements; the same one each time."""
        if tensor.is_nested:
            raise ValueError("plan_offload cannot run on nested tensors, only on such as have a size")
        if maybe_get_fake_mode(tensor) is not self._mode:
            with self.tape.paused():
                tensor = self._mode.from_tensor(tensor)
            self._fakes.append(tensor)
        return tensor

    def pack(self, tensor: Tensor) -> Handle:
        return super().pack(self.fake(tensor))

    def name(self, tensor: Tensor, name: str) -> None:
        super().name(self.fake(tensor), name)

    def finish(self) -> None:
        """Once `fn` has returned, while its result lives."""
        if self.rows:
            self.forward.append(self._held.nbytes)
        plain = Held()
        for row in self.rows:
            if row.is_alive and not row.is_extra:
                plain.add(row.storages)
        self.plain_bytes, self.flops = plain.nbytes, self._flop_counter.total
        self.backward = list(self._backward())

    def _hooks(self, outer: tuple | None) -> tuple[Callable, Callable]:
        pack, unpack = super()._hooks(outer)
        return pack, self._unpack if unpack is Handle.restore else unpack

    def _unpack(self, handle: Handle) -> Tensor:
        tensor = self._row_of[handle].tensor
        return tensor if handle.present else tensor.clone()

    def _handle(self, tensor: Tensor, saved: SavedTensor | None = None) -> Handle:
        if self.rows:
            self.forward.append(self._held.nbytes)
        handle = super()._handle(tensor, saved)
        storages = self._storages_of(tensor)
        row = Row(
            saved or self._describe(tensor, op_of(tensor)),
            tensor.detach(),
            storages,
            self._flop_counter.total,
            self._num_blocks,
            is_fixed=not self._is_movable(tensor),
            is_extra=saved is not None,
        )
        self._held.add(storages)
        self.rows.append(row)
        self._row_of[handle] = row
        weakref.finalize(handle, self._died, row)
        return handle

    def _storages_of(self, tensor: Tensor) -> dict[int, int]:
        """By address, the bytes of the storages that `tensor` shows; none for a parameter or buffer."""
        if is_parameter(tensor):
            return {}
        tensors = self._parts(tensor) or ([tensor] if torch._C._has_storage(tensor) else [])
        storages = [part.untyped_storage() for part in tensors]
        return {s._cdata: s.nbytes() for s in storages if s._cdata not in self.owned}

    def _describe(self, tensor: Tensor, op: str) -> SavedTensor:
        return super()._describe(tensor, self._ops.get((_address(tensor), op), op))

    def _decide(self, handle: Handle, saved: SavedTensor) -> Fate:
        self._row_of[handle].saved = saved
        return super()._decide(handle, saved)

    def _known_late(self, handle: Handle, saved: SavedTensor, ref: Ref, recomputable: bool) -> SavedTensor:
        saved = super()._known_late(handle, saved, ref, recomputable)
        self._row_of[handle].saved = saved
        return saved

    def _move(self, handle: Handle) -> Moved:
        moved, row = super()._move(handle), self._row_of[handle]
        first = self._first.setdefault(moved, row)
        row.same_as = None if first is row else first
        self._give_up(row, Fate.OFFLOAD)
        return moved

    def _given_up(self, handle: Handle) -> None:
        super()._given_up(handle)
        self._give_up(self._row_of[handle], Fate.RECOMPUTE)

    def _give_up(self, row: Row, fate: Fate) -> None:
        row.fate, row.is_held = fate, False
        self._held.remove(row.storages)

    def _died(self, row: Row) -> None:
        row.is_alive = False
        if row.is_held:
            self._give_up(row, row.fate)

    def _end_block(self) -> None:
        super()._end_block()
        self._num_blocks += 1

    def _backward(self) -> Iterator[int]:
        """Bytes held while backward goes through the rows, from the last to the first."""
        rows, held = [row for row in self.rows if row.is_alive], Held()
        recomputed, extra = defaultdict(list), defaultdict(list)  # rows by block
        for row in rows:
            if row.fate is Fate.RECOMPUTE:
                recomputed[row.block].append(row)
            elif row.is_held:
                held.add(row.storages)
                extra[row.block].extend([row] if row.is_extra else ())
        moved = [row.saved.nbytes * (row.fate is Fate.OFFLOAD and row.same_as is None) for row in rows]
        before = [0, *itertools.accumulate(moved)]
        for i, row in reversed(list(enumerate(rows))):
            of_block = recomputed[row.block] if row.fate is Fate.RECOMPUTE else [None]
            if row is of_block[-1]:  # all at once
                for each in recomputed[row.block]:
                    held.add(each.storages)
            asked_for = bisect_right(before, before[i] - self.settings.prefetch, hi=i + 1) - 1
            ahead = before[i] - before[max(asked_for, 0)]
            yield held.nbytes + ahead + row.saved.nbytes * (row.fate is Fate.OFFLOAD)
            used = [row] if row.fate is Fate.RECOMPUTE or row.is_held > row.is_extra else []
            for each in [*used, *(extra[row.block] if row is of_block[0] else ())]:
                held.remove(each.storages)


class _Computed(torch.autograd.Function):
    """Makes a tensor look like the result of something, as `from_tensor` would with a warning."""

    @staticmethod
    def forward(ctx, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.data  # counts its own changes; else two of one tensor would have different versions

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Faking(TorchDispatchMode):
    """Lets the modes below see real tensors that `fn` closes over as fake ones."""

    supports_higher_order_operators = True

    def __init__(self, call: DryCall):
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in UNSEEN:
            with self.call.tape.paused():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, self.call.fake, (args, kwargs or {}))
        return func(*args, **kwargs)


class _FlopCounter(TorchDispatchMode):
    """Counts by the formulas of `torch.utils.flop_counter`, whose own mode keeps dropped graphs alive."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "overloadpacket", func))
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out


@contextlib.contextmanager
def _undone(model: nn.Module | None, mode: FakeTensorMode) -> Generator[None]:
    """Puts back the random states of torch, numpy and Python, and what became fake in the model."""
    modules = [] if model is None else list(model.modules())
    tables: list[dict[str, Any]] = [
        table for module in modules for table in (vars(module), module._parameters, module._buffers)
    ]
    before = [dict(table) for table in tables]
    grads = [] if model is None else [(parameter, parameter.grad) for parameter in model.parameters()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for parameter, grad in grads:
            parameter.grad = grad
        for table, content in zip(tables, before, strict=True):
            for name in [name for name, value in table.items() if _is_fake(value, mode)]:
                if name in content:
                    table[name] = content[name]
                else:
                    del table[name]


def _is_fake(value: object, mode: FakeTensorMode) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(v, Tensor) and maybe_get_fake_mode(v) is mode for v in values)


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


def _tensors_of(model: nn.Module | None) -> Iterator[Tensor]:
    return iter(()) if model is None else itertools.chain(model.parameters(), model.buffers())
