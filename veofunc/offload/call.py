"""What one call of an offloaded function does: it decides about each tensor that autograd saves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr, _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from veofunc.offload.ahead import ReadAhead
from veofunc.offload.compiled.partition import NAME, CompiledBlocks
from veofunc.offload.compiled.regions import Region, saving_region
from veofunc.offload.layout import Layout, Parts, View, is_plain
from veofunc.offload.ledger import Ledger
from veofunc.offload.policy import ask
from veofunc.offload.recompute import Source, make_program
from veofunc.offload.saved import Fate, Handle, Moved, SavedTensor, op_of
from veofunc.offload.stores.store import Store
from veofunc.offload.tape import Ref, Tape, Value
from veofunc.transform import module_hooks

__all__ = ["Call", "Settings", "checkpoint_name", "is_parameter"]

GHOST_OF = "_veofunc_handle"

# The calls that run now in this thread, outermost first; `checkpoint_name` tells them.
running: ContextVar[tuple[Call, ...]] = ContextVar("veofunc_offload_calls", default=())


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Names `x` for policies that ask for `SavedTensor.name`, such as `veofunc.policies.names`.

    The name holds in this call of an offloaded function: also where `x` is saved reshaped or transposed, was
    saved already, or is changed in place later, and not for copies. Outside of a call it does nothing.

    Args:
        x: a tensor of any shape and dtype.
        name: a non-empty string.

    Returns:
        `x` itself; in compiled code a view of it.

    Raises:
        TypeError: `x` is no tensor.
        ValueError: `name` is no non-empty string.

    Example:
        >>> import tempfile, torch, veofunc as vf
        >>> def fn(x):
        ...     return vf.checkpoint_name(x.exp(), "e").sin().sum()
        >>> fn = vf.offload(fn, vf.policies.names(offload=("e",)), store=vf.DiskStore(tempfile.mkdtemp()))
        >>> fn(torch.ones(3, requires_grad=True)).backward()
        >>> int(fn.stats()["count", "packed"]), int(fn.stats()["bytes", "moved"])
        (2, 12)

    Source: `jax.ad_checkpoint.checkpoint_name`.
    """
    if torch.compiler.is_compiling():  # the name goes into the graph
        with torch.fx.traceback.annotate({NAME: name}):
            return x.view_as(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a non-empty string, got {name!r}")
    for call in running.get():
        call.name(x, name)
    return x


@dataclass(frozen=True)
class Settings:
    """What all calls of one offloaded function have in common.

    Attributes:
        paths: the modules to follow, with their paths; empty if the policy does not ask for them.
        all_paths: the same, with those that are compiled.
        blocks: the modules inside which tensors may be recomputed; None if there is no such thing.
        compiled: the same in compiled code, where the compiler asks the policy.
    """

    policy: Callable[[SavedTensor], Fate]
    store: Store
    keep: int
    prefetch: int
    model: nn.Module | None
    paths: Mapping[nn.Module, str]
    all_paths: Mapping[nn.Module, str]
    blocks: frozenset[nn.Module] | None
    compiled: CompiledBlocks | None
    ledger: Ledger

    @property
    def reads_name(self) -> bool:
        return getattr(self.policy, "reads_name", True)


class Call:
    """One call of a wrapped function: decides about each saved tensor and makes its handle."""

    is_plain = staticmethod(is_plain)

    def __init__(self, settings: Settings):
        self.settings, self.ledger = settings, settings.ledger
        self.owned = _storages_of(settings.model)
        self.modules: list[nn.Module] = []  # those whose forward runs now, outermost first
        self.block: nn.Module | None = None  # the outermost of them that is a block
        self.tape = Tape(self.is_plain)
        self.in_block: list[tuple[weakref.ref[Handle], SavedTensor, Ref]] = []  # to be decided at its end
        # Kept as far as known, until a name may come; and where such tensors lie.
        self.undecided: weakref.WeakKeyDictionary[Handle, SavedTensor] = weakref.WeakKeyDictionary()
        self.unnamed: dict[tuple, list[weakref.ref[Handle]]] = {}
        self.names: dict[tuple, tuple[StorageWeakRef, str]] = {}
        self.ahead = ReadAhead(settings.prefetch)
        self.newest: deque[weakref.ref[Handle]] = deque()  # handles within `keep`
        self.newest_bytes = 0
        self.under_way: dict[int, int] = {}  # by thread, the operation that saved the last; it may still run
        self.known: dict[tuple, tuple[StorageWeakRef, weakref.ref[Moved]]] = {}
        self.names_given: set[str] = set()
        self.names_saved: set[str | None] = set()
        self.num_packed = self.num_asked = self.num_offload = self.num_refused = 0
        self.num_moved = self.num_recomputed = 0
        self.region: Region | None = None  # the compiled region that saves a tensor now
        self.as_made: SavedTensor | None = None  # what the region says that it is
        self.saved_by: Counter[int] = Counter()  # tensors, by the number of their compiled region
        self.offloaded_by: Counter[Region | None] = Counter()
        self.unseen: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        pack, unpack = self._hooks(_top_saved_tensors_default_hooks(False))
        token = running.set((*running.get(), self))
        try:
            with (
                module_hooks(self.settings.paths, before=self._enter, after=self._leave, always=True),
                # Between two regions they run where what runs is compiled; they must not be.
                saved_tensors_hooks(torch.compiler.disable(pack), torch.compiler.disable(unpack)),
                contextlib.nullcontext() if self.settings.blocks is None else self.tape,
                _while_compiling(self.settings.compiled),
            ):
                yield
            with self.unseen():
                self._move_rest()
        finally:
            running.reset(token)
            self.tape.clear()

    def _hooks(self, outer: tuple | None) -> tuple[Callable, Callable]:
        """Pack and unpack; chained onto those of a `torch.utils.checkpoint` that this call runs in."""
        if outer is None:
            return self.pack, Handle.restore
        outer_pack, outer_unpack = outer

        def unpack(packed: object) -> Tensor:
            return _embodied(outer_unpack(packed))

        def pack_ghost(tensor: Tensor) -> object:
            handle = self.pack(tensor)
            with self.unseen():
                ghost = _ghost(tensor, handle) if self.is_plain(tensor) else tensor
            return outer_pack(ghost)

        kind = getattr(outer_pack, "__qualname__", "").split(".")[0]
        if kind == "_checkpoint_hook":  # its forward, where nothing is saved yet
            return outer_pack, unpack
        if kind == "_recomputation_hook":  # its second forward, which holds what is saved until backward
            self.unseen = _disable_current_modes  # selective checkpointing counts operations
            return pack_ghost, unpack
        return self.pack, Handle.restore

    def pack(self, tensor: Tensor) -> Handle:
        with self.tape.paused(), self.unseen():
            handle = self._handle(tensor)
            handle.operation = threading.get_ident(), _get_sequence_nr()  # the same until another one saves
            self.under_way.update([handle.operation])
            self._find_region()
            if self._is_movable(tensor):
                self._decide_or_wait(handle, tensor)
            self.region = self.as_made = None
            self._move_oldest()
            return handle

    def _find_region(self) -> None:
        self.region = saving_region() if "torch._dynamo" in sys.modules else None
        if self.region is None:
            return
        position = self.saved_by[self.region.number]
        self.saved_by[self.region.number] += 1
        if self.settings.compiled is not None:
            self.as_made = self.settings.compiled.saw(self.region, position)

    def name(self, tensor: Tensor, name: str) -> None:
        """`tensor` has that name from now on, also where it was saved already."""
        self.names_given.add(name)
        with self.tape.paused(), self.unseen():
            for part in self._parts(tensor):
                self.names[_place(part)] = (StorageWeakRef(part.untyped_storage()), name)
                for weak in self.unnamed.get(_place(part), ()):
                    handle = weak()
                    if handle is not None and handle in self.undecided:
                        self._decide_so_far(handle, replace(self.undecided.pop(handle), name=name))
            if self.block is not None and self.is_plain(tensor):
                value = self.tape.ref(tensor).value
                if value.saved is not None:
                    value.saved = replace(value.saved, name=name)
                    value.hold(tensor)
            self._move_rest()

    # What the tape tells.

    def entered(self, value: Value, tensor: Tensor) -> None:
        if self.is_plain(tensor) and self._is_movable(tensor):
            value.saved = self._describe(tensor, op_of(tensor))

    def made(self, value: Value, tensor: Tensor, op: str) -> bool:
        value.saved = replace(self._describe(tensor, op), index=self.num_packed, recomputable=True)
        return self._ask(value.saved) is not Fate.RECOMPUTE

    # Fates.

    def _handle(self, tensor: Tensor, saved: SavedTensor | None = None) -> Handle:
        nbytes = self._nbytes(tensor)
        self.num_packed += 1
        self.ledger.add("packed", nbytes)
        self.ledger.add("kept", nbytes)
        return Handle(tensor, nbytes, self.ledger, self.ahead)

    def _decide_or_wait(self, handle: Handle, tensor: Tensor) -> None:
        saved = self._describe(tensor, op_of(tensor))
        if self.as_made is not None:
            made = self.as_made
            saved = replace(saved, path=made.path, op=made.op, name=made.name)
        handle.saved = saved
        if self.block is not None and self.is_plain(tensor):
            self.in_block.append((weakref.ref(handle), saved, self.tape.read(tensor)))
        else:
            self._decide_so_far(handle, saved)
            if handle in self.undecided:
                for part in self._parts(tensor):
                    self.unnamed.setdefault(_place(part), []).append(weakref.ref(handle))

    def _decide_so_far(self, handle: Handle, saved: SavedTensor) -> None:
        if self._decide(handle, saved) is Fate.KEEP and self.settings.reads_name:
            self.undecided[handle] = saved

    def _decide(self, handle: Handle, saved: SavedTensor) -> Fate:
        fate = self._fate(handle.tensor, saved)
        if fate is Fate.OFFLOAD:
            self.offloaded_by[self.region] += 1
            self._hold(handle)
        return fate

    def _fate(self, tensor: Tensor, saved: SavedTensor) -> Fate:
        """What the policy wants, as far as it can be had."""
        self.num_asked += 1
        self.names_saved.add(saved.name)
        fate = self._ask(saved)
        if fate is Fate.RECOMPUTE and not saved.recomputable:
            return Fate.KEEP
        if fate is Fate.OFFLOAD:
            self.num_offload += 1
            if not all(self.settings.store.accepts(part) for part in self._parts(tensor)):
                self.num_refused += 1
                return Fate.KEEP
        return fate

    def _ask(self, saved: SavedTensor) -> Fate:
        fate = ask(self.settings.policy, saved)
        if fate is Fate.RECOMPUTE and self.settings.blocks is None:
            raise ValueError(
                f"policy {self.settings.policy!r} returned RECOMPUTE, but offload was made without blocks=: "
                'name the modules inside which tensors may be recomputed, as in blocks="layers.*"'
            )
        return fate

    def _describe(self, tensor: Tensor, op: str) -> SavedTensor:
        return SavedTensor(
            path=self._path(),
            op=op,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            nbytes=self._nbytes(tensor),
            index=self.num_packed - 1,
            name=self._name_of(tensor),
        )

    def _path(self) -> str:
        compiled = None if self.region is None else self.region.module
        module = compiled or (self.modules[-1] if self.modules else None)
        return "" if module is None else self.settings.all_paths.get(module, "")

    def _name_of(self, tensor: Tensor) -> str | None:
        if not self.names:
            return None
        names = [self.names[_place(part)][1] for part in self._parts(tensor) if _place(part) in self.names]
        return names[0] if names else None

    # Blocks.

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():  # what is compiled stays as it is, for all calls
            return
        self.modules.append(module)
        if self.block is None and self.settings.blocks is not None and module in self.settings.blocks:
            self._start_block(module)

    def _leave(self, module: nn.Module, output: object) -> None:
        if torch.compiler.is_compiling() or not self.modules or self.modules[-1] is not module:
            return  # never entered, as when another hook of it has raised
        left, block = self.modules.pop(), self.block
        if left is block and left not in self.modules:
            self._end_block()
        elif block is not None and self.tape.has_freed:
            # FSDP has freed the parameters of a part of the block. Backward will have them again, but not
            # together with those of other parts, so that each part must be computed by itself.
            self._end_block()
            self._start_block(block)

    def _start_block(self, block: nn.Module) -> None:
        self.block = block
        self.tape.start(self)

    def _end_block(self) -> None:
        """Decides about what was saved in the block, and about what that is computed from."""
        path, self.block = self.settings.all_paths.get(self.block, ""), None
        self.tape.recording = False
        pending, self.in_block = self.in_block, []
        moving: list[Handle] = []
        with self.unseen():
            sources, wanted = self._sorted(pending, moving)
            if wanted:
                start_at = functools.partial(self._start_at, path, moving)
                make_program(self.tape.nodes, sources, wanted, start_at)
            self.tape.clear()
            for handle, _ in wanted:
                self._given_up(handle)
            for handle in moving:
                self._hold(handle)
            self._move_rest()
        for weak, _, _ in pending:
            handle = weak()
            if handle is not None and not handle.is_moved:
                handle.position = self.ahead.position

    def _sorted(
        self, pending: Sequence[tuple[weakref.ref[Handle], SavedTensor, Ref]], moving: list[Handle]
    ) -> tuple[dict[Value, list[Source]], list[tuple[Handle, Ref]]]:
        """What will be there in backward, and what must be computed; adds what is offloaded to `moving`."""
        unsound = self.tape.unsound()
        sources: dict[Value, list[Source]] = {}
        wanted = []
        for weak, saved, ref in pending:
            handle = weak()
            if handle is None or handle.changed:
                continue
            recomputable = ref.value.op is not None and ref.value not in unsound
            fate = self._fate(handle.tensor, self._known_late(handle, saved, ref, recomputable))
            if fate is Fate.RECOMPUTE:
                wanted.append((handle, ref))
                continue
            if not ref.value.lost:
                is_whole = fate is Fate.KEEP or ref.view.covers(handle.tensor.untyped_storage().nbytes())
                sources.setdefault(ref.value, []).append(Source(handle, ref.view, is_whole, is_lent=True))
            if fate is Fate.OFFLOAD:
                moving.append(handle)
        return sources, wanted

    def _known_late(self, handle: Handle, saved: SavedTensor, ref: Ref, recomputable: bool) -> SavedTensor:
        """`saved` with what is known at the end of its block only."""
        op = saved.op or ref.value.op or ""
        name = self._name_of(handle.tensor) or saved.name
        return replace(saved, op=op, name=name, recomputable=recomputable)

    def _start_at(self, path: str, moving: list[Handle], value: Value) -> Source | None:
        """`value` as something to compute block `path` from; None if it shall be computed too."""
        tensor = value.tensor
        assert tensor is not None, "only a value that is held can be started at"
        view = View.of(tensor)
        if value.saved is None:  # a parameter, or another that is never moved
            handle = Handle(tensor, self._nbytes(tensor), self.ledger, self.ahead)
            handle.starts = path
            return Source(handle, view, is_whole=True, is_lent=False)
        fate = self._fate(tensor, value.saved)
        if fate is Fate.RECOMPUTE:
            return None
        handle = self._handle(tensor, value.saved)
        handle.saved, handle.starts = value.saved, path
        if fate is Fate.OFFLOAD and view.covers(tensor.untyped_storage().nbytes()):
            moving.append(handle)
        return Source(handle, view, is_whole=True, is_lent=False)

    def _given_up(self, handle: Handle) -> None:
        self.num_recomputed += 1
        self.ledger.add("kept", -handle.nbytes, count=-1)
        self.ledger.add("recomputed", handle.nbytes)

    # Moving.

    def _hold(self, handle: Handle) -> None:
        nbytes = handle.nbytes

        def ended(_) -> None:  # while within `keep`, as its graph is gone: makes room for others
            self.newest_bytes -= nbytes

        self.newest.append(weakref.ref(handle, ended))
        self.newest_bytes += nbytes

    def _move_oldest(self) -> None:
        while self.newest_bytes > self.settings.keep:
            handle = self.newest[0]()
            if handle is not None and self._may_be_written(handle):
                return
            self.newest.popleft()
            if handle is None:
                continue
            self.newest_bytes -= handle.nbytes
            # Else backward will raise, and the saved value is lost anyway; or its memory was freed for now,
            # as FSDP does with parameters, also with frozen ones, which look like any tensor.
            if not handle.changed and self._is_movable(handle.tensor):
                self._move(handle)

    def _move_rest(self) -> None:
        """The same, between two operations."""
        self.under_way.clear()
        self._move_oldest()

    def _may_be_written(self, handle: Handle) -> bool:
        """Whether the operation that saved the tensor may be yet to fill it, as `rrelu` is its noise."""
        if handle.has_history or handle.operation is None:
            return False
        thread, number = handle.operation
        return self.under_way.get(thread) == number

    def _move(self, handle: Handle) -> Moved:
        key, storage = _identity(handle.tensor), handle.tensor.untyped_storage()
        source, moved = self.known.get(key, (None, lambda: None))
        moved = moved() if source is not None and not source.expired() else None
        if _may_be_statistics(handle):
            moved = None
        handle.position = self.ahead.position
        if moved is None:
            moved = Moved(self.settings.store, handle.tensor, handle.nbytes, self.ledger, self.ahead)
            self.known[key] = (StorageWeakRef(storage), weakref.ref(moved))
            self.ahead.add(moved)
            self.ledger.add("moved", handle.nbytes)
            self.num_moved += 1
        else:
            self.ledger.add("deduplicated", handle.nbytes)
        self.ledger.add("kept", -handle.nbytes, count=-1)
        handle.move(moved)
        return moved

    # What tensors are.

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return Parts.of(tensor, self.is_plain).tensors

    def _nbytes(self, tensor: Tensor) -> int:
        parts = self._parts(tensor)
        return (
            sum(Layout.of(part).nbytes for part in parts) if parts else tensor.numel() * tensor.element_size()
        )

    def _is_movable(self, tensor: Tensor) -> bool:
        """Whether moving `tensor` can free memory.

        Not so for a parameter, a buffer or a view of one, of the model or passed to `fn`, and for a tensor
        that shows its storage several times over.
        """
        if is_parameter(tensor):
            return False
        parts = self._parts(tensor)
        return bool(parts) and not any(
            part.untyped_storage()._cdata in self.owned
            or Layout.of(part).nbytes > part.untyped_storage().nbytes()
            for part in parts
        )

    # Whether anything came of it.

    @property
    def is_idle(self) -> bool:
        compiled = self.settings.compiled
        num_recomputed = self.num_recomputed + (0 if compiled is None else compiled.num_recomputed)
        return self.num_packed > 0 and self.num_moved + num_recomputed == 0

    def why_idle(self) -> str:
        policy, store = self.settings.policy, type(self.settings.store).__name__
        if self.num_asked == 0:
            why = (
                "all of them are parameters, buffers, or kinds that stay where they are (sparse, quantised, "
                "subclasses that cannot be taken apart)"
            )
        elif self.num_offload == 0:
            why = f"policy {policy!r} offloads none of the {self.num_asked} that are no parameters"
            if self.saved_by and self.settings.compiled is None:
                why += "; of what a compiled region saves it sees `name` and `op` only with blocks="
            if getattr(policy, "recomputes", False):
                why += ", and no operation in the blocks made one that it recomputes"
        elif self.num_refused == self.num_offload:
            why = (
                f"{store} takes none of the {self.num_offload} that the policy offloads (HostStore keeps "
                "what is in host memory already; DiskStore takes all)"
            )
        else:
            why = f"all {self.num_offload} that the policy offloads fit into keep={self.settings.keep} bytes"
        return f"offload moved nothing: {self.num_packed} tensors were saved, and {why}"


def is_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is or shows something that gradients are collected for."""
    base = tensor if tensor._base is None else tensor._base
    return base.requires_grad and base.is_leaf


def _while_compiling(blocks: CompiledBlocks | None) -> contextlib.AbstractContextManager:
    """What compiles meanwhile obeys `blocks`. Without a compiler there is nothing to do."""
    is_needed = blocks is not None and "torch._dynamo" in sys.modules
    return blocks.active() if is_needed else contextlib.nullcontext()


def _storages_of(model: nn.Module | None) -> set[int]:
    if model is None:
        return set()
    tensors = itertools.chain(model.parameters(), model.buffers())
    return {part.untyped_storage()._cdata for tensor in tensors for part in Parts.of(tensor).tensors}


def _place(part: Tensor) -> tuple:
    """Equal for tensors that show the same bytes in one piece, in whatever shape."""
    size, view = part.element_size(), View.of(part)
    return part.untyped_storage()._cdata, view.offset * size, part.numel() * size, view.end


def _identity(tensor: Tensor) -> tuple:
    """Equal for tensors that show the same bytes in the same way, while their storage lives."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor._version,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _may_be_statistics(handle: Handle) -> bool:
    """Whether batch norm may have changed the tensor since one with the same identity was moved.

    It does not raise the version of its running statistics.
    """
    tensor = handle.tensor
    return not handle.has_history and tensor.dim() == 1 and tensor.is_floating_point()


def _ghost(tensor: Tensor, handle: Handle) -> Tensor:
    """Looks like `tensor`, has one element, and leads to `handle`."""
    ghost = tensor.new_zeros(()).expand(tensor.shape)
    setattr(ghost, GHOST_OF, handle)
    return ghost


def _embodied(tensor: Tensor) -> Tensor:
    handle = getattr(tensor, GHOST_OF, None)
    return tensor if handle is None else handle.restore()
