"""What a transform is: a callable goes in, a callable comes out, and nothing is left behind.

A *strategy* transform returns what `fn` returns. An *observing* transform returns `(out, obs)`, where
`obs` is a `TensorDict` of sums. This file is the whole contract; the four feature folders build on it
and on nothing of each other.

A new transform needs three things: `observing(fn, has_aux)` to call what it wraps, `module_hooks` if it
looks into a model, and a `Transformed` to return. Then it adds a row to `tests/laws/`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

__all__ = [
    "Transformed",
    "bare_module",
    "find_model",
    "has_parameter",
    "inside",
    "matches",
    "merge_obs",
    "module_calls",
    "module_hooks",
    "name_of",
    "observing",
    "own_attributes",
    "read_obs",
    "some_paths",
]


class Transformed:
    """A callable made by a transform.

    It has the name, docstring and signature of what it wraps, exposes it as `__wrapped__`, and works as
    a method. Attributes that a transform offers (`channels`, `routers`, `stats`) stay reachable through
    the transforms around it.

    Args:
        transform: name of the transform, for `repr`.
        fn: what is wrapped. It is never edited.
        call: what runs instead of `fn`, with the same arguments.
        model: the module that `fn` runs, if the transform knows it.
        observes: name under which the transform writes into `obs`; None for a strategy transform.
        takes: names of keyword arguments that `call` takes, whether `fn` has them or not.
        exposes: attribute name to a function that gives its value.

    Raises:
        ValueError: `fn` observes the same name already.
    """

    def __init__(
        self,
        transform: str,
        fn: Callable,
        call: Callable,
        *,
        model: nn.Module | None = None,
        observes: str | None = None,
        takes: Iterable[str] = (),
        exposes: Mapping[str, Callable[[], Any]] | None = None,
    ):
        functools.update_wrapper(self, fn, updated=())
        self.__name__ = name_of(fn)
        self.observes = _extend(_observed_names(fn), observes)
        self.model = model
        self._transform, self._takes = transform, frozenset(takes)
        self._call = call
        self._exposes = {**getattr(_transparent(fn), "_exposes", {}), **(exposes or {})}

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo):
        raise TypeError(
            f"{self!r} cannot be copied with what it wraps: its call would go on using the original. Copy "
            "that, and transform the copy"
        )

    def __reduce__(self):
        raise TypeError(f"{self!r} cannot be pickled: pickle what it wraps, and transform it again")

    def __copy__(self):
        return self

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str):
        exposes = self.__dict__.get("_exposes", {})
        if name not in exposes:
            offers = ", ".join(sorted(exposes)) or "nothing more"
            raise AttributeError(f"{self!r} has no attribute {name!r}; its transforms offer {offers}")
        return exposes[name]()

    def __repr__(self) -> str:
        wrapped = self.__dict__.get("__wrapped__")
        inner = repr(wrapped) if isinstance(wrapped, Transformed) else self.__dict__.get("__name__")
        return f"{self.__dict__.get('_transform')}({inner})"


def observing(fn: Callable, has_aux: bool) -> Callable[..., tuple[Any, TensorDictBase]]:
    """`fn` as a callable that returns `(out, obs)`, whatever it returns by itself.

    A function made by an observing transform returns such a pair already. With `has_aux` the user says
    that their own function returns `(out, aux)`; `aux` then becomes the first part of `obs`, detached.

    Raises:
        TypeError: `fn` is not callable, or (at the call) `has_aux` was given and no pair came.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable (a module or a function), got {type(fn).__name__}")
    if not isinstance(has_aux, bool):
        raise TypeError(f"has_aux must be True or False, got {has_aux!r}")
    if _observed_names(fn):
        return fn
    if not has_aux:
        return lambda *args, **kwargs: (fn(*args, **kwargs), TensorDict())

    def call(*args, **kwargs):
        pair = fn(*args, **kwargs)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"has_aux=True says that {name_of(fn)} returns (out, aux), got {type(pair).__name__}"
            )
        out, aux = pair
        if not isinstance(aux, TensorDictBase | Mapping):
            raise TypeError(
                f"aux of {name_of(fn)} must be a TensorDict or a mapping of names to tensors, because it "
                f"is merged into obs; got {type(aux).__name__}"
            )
        return out, TensorDict(dict(aux.items())).detach()

    return call


