"""Recomputation of single saved tensors: a tape of the operations in a block, replayed on demand.

While a block runs, each operation is written down with what it read. When the block ends, the tensors
that autograd saved in it and that the policy wants recomputed are given up, and of the tape only the
operations that lead to them are left, back to what is kept, offloaded, or came from outside. In backward
the first of them that is asked for lets these operations run once more: no module, no Python of the user,
no other operation runs twice.

What an operation read is written down as a value (what one storage held at one time) and how the tensor
showed it, so that views and changes in place need no special cases. What the tape cannot vouch for comes
from outside: results of custom autograd functions, of collectives, of anything that changes what the block
did not make.

Source: the idea is rematerialisation of a recorded program, as in `jax.checkpoint` and in the partitioner
of `torch.compile`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from veofunc.offload.layout import View, is_plain
from veofunc.offload.saved import Handle, SavedTensor

__all__ = ["Program", "Ref", "Source", "Tape", "Value", "make_program"]

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "fsdp")


class Value:
    """What one storage held at one time.

    Attributes:
        node: the operation that made it; None if it came from outside of the block.
        saved: its description; None for what is never moved, such as a parameter.
        tensor: a tensor that shows it, as long as it is held; never longer than the block runs.
    """

    __slots__ = ("_version", "node", "saved", "tensor")

    def __init__(self, node: Node | None):
        self.node = node
        self.saved: SavedTensor | None = None
        self.tensor: Tensor | None = None

    def hold(self, tensor: Tensor) -> None:
        # Not an alias: one that is made below autograd has a version counter of its own.
        self.tensor, self._version = tensor, tensor._version

    @property
    def is_held(self) -> bool:
        """Whether a tensor still shows it; one that was changed since does not."""
        return self.tensor is not None and self.tensor._version == self._version


@dataclass(frozen=True)
class Ref:
    """A tensor as an argument: a value, and how the tensor shows it."""

    value: Value
    view: View


@dataclass(eq=False)
class Node:
    """One operation of the tape.

    Attributes:
        func: the operation; in `args` and `kwargs` a `Ref` stands for each tensor.
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

    @property
    def reads(self) -> list[Ref]:
        return [leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]

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
        self.nodes, self._now = [], {}

    def ref(self, tensor: Tensor) -> Ref:
        """`tensor` as the tape knows it. Call it while the tape is paused."""
        storage = tensor.untyped_storage()
        known = self._now.get(storage._cdata)
        value = None if known is None else known[1]
        # A custom function's kernels may have written to its result, out of the tape's sight.
        if value is None or (value.node is not None and isinstance(tensor.grad_fn, BackwardCFunction)):
            value = self._enter(tensor)
        return Ref(value, View.of(tensor))

    def unsound(self) -> set[Value]:
        """Values that cannot be computed again: something from outside that leads to them has changed."""
        bad: set[Value] = set()
        for node in self.nodes:
            values = [ref.value for ref in node.reads]
            if any(v in bad or (v.node is None and not v.is_held) for v in values):
                bad.update(node.makes)
        return bad

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        with self.paused():
            return self._run(func, args, kwargs)

    def _run(self, func, args: tuple, kwargs: dict):
        if not self._is_replayable(func, args, kwargs):
            out = func(*args, **kwargs)
            for tensor in _written(func, args, kwargs):
                if torch._C._has_storage(tensor):
                    self._now.pop(tensor.untyped_storage()._cdata, None)
            return out
        written = _written(func, args, kwargs)
        old = [self.ref(tensor).value for tensor in written]

        def read(tensor: Tensor) -> Ref:
            ref = self.ref(tensor)
            if ref.value not in old and ref.value.node is not None and _makes_empty(ref.value.node.func):
                ref = Ref(self._enter(tensor), ref.view)  # somebody has filled it, out of the tape's sight
            return ref

        node = Node(func, _map(read, args), _map(read, kwargs), _random_states(func, args, kwargs))
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor, value in zip(written, old, strict=True):
            node.written.append((value, self._note(tensor, Value(node))))
        node.outputs = [self._output(node, tensor, before) for tensor in _tensors(out)]
        if node.makes:
            self.nodes.append(node)
        return out

    def _is_replayable(self, func, args: tuple, kwargs: dict) -> bool:
        """Whether the same operation on the same values gives the same results and changes nothing else."""
        if (
            not torch.is_grad_enabled()  # so is the inside of a custom function
            or not isinstance(func, torch._ops.OpOverload)
            or func.namespace in COLLECTIVES
            or "batch_norm" in func.name()  # some change the running statistics without saying so
            or not all(self.is_plain(t) or _is_empty(t) for t in _tensors((args, kwargs)))
        ):
            return False
        written = _written(func, args, kwargs)
        return len(written) < 2 and all(self.ref(tensor).value.node is not None for tensor in written)

    def _output(self, node: Node, tensor: Tensor, before: set[int]) -> Ref | None:
        if not torch._C._has_storage(tensor) or tensor.untyped_storage()._cdata in before:
            return None
        known = self._now.get(tensor.untyped_storage()._cdata)
        if known is not None and known[1].node is node:  # two results in one storage
            return None
        value = self._note(tensor, Value(node))
        if self.is_plain(tensor) and self.watcher.made(value, tensor, node.op):
            value.hold(tensor)
        return Ref(value, View.of(tensor))

    def _enter(self, tensor: Tensor) -> Value:
        value = self._note(tensor, Value(None))
        self.watcher.entered(value, tensor)
        value.hold(tensor)
        return value

    def _note(self, tensor: Tensor, value: Value) -> Value:
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being given to another storage.
        self._now[storage._cdata] = (StorageWeakRef(storage), value)
        return value


