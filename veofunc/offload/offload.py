"""`offload`: moves what autograd saves for backward off the device, and brings it back in time."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _saved_tensors_hooks_get_disabled_error_message as why_hooks_are_forbidden

from veofunc.compiling import compiled_modules
from veofunc.offload import policies
from veofunc.offload.ahead import ReadAhead
from veofunc.offload.call import Call, Settings
from veofunc.offload.compiled.partition import CompiledBlocks
from veofunc.offload.compiled.regions import why_little_gained
from veofunc.offload.functional.blockwise import run_under_torch_func
from veofunc.offload.layout import Layout
from veofunc.offload.ledger import Ledger
from veofunc.offload.policy import Policy, ask, check_made, is_inside
from veofunc.offload.saved import Fate, SavedTensor, op_of
from veofunc.offload.stores.host import HostStore
from veofunc.offload.stores.store import Store
from veofunc.transform import Transformed, find_model, matches, name_of, some_paths

__all__ = ["offload"]


def offload(
    fn: Callable,
    policy: Callable[[SavedTensor], Fate],
    *,
    model: nn.Module | None = None,
    store: Store | None = None,
    keep: int = 0,
    prefetch: int = 64 << 20,
    blocks: str | None = None,
) -> Transformed:
    """`fn` with each tensor that autograd saves kept, moved to `store`, or recomputed, as `policy` says.

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
        prefetch: bytes that are brought back ahead of backward.
        blocks: glob of the modules inside which tensors may be recomputed, `"layers.*"`. There the policy is
            asked for the output of each operation, and what must be computed again for backward is so by
            the operations that lead to it, not by running a module again. An answer RECOMPUTE for what
            cannot be recomputed (it comes from outside of the blocks) means KEEP. Inside `torch.func.grad`
            and its kin each block runs again as a whole, and the policy decides about what enters it.

    Returns:
        A callable like `fn`, with `stats()`: a TensorDict of sums over all calls so far. `count` and
        `bytes` have `packed` (saved by autograd, or held to recompute others), which is the sum of `kept`,
        `deduplicated`, `moved` and `recomputed`; `restored`, `restored_again`, `dropped` (moved and never
        restored) and `live` (in the store now); `wait_seconds` is the time spent in the store.

    Raises:
        ValueError: an option is out of range, a glob matches no module, or, at the latest at the call, the
            policy wants to recompute and there are no `blocks`.
        TypeError: an option is of the wrong kind.
        RuntimeError: at the call, inside `torch.func.grad` and its kin, which forbid saved-tensor hooks:
            there are no `blocks`, or one does what recomputation would get wrong.

    Warns:
        UserWarning: once each, if tensors were saved and nothing came of it, or if a name that the policy
            asks for was not given.

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
    settings = make_settings(fn, policy, model, store, keep, prefetch, blocks)
    warned: set[str] = set()

    @torch.compiler.disable  # saved-tensor hooks run in Python; compile fn, inside
    def call(*args, **kwargs):
        if why_hooks_are_forbidden() is not None:
            return _under_torch_func(fn, settings, args, kwargs)
        this = Call(settings)
        try:
            with this.active():
                out = fn(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                error.add_note("offload uses them: inside fn take veofunc.grad or veofunc.grad_and_value")
            raise
        for warning in complaints(this):
            kind = warning.split(":")[0]
            if kind not in warned:
                warned.add(kind)
                warnings.warn(warning, stacklevel=4)
        return out

    return Transformed(
        "offload", fn, call, model=settings.model, exposes={"stats": lambda: settings.ledger.snapshot}
    )


def make_settings(
    fn: Callable,
    policy: Callable[[SavedTensor], Fate],
    model: nn.Module | None,
    store: Store | None,
    keep: int,
    prefetch: int,
    blocks: str | None,
) -> Settings:
    """The options of `offload`, checked."""
    if not callable(fn):
        raise TypeError(f"fn must be callable (a module or a function), got {type(fn).__name__}")
    if isinstance(fn, Policy) or isinstance(policy, nn.Module):
        raise TypeError(
            "fn comes first and policy second, as in offload(model, policies.everything); got "
            f"fn={fn if isinstance(fn, Policy) else name_of(fn)}, policy={name_of(policy)}"
        )
    if not callable(policy):
        raise TypeError(f"policy must be a function SavedTensor -> Fate, got {policy!r}")
    check_made(policy)
    store = HostStore() if store is None else store
    if not isinstance(store, Store) or isinstance(store, type):
        raise TypeError(f"store must have the methods of veofunc.Store (accepts, put), got {store!r}")
    for option, nbytes in (("keep", keep), ("prefetch", prefetch)):
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise ValueError(f"{option} must be an int >= 0 (bytes), got {nbytes!r}")
    model = find_model(fn, model)
    for glob in getattr(policy, "globs", ()):
        _check_glob(f"glob {glob!r} of policy {policy!r}", glob, model, is_inside)
    if blocks is not None and (not isinstance(blocks, str) or not blocks):
        raise ValueError(f'blocks must be one glob of modules, a str such as "layers.*", got {blocks!r}')
    if blocks is not None:
        _check_glob(f"blocks={blocks!r}", blocks, model, matches)
    elif getattr(policy, "recomputes", False):
        raise ValueError(
            f"policy {policy!r} returns RECOMPUTE, for which offload needs blocks=: the modules inside which "
            'tensors may be recomputed, as in blocks="layers.*"'
        )
    ledger = Ledger()
    if model is None or (blocks is None and not getattr(policy, "reads_path", True)):
        return Settings(policy, store, keep, prefetch, model, {}, {}, None, None, ledger)
    paths = {module: path for path, module in model.named_modules()}
    compiled = compiled_modules(fn, model)
    eager = {module: path for module, path in paths.items() if module not in compiled}
    if blocks is None:
        return Settings(policy, store, keep, prefetch, model, eager, paths, None, None, ledger)
    chosen = frozenset(module for module, path in paths.items() if path and matches(path, blocks))
    in_compiled = CompiledBlocks(policy, paths, chosen)
    inside = chosen & eager.keys()
    return Settings(policy, store, keep, prefetch, model, eager, paths, inside, in_compiled, ledger)


def _check_glob(what: str, glob: str, model: nn.Module | None, fits: Callable[[str, str], bool]) -> None:
    if model is None:
        raise ValueError(f"{what} needs the modules that fn runs: pass model=")
    if not any(fits(path, glob) for path, _ in model.named_modules() if path):
        raise ValueError(
            f"{what} matches no module of {type(model).__name__}; its paths are {some_paths(model)}"
        )


def complaints(call: Call) -> list[str]:
    """What the user should know about a call that went well."""
    policy = call.settings.policy
    compiled = call.settings.compiled
    names = set(getattr(policy, "names", ()))
    given = call.names_given | (set() if compiled is None else compiled.names_given)
    given_now = call.names_given | (set() if compiled is None else compiled.names_in(call.saved_by))
    missing, unsaved = sorted(names - given), sorted((names & given_now) - call.names_saved)
    found = [] if compiled is None else list(compiled.complaints)
    if call.num_packed and unsaved:
        found.append(
            f"policy {policy!r} asks for names that nothing saves: {', '.join(unsaved)}; name what "
            "an operation reads that needs it for backward"
        )
    gain = why_little_gained(call.offloaded_by)
    if gain is not None:
        found.append(gain)
    if call.num_packed and missing and call.saved_by and compiled is None:
        found.append(
            f"policy {policy!r} asks for names that it cannot see: {', '.join(missing)}; in a compiled "
            'region they are seen only with blocks, as in blocks="layers.*"'
        )
    elif call.num_packed and missing and not (compiled is not None and compiled.is_late):
        found.append(
            f"policy {policy!r} asks for names that were not given: {', '.join(missing)}; name tensors with "
            "veofunc.checkpoint_name(x, name) inside fn"
        )
    if call.is_idle and policy is not policies.nothing:
        found.append(call.why_idle())
    return found


def _under_torch_func(fn: Callable, settings: Settings, args: tuple, kwargs: dict) -> Any:
    """`fn(*args, **kwargs)` inside `torch.func.grad` and its kin: blocks are recomputed from their inputs."""
    if settings.blocks is None:
        raise RuntimeError(
            f"offload({name_of(fn)}) cannot run inside torch.func.grad, vjp or jacrev, where PyTorch forbids "
            'saved-tensor hooks, unless the modules to recompute are named: blocks="layers.*". Or use '
            "veofunc.grad or veofunc.grad_and_value, which have the same signatures and allow them"
        )
    index = itertools.count()

    def decide(block: nn.Module, path: str, tensor: Tensor) -> bool:
        saved = SavedTensor(
            path=path,
            op=op_of(tensor),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            nbytes=Layout.of(tensor).nbytes,
            index=next(index),
        )
        return ask(settings.policy, saved) is Fate.OFFLOAD and settings.store.accepts(tensor)

    return run_under_torch_func(
        fn,
        args,
        kwargs,
        blocks={block: settings.paths[block] for block in settings.blocks},
        decide=decide,
        store=settings.store,
        ledger=settings.ledger,
        ahead=ReadAhead(settings.prefetch),
    )
