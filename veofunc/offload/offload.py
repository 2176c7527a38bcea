"""`offload`: moves what autograd saves for backward off the device, and brings it back in time."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator

import torch
from torch import Tensor, nn
from torch._C._autograd import _saved_tensors_hooks_get_disabled_error_message as why_hooks_are_forbidden
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from veofunc.offload.host import HostStore
from veofunc.offload.layout import Layout
from veofunc.offload.ledger import Ledger
from veofunc.offload.policies import ask, is_inside, nothing
from veofunc.offload.saved import Fate, Handle, Moved, SavedTensor
from veofunc.offload.stores import Store
from veofunc.transform import Transformed, find_model, module_hooks, name_of, some_paths

__all__ = ["offload"]

PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)


def offload(
    fn: Callable,
    policy: Callable[[SavedTensor], Fate],
    *,
    model: nn.Module | None = None,
    store: Store | None = None,
    keep: int = 0,
) -> Transformed:
    """`fn` with the tensors that autograd saves in it moved to `store` until backward needs them.

    Outputs and gradients are the same, bit for bit. Parameters, buffers and their views are never
    moved; a tensor saved several times is moved once; nothing that the user can see is emptied. A saved
    tensor that is changed in place makes backward raise, as without hooks. `fn` may run its own
    `torch.utils.checkpoint`: then the inputs of each checkpointed region are governed here, and what it
    recomputes in backward is not. To compile, compile inside: `offload(torch.compile(fn), policy)`.

    Args:
        fn: a module or any function; what autograd saves while it runs is governed.
        policy: a pure function from a `SavedTensor` to a `Fate`; see `veofunc.policies`.
        model: the module that `fn` runs, for module paths and to recognise parameters: without it frozen
            weights and buffers that `fn` closes over count as activations. Found by itself if `fn` is a
            module or a wrapper around one.
        store: where tensors go; by default `HostStore()`, which keeps what is in host memory already.
        keep: bytes of the newest offloadable tensors of a call that stay on the device; backward needs
            them first.

    Returns:
        A callable like `fn`, with `stats()`: a TensorDict of sums over all calls so far. `count` and
        `bytes` have `packed`, `kept`, `deduplicated`, `moved`, `restored`, `restored_again`, `dropped`
        (never restored) and `live` (in the store now); `wait_seconds` is the time spent on bringing
        tensors back.

    Raises:
        ValueError: an option is out of range, or a glob of the policy matches no module.
        TypeError: an option is of the wrong kind.
        RuntimeError: at the call, inside `torch.func.grad` and its kin, which forbid saved-tensor hooks.

    Warns:
        UserWarning: once, if tensors were saved and none was moved.

    Laws: transparency, purity, order, recompute, threads.

    Example:
        >>> import tempfile, torch, veofunc as vf
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> fn = vf.offload(model, vf.policies.everything, store=vf.DiskStore(tempfile.mkdtemp()))
        >>> fn(torch.ones(2, 8)).sum().backward()
        >>> int(fn.stats()["count", "moved"])
        2

    Source: `torch.autograd.graph.saved_tensors_hooks`; policies after `jax.checkpoint_policies`.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable (a module or a function), got {type(fn).__name__}")
    model = find_model(fn, model)
    store = HostStore() if store is None else store
    _check_options(policy, model, store, keep)
    ledger = Ledger()
    follows = model is not None and getattr(policy, "reads_path", True)
    paths = {module: path for path, module in model.named_modules()} if follows else {}
    warned = False

    @torch.compiler.disable  # saved-tensor hooks run in Python; compile fn, inside
    def call(*args, **kwargs):
        nonlocal warned
        if why_hooks_are_forbidden() is not None:
            raise RuntimeError(_under_torch_func(fn))
        packer = _Packer(policy, store, keep, model, paths, ledger)
        with packer.active():
            out = fn(*args, **kwargs)
        if not warned and policy is not nothing and packer.idle:
            warned = True
            warnings.warn(packer.why_idle(), stacklevel=4)
        return out

    return Transformed("offload", fn, call, model=model, exposes={"stats": lambda: ledger.snapshot})


