"""What autograd saves, and the handle it holds in its place."""

from __future__ import annotations

import enum
import re
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from veofunc.offload.ahead import ReadAhead
from veofunc.offload.layout import Parts, emptied
from veofunc.offload.ledger import Ledger
from veofunc.offload.stores.store import Slot, Store

__all__ = ["Fate", "Handle", "Moved", "SavedTensor", "node_of", "op_of"]

# Autograd nodes of operations that show a tensor's memory in another way.
VIEWS = frozenset(
    (
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "reshape_alias",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsafe_split",
        "unsafe_view",
        "unsqueeze",
        "view",
        "view_as_real",
    )
)


class Fate(enum.Enum):
    """What becomes of a saved tensor."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SavedTensor:
    """A description of a tensor that autograd saves: what a policy decides by.

    Attributes:
        path: path of the innermost module whose forward saves it, as in `model.named_modules()`; `""`
            outside of the model's modules.
        op: the operation that made it, as PyTorch calls it without overloads and outer underscores
            (`"mm"`, `"gelu"`, `"native_layer_norm"`); views are looked through. `""` if none did: inputs,
            and results that have no gradient.
        shape: its shape.
        dtype: its dtype.
        device: its device.
        nbytes: bytes of its elements, repetition by `expand` not counted.
        index: how many tensors this call of the wrapped function saved before it.
        name: what `veofunc.checkpoint_name` called it, if anything.
        recomputable: whether it can be recomputed: an operation in one of the `blocks` made it. What
            enters a block from outside cannot.
    """

    path: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    index: int
    name: str | None = None
    recomputable: bool = False


def op_of(tensor: Tensor) -> str:
    """The operation that made the values of `tensor`, as `SavedTensor.op` calls it."""
    node = node_of(tensor)
    while node is not None:
        op = _op_of_node(node.name())
        if op not in VIEWS:
            return op
        node = node.next_functions[0][0]
    return ""


def node_of(tensor: Tensor) -> torch.autograd.graph.Node | None:
    """The node of the graph that made `tensor`; None also if autograd refuses to look at it."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # some views that were changed in place
        return None


