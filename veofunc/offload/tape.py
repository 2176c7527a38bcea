"""A tape: the operations of a block, written down while it runs.

What an operation read is written down as a value (what one storage held at one time) and how the tensor
showed it, so that views and changes in place need no special cases. What the tape cannot vouch for comes
from outside: results of custom autograd functions, of collectives, of compiled code, of what changes
something that the block did not make.

A kernel that is no operation of PyTorch may write out of its sight, too. That is found out where PyTorch
allows it: in a custom function that says so by `mark_dirty` or returns what it wrote, and in a tensor that
was made empty or of zeros to be filled. Elsewhere it is not, and nor is it by autograd.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from veofunc.offload.layout import Parts, View, is_plain
from veofunc.offload.saved import SavedTensor, node_of

__all__ = ["Blank", "Node", "Ref", "Tape", "Value", "leaves", "replaced", "tensors_in"]

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem")
# In training they change running statistics without saying so, but give the same without any.
BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
# What else is changed without saying so, as the schemas of PyTorch's operations call it.
CHANGED_ARGUMENTS = ("running_mean", "running_var", "dropout_state")


class Value:
    """What one storage held at one time.

    Attributes:
        op: the operation that made it, as `SavedTensor.op` has it; None if it came from outside.
        saved: its description; None for what is never moved, such as a parameter.
        tensor: a tensor that shows it, as long as it is held; never longer than the block runs.
        lost: whether its storage may hold something else by now.
    """

    __slots__ = ("_address", "_function", "_version", "lost", "op", "saved", "tensor")

    def __init__(self, tensor: Tensor, op: str | None = None, *, is_written: bool = False):
        self.op = op
        self.saved: SavedTensor | None = None
        self.tensor: Tensor | None = None
        self.lost = False
        self._address = _address(tensor)
        self._version = tensor._version + is_written  # PyTorch counts when the operation is over
        self._function = None if op else _custom_function(tensor)

    def hold(self, tensor: Tensor) -> None:
        # Not an alias: one that is made below autograd has a version counter of its own.
        self.tensor = tensor

    def lose(self) -> None:
        self.lost, self.tensor = True, None

    @property
    def is_held(self) -> bool:
        """Whether a tensor still shows it; one that was changed since, or given other memory, does not."""
        tensor = self.tensor
        return tensor is not None and tensor._version <= self._version and _address(tensor) == self._address

    def is_shown_by(self, tensor: Tensor) -> bool:
        """Whether `tensor`, of the same storage, was not written to out of the tape's sight."""
        return tensor._version <= self._version and _custom_function(tensor) in (None, self._function)


@dataclass(frozen=True)
class Ref:
    """A tensor as an argument: a value, and how the tensor shows it."""

    value: Value
    view: View


@dataclass(frozen=True)
class Blank:
    """A tensor as an argument of which only the shape and the like matter."""

    view: View
    device: torch.device

    def tensor(self) -> Tensor:
        shape, stride = self.view.shape, self.view.stride
        return torch.empty_strided(shape, stride, dtype=self.view.dtype, device=self.device)


@dataclass(eq=False)
class Node:
    """One operation of the tape.

    Attributes:
        func: the operation; in `args` and `kwargs` a `Ref` or a `Blank` stands for each tensor.
        random: the random generators that it may have drawn from, each with its state before.
        outputs: one for each tensor among its results: the value it made and how that is shown, or None
            for a result that only shows what was there.
        written: the values it replaced, and what it replaced them by.
    """

    func: Any
    args: tuple
    kwargs: dict
    random: list[tuple[torch.Generator, Tensor]]
    outputs: list[Ref | None] = field(default_factory=list)
    written: list[tuple[Value, Value]] = field(default_factory=list)

    @property
    def op(self) -> str:
        """The operation's name as `SavedTensor.op` has it."""
        return _name_of(self.func)

    @functools.cached_property
    def reads(self) -> list[Ref]:
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]

    @property
    def makes(self) -> list[Value]:
        return [out.value for out in self.outputs if out is not None] + [new for _, new in self.written]