def merge_obs(obs: TensorDictBase, name: str, own: TensorDictBase) -> TensorDict:
    """A new `TensorDict` with everything in `obs` and `own` under `name`.

    Raises:
        ValueError: `obs` has that name already.
    """
    if name in obs.keys():
        raise ValueError(_clash(name))
    return TensorDict({**dict(obs.items()), name: own})


def read_obs(obs: TensorDictBase, name: str, transform: str) -> TensorDictBase | None:
    """`obs[name]`, the sums of one transform; None if there are no sums at all, as in an empty window.

    Raises:
        TypeError: `obs` is not a TensorDict or mapping.
        ValueError: there are sums, but none of that name.
    """
    if not isinstance(obs, TensorDictBase | Mapping):
        raise TypeError(
            f"obs must be a TensorDict of sums (of a window: window.obs), got {type(obs).__name__}"
        )
    if not obs.keys():
        return None
    if name not in obs.keys():
        raise ValueError(
            f"obs has no {name!r}, only {sorted(obs.keys())}: wrap the function with {transform}"
        )
    return obs[name]


def find_model(fn: Callable, model: nn.Module | None = None) -> nn.Module | None:
    """The module that `fn` runs: `model` if given, else found through the wrappers around it.

    Looks through transforms, `functools.partial` and `functools.wraps`, bound methods, `torch.compile`
    and data-parallel wrappers. None if what is found in the end is a plain function.

    Raises:
        TypeError: `model` is not a module.
    """
    if model is not None:
        return bare_module(model)
    inner: Callable | None = fn
    while inner is not None:
        if isinstance(inner, nn.Module):
            return bare_module(inner)
        if isinstance(inner, Transformed) and inner.model is not None:
            return inner.model
        inner = inside(inner)
    return None