def _op_of_node(name: str) -> str:
    if name.endswith("AccumulateGrad"):
        return ""
    camel = re.sub(r"Backward\d*$", "", name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", camel).lower()


class Moved:
    """Owns the copy of one tensor in a store. Handles of tensors that are the same tensor share it."""

    __slots__ = (
        "__weakref__",
        "_is_ahead",
        "_kind",
        "_ledger",
        "_parts",
        "_slots",
        "ahead",
        "gets",
        "nbytes",
    )

    def __init__(
        self, store: Store, tensor: Tensor, nbytes: int, ledger: Ledger, ahead: ReadAhead | None = None
    ):
        self._parts = Parts.of(tensor)
        start = time.perf_counter()
        self._slots = [_put(store, part) for part in self._parts.tensors]
        ledger.waited(time.perf_counter() - start)
        self._parts.tensors.clear()
        self._kind = _kind(tensor)
        self.nbytes, self._ledger, self.ahead = nbytes, ledger, ahead
        self._is_ahead, self.gets = False, 0
        ledger.add("live", nbytes)

    def prefetch(self) -> int:
        """Asks the store to bring the tensor back soon; how many bytes that adds to what is on its way."""
        if self._is_ahead:
            return 0
        self._is_ahead = True
        for slot in self._slots:
            prefetch = getattr(slot, "prefetch", None)
            if prefetch is not None:
                prefetch()
        return self.nbytes

    def get(self) -> Tensor:
        """The tensor again; say `wanted` before."""
        start = time.perf_counter()
        tensor = self._parts.together([slot.get() for slot in self._slots])
        self._ledger.waited(time.perf_counter() - start)
        if not isinstance(tensor, Tensor) or _kind(tensor) != self._kind:
            got = _kind(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"the store put away a tensor of {self._kind}, and gave back {got}")
        return tensor

    def wanted(self) -> None:
        """It is no longer ahead, and not to be asked for again in this pass."""
        self.gets += 1
        self._arrived()

    def _arrived(self) -> None:
        if self._is_ahead and self.ahead is not None:
            self._is_ahead = False
            self.ahead.arrived(self.nbytes)

    def __del__(self):
        if hasattr(self, "gets"):  # else the store failed
            self._arrived()
            self._ledger.add("live", -self.nbytes, count=-1)


def _put(store: Store, tensor: Tensor) -> Slot:
    slot = store.put(tensor.detach())  # an alias: the store may go on reading when the handle is emptied
    if not isinstance(slot, Slot):
        raise TypeError(f"put of {store!r} must return a slot with a method get, got {slot!r}")
    return slot


def _kind(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype, tensor.device


class Recipe(Protocol):
    """How to compute a saved tensor again."""

    def recompute(self, handle: Handle) -> Tensor:
        """The tensor of `handle`. Others that wait for theirs may get it too, by `receive`."""
        ...


class Handle:
    """What autograd holds for a saved tensor. It owns the tensor or its copy, and dies with the graph.

    It also does what autograd leaves out as soon as a hook packs a tensor: it refuses to give back a
    tensor that was changed in place after it was saved.
    """

    __slots__ = (
        "__weakref__",
        "_ledger",
        "_moved",
        "_recipe",
        "_restored",
        "_version",
        "ahead",
        "has_history",
        "nbytes",
        "operation",
        "position",
        "ready",
        "saved",
        "starts",
        "tensor",
        "times",
    )

    def __init__(self, tensor: Tensor, nbytes: int, ledger: Ledger, ahead: ReadAhead):
        # A detached alias, because the tensor itself may hold, through its grad_fn, this very handle.
        # When it is given up it is empty and shares only the version counter.
        self.tensor = tensor.detach()
        self.nbytes, self.ahead = nbytes, ahead
        self.has_history = tensor.requires_grad  # so that no operation writes to it without saying so
        self.operation: tuple[int, int] | None = None  # thread and number of the one that saved it
        self.position = ahead.position
        self.times = 0  # how often it was restored
        self.saved: SavedTensor | None = None  # what the policy was asked about
        self.starts: str | None = None  # the block that is computed again from it; autograd did not save it
        self.ready: Tensor | None = None  # brought back, or computed, before backward asked for it
        self._version = tensor._version
        self._ledger = ledger
        self._moved: Moved | None = None
        self._recipe: Recipe | None = None
        self._restored = False

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since it was saved."""
        return self.tensor._version != self._version

    @property
    def is_moved(self) -> bool:
        return self._moved is not None

    @property
    def present(self) -> bool:
        """Whether the tensor itself is still held."""
        return self._moved is None and self._recipe is None

    def move(self, moved: Moved) -> None:
        """Gives the tensor up for its copy, but goes on watching its version counter."""
        self._moved = moved
        emptied(self.tensor)

    def forget(self, recipe: Recipe) -> None:
        """Gives the tensor up, as it can be computed again."""
        self._recipe = recipe
        emptied(self.tensor)

    def receive(self, tensor: Tensor) -> None:
        """What was asked for of the recipe."""
        self.ready = tensor

    @property
    def waits(self) -> bool:
        """Whether it would have to be computed if it were asked for."""
        return self._recipe is not None and self.ready is None

    def restore(self) -> Tensor:
        """The saved tensor, for backward.

        Raises:
            RuntimeError: it was changed in place since.
        """
        tensor = self.borrow()
        self.ready = None
        self.times += 1
        return tensor

    def borrow(self) -> Tensor:
        """As `restore`, but for another use before backward comes for it: it stays at hand until then."""
        if self.changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {self._described()} is at version {self.tensor._version}; expected version "
                f"{self._version}. {self._advice()}"
            )
        ready = self.ready  # another thread may take it in the meantime
        if ready is None and self._moved is not None:
            self._moved.wanted()
        self.ahead.reached(self.position, self.times)
        if ready is None and self._moved is not None:
            ready = self.ready = self._moved.get()
            self._ledger.add("restored_again" if self._restored else "restored", self.nbytes)
            self._restored = True
        elif ready is None and self._recipe is not None:
            ready = self._recipe.recompute(self)
        return self.tensor if ready is None else ready

    def _described(self) -> str:
        if self.saved is None:  # a parameter or a buffer
            return f"a tensor of shape {list(self.tensor.shape)}"
        made = f"the output of {self.saved.op}" if self.saved.op else "a tensor"
        where = "" if self.starts is not None else f", which module {self.saved.path!r} saved,"
        return f"{made} of shape {list(self.saved.shape)}{where}"

    def _advice(self) -> str:
        if self.starts is None:
            return "Clone it before changing it, or use an out-of-place operation"
        return (
            f"Autograd does not save it, but in backward block {self.starts!r} is computed again from it: do "
            "not change it before, or let the policy keep or offload what that block saves"
        )

    def __del__(self):
        if getattr(self, "_moved", None) is not None and not self._restored:
            self._ledger.add("dropped", self.nbytes)