class Watcher(Protocol):
    """Who is told what the tape sees, and describes the values in `value.saved`."""

    def entered(self, value: Value, tensor: Tensor) -> None:
        """`tensor` comes from outside."""
        ...

    def made(self, value: Value, tensor: Tensor, op: str) -> bool:
        """The operation `op` made `tensor`. Whether to hold it, until the block ends at least."""
        ...


class Tape(TorchDispatchMode):
    """Writes down the operations of one block at a time, while it is `recording`."""

    supports_higher_order_operators = True

    watcher: Watcher

    def __init__(self, is_plain: Callable[[Tensor], bool] = is_plain):
        super().__init__()
        self.is_plain = is_plain
        self.recording = False
        self.nodes: list[Node] = []
        self._now: dict[int, tuple[StorageWeakRef, Value]] = {}  # what each storage holds at the moment
        self._copied: set[Value] = set()  # of which copies are read

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled regions run as they would without it

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def start(self, watcher: Watcher) -> None:
        self.watcher, self.recording = watcher, True

    def clear(self) -> None:
        """Forgets the block. What still uses its values holds none of their tensors."""
        self.__dict__.pop("watcher", None)
        self.recording = False
        for value in [v for node in self.nodes for v in (*node.makes, *(ref.value for ref in node.reads))]:
            value.tensor = None
        self.nodes, self._now, self._copied = [], {}, set()

    def ref(self, tensor: Tensor) -> Ref:
        """`tensor` as the tape knows it. Call it while the tape is paused."""
        value = self._known(tensor)
        if value is None or not value.is_shown_by(tensor):
            value = self._enter(tensor)
        return Ref(value, View.of(tensor))

    def read(self, tensor: Tensor) -> Ref:
        """As `ref`, for a use of what is in `tensor`, which somebody must have filled by now."""
        ref = self.ref(tensor)
        return Ref(self._enter(tensor), ref.view) if _is_to_be_filled(ref.value) else ref

    @property
    def has_freed(self) -> bool:
        """Whether what came from outside has no memory any more."""
        held = (value.tensor for _, value in self._now.values() if value.op is None)
        return any(tensor is not None and _is_freed(tensor) for tensor in held)

    def unsound(self) -> set[Value]:
        """Values that cannot be computed again: something from outside that leads to them has changed.

        Or may change without saying so.
        """
        bad = set(self._copied)
        for node in self.nodes:
            values = [ref.value for ref in node.reads]
            if any(v in bad or (v.op is None and not v.is_held) for v in values):
                bad.update(node.makes)
        return bad

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        with self.paused():
            pure = _without_statistics(func, args)
            tensors = tensors_in((pure, kwargs))
            written = self._written(func, pure, kwargs)
            if not self._is_replayable(func, tensors, written):
                return self._run_unseen(func, args, kwargs)
            if _is_view(func):
                for tensor in tensors:
                    self.ref(tensor)  # the whole of what is viewed
                return func(*args, **kwargs)
            return self._run(func, args, kwargs, pure, tensors, written)

    def _run_unseen(self, func, args: tuple, kwargs: dict):
        changed = [tensor.untyped_storage() for tensor in self._written(func, args, kwargs)]
        out = func(*args, **kwargs)
        for storage in changed:
            _, value = self._now.pop(storage._cdata, (None, None))
            if value is not None:
                value.lose()
        return out

    def _run(
        self, func, args: tuple, kwargs: dict, pure: tuple, tensors: list[Tensor], written: list[Tensor]
    ):
        """Writes the operation down, as one of the arguments `pure`."""
        old = [self.ref(tensor).value for tensor in written]

        statistics = {id(tensor) for tensor in _statistics(func, pure)}

        def read(tensor: Tensor) -> Ref | Blank:
            if _reads_shapes_only(func):
                return Blank(View.of(tensor), tensor.device)
            if id(tensor) in statistics:
                return self._copy(tensor)
            ref = self.ref(tensor)
            return ref if ref.value in old else self.read(tensor)

        random = _random_states(func, args, kwargs)
        node = Node(func, replaced(pure, read), replaced(kwargs, read), random)
        shown = {_address(tensor) for tensor in tensors}
        out = func(*args, **kwargs) if pure is args else self._run_unseen(func, args, kwargs)
        for tensor, value in zip(written, old, strict=True):
            node.written.append((value, self._note(tensor, Value(tensor, node.op, is_written=True))))
        node.outputs = [self._output(node, tensor, shown) for tensor in tensors_in(out)]
        if node.makes:
            self.nodes.append(node)
        return out

    def _is_replayable(self, func, tensors: list[Tensor], written: list[Tensor]) -> bool:
        """Whether the same operation on the same values gives the same results and changes nothing else."""
        return (
            torch.is_grad_enabled()  # not so inside of a custom function
            and isinstance(func, torch._ops.OpOverload)
            and func.namespace not in COLLECTIVES
            and _name_of(func) != "set"  # gives a tensor other memory
            and all(self._is_readable(tensor) for tensor in tensors)
            and len(written) < 2
            and all(self._is_replaceable(func, tensor) for tensor in written)
        )

    def _is_readable(self, tensor: Tensor) -> bool:
        is_empty = tensor.numel() == 0 and torch._C._has_storage(tensor)
        return self.is_plain(tensor) or is_empty

    def _is_replaceable(self, func, tensor: Tensor) -> bool:
        """Whether the tape knows what `func` changes."""
        ref = self.ref(tensor)
        if ref.value.op is None:
            return False
        # Else somebody may have filled it already, out of the tape's sight.
        is_whole = _overwrites(func) and ref.view.covers(tensor.untyped_storage().nbytes())
        return is_whole or not _is_to_be_filled(ref.value, ("empty",))

    def _written(self, func, args: tuple, kwargs: dict) -> list[Tensor]:
        """The tensors that `func` changes, those inside of wrappers too."""
        if not isinstance(func, torch._ops.OpOverload):
            return []  # higher-order operators are functional
        positions, names = _schema_writes(func)
        if not names or (func.name() in BATCH_NORMS and not args[5]):  # in evaluation
            return []
        given = [arg for i, arg in enumerate(args) if i in positions]
        return [
            part
            for tensor in tensors_in((given, [kwargs[name] for name in names if name in kwargs]))
            for part in ([tensor] if self._is_readable(tensor) else Parts.of(tensor, self.is_plain).tensors)
        ]

    def _output(self, node: Node, tensor: Tensor, shown: set[int | None]) -> Ref | None:
        address = _address(tensor)
        if address is None or address in shown:
            return None
        shown.add(address)  # there may be two results in one storage
        value = self._note(tensor, Value(tensor, node.op))
        if self.is_plain(tensor) and self.watcher.made(value, tensor, node.op):
            value.hold(tensor)
        return Ref(value, View.of(tensor))

    def _enter(self, tensor: Tensor) -> Value:
        value = self._note(tensor, Value(tensor))
        self.watcher.entered(value, tensor)
        value.hold(tensor)
        return value

    def _copy(self, tensor: Tensor) -> Ref:
        self._copied.add(self.ref(tensor).value)
        copy = tensor.clone()
        return Ref(self._enter(copy), View.of(copy))

    def _known(self, tensor: Tensor) -> Value | None:
        return self._now.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def _note(self, tensor: Tensor, value: Value) -> Value:
        before = self._known(tensor)
        if before is not None:
            before.lose()
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being given to another storage.
        self._now[storage._cdata] = (StorageWeakRef(storage), value)
        return value