@dataclass(frozen=True)
class Source:
    """A value that need not be computed, because `handle` has it.

    Attributes:
        view: how the handle's tensor shows it.
        is_whole: whether every other view of the value can be had from it too.
        is_lent: whether autograd holds the handle as well, and will ask for it.
    """

    handle: Handle
    view: View
    is_whole: bool
    is_lent: bool

    def gives(self, view: View) -> bool:
        return self.is_whole or self.view == view

    def tensor(self) -> Tensor:
        return self.handle.borrow() if self.is_lent else self.handle.restore()


def make_program(
    nodes: Sequence[Node],
    sources: dict[Value, list[Source]],
    wanted: Sequence[tuple[Handle, Ref]],
    hold: Callable[[Value], Source | None],
) -> None:
    """Gives up the tensors of the `wanted` handles for a program that computes them again.

    Args:
        nodes: the tape of the block.
        sources: what need not be computed.
        wanted: handles of recomputable tensors.
        hold: asked for each further value that would be a good place to start from; None if it must be
            computed. Values from outside must be held.
    """

    def has(ref: Ref) -> bool:
        return any(source.gives(ref.view) for source in sources.get(ref.value, ()))

    def held(value: Value) -> bool:
        source = hold(value) if value.is_held else None
        if source is not None:
            sources.setdefault(value, []).append(source)
        return source is not None

    steps = _leading_to([ref for _, ref in wanted], nodes, has, held)
    program = Program(steps, sources, wanted)
    for handle, _ in wanted:
        handle.forget(program)


class Program:
    """The operations that lead to some saved tensors of one block."""

    def __init__(
        self,
        steps: Sequence[Node],
        sources: dict[Value, list[Source]],
        wanted: Iterable[tuple[Handle, Ref]],
    ):
        self._steps = steps
        used = {ref.value for node in steps for ref in node.reads}
        used.update(ref.value for _, ref in wanted)
        self._sources = {value: those for value, those in sources.items() if value in used}
        self._wanted = [(weakref.ref(handle), ref) for handle, ref in wanted]
        self._lock = threading.RLock()

    def recompute(self, handle: Handle) -> None:
        """Computes the tensor of `handle`, and those of others that backward asks for in the same pass.

        Raises:
            RuntimeError: an operation gives something of another shape than it gave in forward.
        """
        with self._lock:
            if not handle.waits:
                return
            alive = [(weak(), ref) for weak, ref in self._wanted]
            wanted = [(h, ref) for h, ref in alive if h is not None and h.waits and h.times <= handle.times]
            steps = _leading_to([ref for _, ref in wanted], self._steps, self._source)
            run = _Run(self._source, steps, {ref.value for _, ref in wanted})
            for h, ref in wanted:
                h.receive(run.read(ref))

    def _source(self, ref: Ref) -> Source | None:
        return next((source for source in self._sources.get(ref.value, ()) if source.gives(ref.view)), None)