def bare_module(model: nn.Module) -> nn.Module:
    """The user's own module inside `torch.compile` and data-parallel wrappers, whose paths people know.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return bare_module(model.module)
    inside_compile = getattr(model, "_orig_mod", None)
    return bare_module(inside_compile) if isinstance(inside_compile, nn.Module) else model


@contextlib.contextmanager
def module_hooks(
    modules: Iterable[nn.Module],
    *,
    before: Callable[[nn.Module, tuple, dict], object] | None = None,
    after: Callable[[nn.Module, Any], object] | None = None,
    always: bool = False,
) -> Generator[None]:
    """Calls `before(module, args, kwargs)` and `after(module, output)` around each forward of `modules`.

    The hooks live as long as the block, also when it raises. They act only in this thread, so that two
    calls at once do not see each other, and not in a backward pass that starts inside the block, so that
    what activation checkpointing computes a second time is seen once. With `always`, `after` is called for a
    forward that raises too, with None.
    """
    thread, task = threading.get_ident(), torch._C._current_graph_task_id()

    def elsewhere() -> bool:
        if torch.compiler.is_compiling():  # then neither the thread nor the engine can be asked
            return False
        return threading.get_ident() != thread or torch._C._current_graph_task_id() != task

    # `module` is the one that was asked for; what runs may be a copy that shares its hooks.
    # PyTorch adds a hook first and then notes that it takes `kwargs`: another thread may come in between.
    def pre_hook(module, running, args, kwargs=None):
        if not elsewhere():
            cast(Callable, before)(module, args, kwargs)

    def post_hook(module, running, args, output):
        if not elsewhere():
            cast(Callable, after)(module, output)

    handles = []
    try:
        for module in modules:
            if before is not None:
                hook = functools.partial(pre_hook, module)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            if after is not None:
                hook = functools.partial(post_hook, module)
                handles.append(module.register_forward_hook(hook, always_call=always))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def module_calls(
    modules: Iterable[nn.Module], around: Callable[[nn.Module, Callable, tuple, dict], Any]
) -> Generator[None]:
    """Calls `around(module, forward, args, kwargs)` in place of the forward of each of `modules`.

    As long as the block lasts, and in this thread only. Of several at once in one thread the innermost is
    called, and the `forward` that it is given is the next one's.
    """
    taken = []
    try:
        for module in modules:
            taken.append(_StandIn.take(module, around))
        yield
    finally:
        for stand_in in reversed(taken):
            stand_in.give_back(around)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """A copy of `module.__dict__`, without what `module_calls` put there."""
    attributes = dict(module.__dict__)
    stand_in = attributes.get("forward")
    if isinstance(stand_in, _StandIn):
        del attributes["forward"]
        attributes.update(stand_in.replaced)
    return attributes


class _StandIn:
    """What stands in a module's attributes as its `forward`, for as long as some `module_calls` last.

    Attributes:
        replaced: the module's own attribute `forward`, if it has one beside its class's.
    """

    _lock = threading.Lock()  # of putting it there and taking it away, which two threads may do at once

    def __init__(self, module: nn.Module):
        self.module, self.forward = module, module.forward
        self.replaced = {name: value for name, value in module.__dict__.items() if name == "forward"}
        self.arounds: dict[int, list[Callable]] = {}  # thread -> innermost last
        functools.update_wrapper(self, self.forward, updated=())

    @classmethod
    def take(cls, module: nn.Module, around: Callable) -> _StandIn:
        with cls._lock:
            stand_in = module.__dict__.get("forward")
            if not isinstance(stand_in, cls):
                stand_in = module.__dict__["forward"] = cls(module)
            stand_in.arounds.setdefault(threading.get_ident(), []).append(around)
            return stand_in

    def give_back(self, around: Callable) -> None:
        with self._lock:
            mine = self.arounds[threading.get_ident()]
            mine.remove(around)
            if not mine:
                del self.arounds[threading.get_ident()]
            if not self.arounds and self.module.__dict__.get("forward") is self:
                del self.module.__dict__["forward"]
                self.module.__dict__.update(self.replaced)

    def __call__(self, *args, **kwargs):
        return self._call(tuple(self.arounds.get(threading.get_ident(), ())), args, kwargs)

    def _call(self, arounds: tuple[Callable, ...], args: tuple, kwargs: dict) -> Any:
        if not arounds:
            return self.forward(*args, **kwargs)
        *outer, around = arounds
        return around(self.module, lambda *a, **k: self._call(tuple(outer), a, k), args, kwargs)


def matches(path: str, glob: str) -> bool:
    """Whether `glob` matches the whole module path, segment by segment: `*` stays within one segment."""
    segments, patterns = path.split("."), glob.split(".")
    return len(segments) == len(patterns) and all(map(fnmatchcase, segments, patterns))


def some_paths(model: nn.Module) -> str:
    """The first module paths of `model`, for messages."""
    paths = [path for path, _ in model.named_modules() if path]
    return f"{', '.join(paths[:12])}{', ...' if len(paths) > 12 else ''}"


def name_of(fn: Callable) -> str:
    """What to call `fn` in a message: a function by its name, anything else by its class."""
    return getattr(fn, "__name__", type(fn).__name__)


def has_parameter(fn: Callable | None, name: str) -> bool:
    """Whether `fn`, or what it wraps, has a parameter of that name, or is a transform that takes it."""
    while fn is not None:
        if isinstance(fn, Transformed) and name in fn._takes:
            return True
        fn = bare_module(fn).forward if isinstance(fn, nn.Module) else fn
        try:
            if name in inspect.signature(fn).parameters:
                return True
        except ValueError:  # a builtin does not say
            return False
        fn = None if isinstance(fn, types.MethodType) else inside(fn)
    return False


def _observed_names(fn: Callable) -> tuple[str, ...]:
    return getattr(_transparent(fn), "observes", ())


def _transparent(fn: Callable | None) -> Transformed | None:
    """The transform behind wrappers that return what it returns (partial, method, torch.compile), if any."""
    while fn is not None and not isinstance(fn, Transformed):
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, types.MethodType):
            fn = fn.__func__
        elif getattr(fn, "__globals__", {}).get("__name__") == "torch._dynamo.external_utils":
            fn = getattr(fn, "__wrapped__", None)  # the frame that torch.compile puts around an object
        elif getattr(fn, "_torchdynamo_wrapper_id", None) in (None, id(fn)):  # else a copied attribute
            fn = getattr(fn, "_torchdynamo_orig_callable", None)
        else:
            fn = None
    return fn


def inside(fn: Callable) -> Callable | None:
    """What one layer of wrapping is around; None if `fn` wraps nothing."""
    if isinstance(fn, functools.partial):
        return fn.func
    if isinstance(fn, types.MethodType):
        return fn.__self__ if isinstance(fn.__self__, nn.Module) else fn.__func__
    return getattr(fn, "__wrapped__", None)


def _extend(names: tuple[str, ...], name: str | None) -> tuple[str, ...]:
    if name is None:
        return names
    if name in names:
        raise ValueError(_clash(name))
    return (*names, name)


def _clash(name: str) -> str:
    return (
        f"obs[{name!r}] is written twice: the wrapped function observes {name!r} already. "
        "Apply each observing transform once, or rename that entry of your own aux"
    )