def _is_freed(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


def _custom_function(tensor: Tensor) -> int | None:
    """Which run of a custom autograd function gave `tensor`, if one did."""
    node = node_of(tensor)
    return id(node) if isinstance(node, BackwardCFunction) else None


def _is_to_be_filled(value: Value, how: tuple[str, ...] = ("empty", "zeros")) -> bool:
    return value.op is not None and any(word in how for word in value.op.split("_"))


def _without_statistics(func, args: tuple) -> tuple:
    """`args`; for a batch norm in training without the running statistics, which it updates."""
    is_batch_norm = isinstance(func, torch._ops.OpOverload) and func.name() in BATCH_NORMS
    return (*args[:3], None, None, *args[5:]) if is_batch_norm and args[5] else args


def _statistics(func, args: tuple) -> list[Tensor]:
    """The running statistics that a batch norm in evaluation reads.

    One in training may change them before backward, and nothing would tell.
    """
    is_batch_norm = isinstance(func, torch._ops.OpOverload) and func.name() in BATCH_NORMS
    return tensors_in(args[3:5]) if is_batch_norm and not args[5] else []


@functools.cache
def _schema_writes(func: torch._ops.OpOverload) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of the arguments that `func` writes to."""

    def unsaid(name: str) -> bool:
        if func.namespace == "c10d":
            return not name.startswith("input")
        return name in CHANGED_ARGUMENTS and "backward" not in func.name()

    written = [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or unsaid(argument.name)
    ]
    return frozenset(i for i, _ in written), frozenset(name for _, name in written)


@functools.cache
def _is_view(func: torch._ops.OpOverload) -> bool:
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    return alias is not None and not alias.is_write


@functools.cache
def _reads_shapes_only(func: torch._ops.OpOverload) -> bool:
    return func.namespace == "aten" and (
        _name_of(func).endswith("_like") or _name_of(func).startswith("new_")
    )


@functools.cache
def _overwrites(func: torch._ops.OpOverload) -> bool:
    """Whether what `func` writes to need not be read."""
    return func.namespace == "aten" and (
        _name_of(func) in ("copy", "fill", "zero")
        or torch.Tag.nondeterministic_seeded in func.tags
        or any(argument.is_out for argument in func._schema.arguments)
    )


@functools.cache
def _name_of(func: torch._ops.OpOverload) -> str:
    return func._schema.name.split("::")[-1].strip("_")


def _random_states(func, args: tuple, kwargs: dict) -> list[tuple[torch.Generator, Tensor]]:
    # Operations that others have registered rarely carry tags.
    if torch.Tag.nondeterministic_seeded not in func.tags and func.namespace in ("aten", "prims"):
        return []
    generators = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    if not generators:
        devices = {tensor.device for tensor in tensors_in((args, kwargs))}
        devices = devices or {torch.device(kwargs.get("device") or "cpu")}
        generators = [_default_generator(device) for device in devices]
    return [(generator, generator.get_state()) for generator in generators]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def leaves(tree) -> list[Any]:
    """What is in the lists, tuples and dictionaries of `tree`."""
    if isinstance(tree, dict):
        return leaves(list(tree.values()))
    if not isinstance(tree, list | tuple):
        return [tree]
    found: list[Any] = []
    for item in tree:
        if isinstance(item, list | tuple | dict):
            found += leaves(item)
        else:
            found.append(item)
    return found


def tensors_in(tree) -> list[Tensor]:
    """The tensors in `tree`."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def replaced(tree, change: Callable, kind: type | tuple[type, ...] = Tensor):
    """`tree` with `change` applied to each leaf of `kind`."""
    if isinstance(tree, list | tuple):
        return type(tree)([replaced(item, change, kind) for item in tree])
    if isinstance(tree, dict):
        return {name: replaced(item, change, kind) for name, item in tree.items()}
    return change(tree) if isinstance(tree, kind) else tree