class _Run:
    """One run of a program's steps; holds each value until its last use."""

    def __init__(self, source: Callable[[Ref], Source | None], steps: Sequence[Node], results: set[Value]):
        self._source = source
        self._storages: dict[Value, torch.UntypedStorage] = {}
        self._parts: dict[Ref, Tensor] = {}
        last = {ref.value: i for i, node in enumerate(steps) for ref in node.reads}
        with _as_below_autograd():
            for i, node in enumerate(steps):
                self._step(node, {old for old, _ in node.written if last[old] == i and old not in results})
                done = {ref.value for ref in node.reads if last[ref.value] == i} | set(node.makes)
                for value in done - results - {v for v in node.makes if v in last}:
                    self._storages.pop(value, None)

    def read(self, ref: Ref) -> Tensor:
        if ref.value in self._storages:
            return ref.view.on(self._storages[ref.value])
        if ref in self._parts:
            return self._parts[ref]
        source = self._source(ref)
        assert source is not None, "a program lacks a value that it reads"
        tensor = source.tensor()
        if source.is_whole:
            self._storages[ref.value] = tensor.untyped_storage()
            return ref.view.on(self._storages[ref.value])
        self._parts[ref] = tensor
        return tensor

    def _step(self, node: Node, free: set[Value]) -> None:
        own = {}  # storages that the operation may write to
        for old, _ in node.written:
            ref = next(ref for ref in node.reads if ref.value is old)
            storage = self.read(ref).untyped_storage()
            own[old] = storage if old in free and self._source(ref) is None else storage.clone()

        def argument(ref: Ref) -> Tensor:
            return ref.view.on(own[ref.value]) if ref.value in own else self.read(ref)

        with _random(node.random):
            out = node.func(*_map(argument, node.args, Ref), **_map(argument, node.kwargs, Ref))
        for tensor, made in zip(_tensors(out), node.outputs, strict=True):
            if made is None:
                continue
            if View.of(tensor) != made.view:
                raise RuntimeError(
                    f"recomputation of {node.func} gave a tensor of {View.of(tensor)}, in forward it was "
                    f"{made.view}; keep or offload what such an operation makes"
                )
            self._storages[made.value] = tensor.untyped_storage()
        for old, new in node.written:
            self._storages[new] = own[old]


def _leading_to(
    refs: Iterable[Ref],
    nodes: Sequence[Node],
    has: Callable[[Ref], object],
    held: Callable[[Value], bool] = lambda value: False,
) -> list[Node]:
    """Those of `nodes`, in order, that must run to compute `refs`, given those that one `has`.

    `held` is asked for each value that is missing, whether it is there after all.
    """
    missing = {ref.value: None for ref in refs if not has(ref)}
    steps = []
    for node in reversed(nodes):
        if not all(value not in missing or held(value) for value in node.makes):
            steps.append(node)
            missing.update((ref.value, None) for ref in node.reads if not has(ref))
    for value in missing:
        if value.node is None:
            held(value)
    return steps[::-1]


@contextlib.contextmanager
def _as_below_autograd() -> Generator[None]:
    """The tape is below autograd and autocast, so its operations run without them."""
    accelerator = torch.accelerator.current_accelerator()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in {"cpu", accelerator.type if accelerator else "cpu"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def _random(states: list[tuple[torch.Generator, Tensor]]) -> Generator[None]:
    """Lets the generators draw what they drew from these states, and go on afterwards as if nothing was."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def _random_states(func, args: tuple, kwargs: dict) -> list[tuple[torch.Generator, Tensor]]:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    generators = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    if not generators:
        devices = {torch.device(kwargs.get("device") or "cpu"), *(t.device for t in _tensors((args, kwargs)))}
        generators = [_default_generator(device) for device in devices]
    return [(generator, generator.get_state()) for generator in generators]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


@functools.cache
def _schema_writes(func: torch._ops.OpOverload) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of the arguments that `func` writes to."""
    written = [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(i for i, _ in written), frozenset(name for _, name in written)


def _written(func, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that `func` changes; if it does not say, all that it is given."""
    if not isinstance(func, torch._ops.OpOverload):
        return list(_tensors((args, kwargs)))
    positions, names = _schema_writes(func)
    if not names:
        return []
    given = [arg for i, arg in enumerate(args) if i in positions]
    return list(_tensors((given, [kwargs[name] for name in names if name in kwargs])))


def _makes_empty(func: torch._ops.OpOverload) -> bool:
    return "empty" in _name_of(func).split("_")


@functools.cache
def _name_of(func: torch._ops.OpOverload) -> str:
    return func._schema.name.split("::")[-1].strip("_")


def _is_empty(tensor: Tensor) -> bool:
    return tensor.numel() == 0 and torch._C._has_storage(tensor)


def _leaves(tree) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _leaves(item)
    else:
        yield tree


def _tensors(tree) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor))


def _map(change: Callable, tree, kind: type = Tensor):
    """`tree` with `change` applied to each leaf of `kind`."""
    if isinstance(tree, list | tuple):
        return type(tree)(_map(change, item, kind) for item in tree)
    if isinstance(tree, dict):
        return {name: _map(change, item, kind) for name, item in tree.items()}
    return change(tree) if isinstance(tree, kind) else tree
