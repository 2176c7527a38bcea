"""Recomputation of single saved tensors: the tape of a block, replayed on demand.

When a block ends, the tensors that autograd saved in it and that the policy wants recomputed are given up,
and of the tape only the operations that lead to them are left, back to what is kept, offloaded, or came
from outside. In backward the first of them that is asked for lets these operations run once more: no
module, no Python of the user, no other operation runs twice.

Source: the idea is rematerialisation of a recorded program, as in `jax.checkpoint` and in the partitioner
of `torch.compile`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from veofunc.offload.layout import View
from veofunc.offload.saved import Handle
from veofunc.offload.tape import Blank, Node, Ref, Value, replaced, tensors_in

__all__ = ["Program", "Source", "make_program"]


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

    def recompute(self, handle: Handle) -> Tensor:
        """The tensor of `handle`. Others that backward will ask for receive theirs.

        Raises:
            RuntimeError: what it is computed from was changed or freed, or an operation gives something of
                another shape than it gave in forward.
        """
        with self._lock:
            ready = handle.ready
            if ready is not None:  # another thread has asked
                return ready
            alive = [(weak(), ref) for weak, ref in self._wanted]
            wanted = {h: ref for h, ref in alive if h is not None and h.waits}
            steps = _leading_to(wanted.values(), self._steps, self._source)
            run = _Run(self._source, steps, {ref.value for ref in wanted.values()})
            computed = {h: run.read(ref) for h, ref in wanted.items()}
            for h, tensor in computed.items():
                h.receive(tensor)
            return computed[handle]

    def _source(self, ref: Ref) -> Source | None:
        return next((source for source in self._sources.get(ref.value, ()) if source.gives(ref.view)), None)


class _Run:
    """One run of a program's steps; holds each value until its last use."""

    def __init__(self, source: Callable[[Ref], Source | None], steps: Sequence[Node], results: set[Value]):
        self._source = source
        self._storages: dict[Value, torch.UntypedStorage] = {}
        self._parts: dict[Ref, Tensor] = {}
        last = {ref.value: i for i, node in enumerate(steps) for ref in node.reads}
        with _as_in_forward():
            for i, node in enumerate(steps):
                self._step(node)
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
        if tensor.untyped_storage().nbytes() < View.of(tensor).end:
            raise RuntimeError(
                f"recomputation reads a tensor of shape {list(tensor.shape)} whose memory was freed after "
                "forward, as FSDP does with parameters: let blocks= name the modules that are sharded, "
                "not modules around them, so that both run in the same order"
            )
        if source.is_whole:
            self._storages[ref.value] = tensor.untyped_storage()
            return ref.view.on(self._storages[ref.value])
        self._parts[ref] = tensor
        return tensor

    def _step(self, node: Node) -> None:
        def argument(leaf: Ref | Blank) -> Tensor:
            return leaf.tensor() if isinstance(leaf, Blank) else self.read(leaf)

        with _random(node.random):
            args, kwargs = replaced((node.args, node.kwargs), argument, (Ref, Blank))
            out = node.func(*args, **kwargs)
        for tensor, made in zip(tensors_in(out), node.outputs, strict=True):
            if made is None:
                continue
            if View.of(tensor) != made.view:
                raise RuntimeError(
                    f"recomputation of {node.func} gave a tensor of {View.of(tensor)}, in forward it was "
                    f"{made.view}; keep or offload what such an operation makes"
                )
            self._storages[made.value] = tensor.untyped_storage()
        for old, new in node.written:
            self._storages[new] = self._storages[old]  # nobody else reads what was there


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
        if value.op is None:
            held(value)
    return steps[::-1]


@contextlib.contextmanager
def _as_in_forward() -> Generator[None]:
    """The tape is below autocast. Nothing here requires a gradient, but kernels ask whether something may."""
    accelerator = torch.accelerator.current_accelerator()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
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