class _Packer:
    """One call of a wrapped function: decides about each saved tensor and makes its handle."""

    def __init__(self, policy, store, keep, model, paths, ledger):
        self.policy, self.store, self.keep, self.ledger = policy, store, keep, ledger
        self.paths = paths
        self.owned = _storages_of(model)
        self.running: list[nn.Module] = []  # the modules whose forward runs now, outermost first
        self.newest: deque[weakref.ref[Handle]] = deque()  # handles within `keep`
        self.newest_bytes = 0
        self.known: dict[tuple, tuple[StorageWeakRef, weakref.ref[Moved]]] = {}
        self.num_packed = self.num_asked = self.num_offload = self.num_moved = self.num_refused = 0

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        with (
            module_hooks(self.paths, before=self._enter, after=self._leave),
            saved_tensors_hooks(self.pack, Handle.restore),
        ):
            yield

    def pack(self, tensor: Tensor) -> Handle:
        plain = _is_plain(tensor)
        nbytes = Layout.of(tensor).nbytes if plain else tensor.numel() * tensor.element_size()
        handle = Handle(tensor, nbytes, self.ledger)
        self.ledger.add("packed", nbytes)
        self.ledger.add("kept", nbytes)
        self.num_packed += 1
        if plain and _is_movable(tensor, nbytes, self.owned) and self._wants(tensor, nbytes):
            self._hold(handle)
            self._move_oldest()
        return handle

    def _wants(self, tensor: Tensor, nbytes: int) -> bool:
        """Whether the policy offloads `tensor` and the store takes it."""
        self.num_asked += 1
        fate = ask(self.policy, self._describe(tensor, nbytes))
        if fate is Fate.RECOMPUTE:
            raise ValueError(
                f"policy {self.policy!r} returned RECOMPUTE, but offload only keeps or offloads; "
                "recompute a block with torch.utils.checkpoint inside fn"
            )
        if fate is Fate.KEEP:
            return False
        self.num_offload += 1
        accepted = self.store.accepts(tensor)
        self.num_refused += not accepted
        return accepted

    def _describe(self, tensor: Tensor, nbytes: int) -> SavedTensor:
        return SavedTensor(
            path=self.paths[self.running[-1]] if self.running else "",
            op=tensor.grad_fn.name() if tensor.grad_fn is not None else "",
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            nbytes=nbytes,
            index=self.num_packed - 1,
        )

    def _enter(self, module: nn.Module) -> None:
        self.running.append(module)

    def _leave(self, module: nn.Module, output) -> None:
        # Also leaves modules whose forward raised: their hook did not run.
        while self.running and self.running.pop() is not module:
            pass

    def _hold(self, handle: Handle) -> None:
        nbytes = handle.nbytes

        def ended(_) -> None:  # while within `keep`, as its graph is gone: makes room for others
            self.newest_bytes -= nbytes

        self.newest.append(weakref.ref(handle, ended))
        self.newest_bytes += nbytes

    def _move_oldest(self) -> None:
        while self.newest_bytes > self.keep:
            handle = self.newest.popleft()()
            if handle is None:
                continue
            self.newest_bytes -= handle.nbytes
            if not handle.changed:  # else backward will raise, and the saved value is lost anyway
                self._move(handle)

    def _move(self, handle: Handle) -> None:
        key, storage = _identity(handle.tensor), handle.tensor.untyped_storage()
        source, moved = self.known.get(key, (None, lambda: None))
        moved = moved() if source is not None and not source.expired() else None
        if moved is None:
            moved = Moved(self.store, handle.tensor, handle.nbytes, self.ledger)
            self.known[key] = (StorageWeakRef(storage), weakref.ref(moved))
            self.ledger.add("moved", handle.nbytes)
            self.num_moved += 1
        else:
            self.ledger.add("deduplicated", handle.nbytes)
        self.ledger.add("kept", -handle.nbytes, count=-1)
        handle.move(moved)

    @property
    def idle(self) -> bool:
        return self.num_packed > 0 and self.num_moved == 0

    def why_idle(self) -> str:
        if self.num_asked == 0:
            why = (
                "all of them are parameters, buffers, or kinds that stay where they are (subclasses, sparse)"
            )
        elif self.num_offload == 0:
            why = f"policy {self.policy!r} offloads none of the {self.num_asked} that are no parameters"
        elif self.num_refused == self.num_offload:
            why = (
                f"{type(self.store).__name__} takes none of the {self.num_offload} that the policy "
                "offloads (HostStore keeps what is in host memory already; DiskStore takes all)"
            )
        else:
            why = f"all {self.num_offload} that the policy offloads fit into keep={self.keep} bytes"
        return f"offload moved nothing: {self.num_packed} tensors were saved, and {why}"


def _check_options(policy, model, store, keep) -> None:
    if not callable(policy):
        raise TypeError(f"policy must be a function SavedTensor -> Fate, got {policy!r}")
    if not isinstance(store, Store) or isinstance(store, type):
        raise TypeError(f"store must have the methods of veofunc.Store (accepts, put), got {store!r}")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep must be an int >= 0 (bytes), got {keep!r}")
    for glob in getattr(policy, "globs", ()):
        if model is None:
            raise ValueError(f"policy {policy!r} needs the modules that fn runs: pass model=")
        if not any(is_inside(path, glob) for path, _ in model.named_modules() if path):
            raise ValueError(
                f"glob {glob!r} of policy {policy!r} matches no module of {type(model).__name__}; its paths "
                f"are {some_paths(model)}"
            )


def _under_torch_func(fn: Callable) -> str:
    return (
        f"offload({name_of(fn)}) cannot run inside torch.func.grad, vjp or jacrev: PyTorch forbids "
        "saved-tensor hooks there. Use veofunc.grad or veofunc.grad_and_value, which have the same "
        "signatures and allow them"
    )


def _storages_of(model: nn.Module | None) -> set[int]:
    if model is None:
        return set()
    tensors = itertools.chain(model.parameters(), model.buffers())
    return {t.untyped_storage()._cdata for t in tensors if _is_plain(t)}


def _is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is strided and has elements of its own.

    Subclasses, sparse, nested and quantised tensors and those of a running `vmap` are kept as they are.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _is_movable(tensor: Tensor, nbytes: int, owned: set[int]) -> bool:
    """Whether moving a plain `tensor` can free memory.

    Not so for a parameter, a buffer or a view of one, of the model or passed to `fn`, and for a tensor that
    shows its storage several times over.
    """
    storage = tensor.untyped_storage()
    base = tensor if tensor._base is None else tensor._base
    is_parameter = storage._cdata in owned or (base.is_leaf and base.requires_grad)
    return not is_parameter and nbytes <= storage.nbytes()


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
