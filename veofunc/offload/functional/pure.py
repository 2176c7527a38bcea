"""One call of a module as a pure function of its tensors, that can be computed again; or a refusal.

The tensors are the arguments' and the module's parameters and buffers, as they are at the call. The module
itself is not touched: what runs is a copy of it that shares everything but these. All else that the result
depends on is as it was when the function is computed again: attributes, random states, autocast.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from veofunc.offload.functional.watch import Refusal, Watch, changed, storage_of, version_of
from veofunc.transform import own_attributes

__all__ = ["PureCall", "pure_call"]

STATE = ("_parameters", "_buffers")


def pure_call(module: nn.Module, path: str, args: tuple, kwargs: dict) -> tuple[PureCall, list[Tensor]]:
    """A call of `module`, and the tensors that it reads, each once.

    First the parameters and buffers, then those among the arguments.
    """
    tensors: list[Tensor] = []
    places: dict[int, _Place] = {}  # by the id of a tensor

    def place(tensor: Tensor) -> _Place:
        if id(tensor) not in places:
            places[id(tensor)] = _Place(len(tensors))
            tensors.append(tensor)
        return places[id(tensor)]

    attributes = {inner: _without_tensors(inner, place) for inner in module.modules()}
    num_state = len(tensors)
    leaves, arguments = pytree.tree_flatten((args, kwargs))
    leaves = [place(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return PureCall(path, module, attributes, leaves, arguments, num_state, len(tensors)), tensors


@dataclass(eq=False)
class PureCall:
    """One call of a module. A `_Place` stands for a tensor in what it keeps.

    Attributes:
        path: the module's path, for messages.
        module: the module.
        attributes: of the module and of those inside it.
        leaves: of the arguments, whose tree is `arguments`.
        num_state: how many of the tensors are parameters and buffers.
        num_tensors: how many there are.
    """

    path: str
    module: nn.Module
    attributes: dict[nn.Module, dict[str, Any]]
    leaves: list[Any]
    arguments: pytree.TreeSpec
    num_state: int
    num_tensors: int

    def __post_init__(self):
        self._notes: _Notes | None = None  # of the first run
        self._made: _Output | None = None
        self._captured: list[tuple[weakref.ref[Tensor], int]] = []

    def output(self, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> Any:
        """What the module returned, with `tensors` and `made` in place of what it read and made."""
        assert self._made is not None
        return pytree.tree_unflatten(_filled(self._made.leaves, [*tensors, *made]), self._made.tree)

    @contextlib.contextmanager
    def surroundings(
        self, values: Sequence[Tensor], kept: Collection[int], num_vmaps: int
    ) -> Generator[None]:
        """What `run` depends on beside its tensors: noted the first time, checked and put back later.

        Args:
            values: plain tensors, those that `run` is given or inside of these.
            kept: positions of those that are the same tensors each time.
            num_vmaps: how many `vmap` the module was called under that do not batch it.
        """
        if self._notes is not None:
            if self._notes.changed(values, kept) or changed(self._captured):
                raise Refusal(self.path, "must run again, but a tensor that it reads was changed in place")
            with self._notes.put_back(self.path):
                yield
            return
        notes = _Notes(values)
        yield
        if notes.changed(values, range(self.num_tensors)):
            raise Refusal(self.path, "changes its inputs, parameters or buffers in place")
        if notes.drew_random_numbers() and num_vmaps:
            raise Refusal(self.path, "draws random numbers under a vmap that none of its inputs is part of")
        self._notes = notes

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors that the module makes for its output."""
        if self._notes is None:
            with torch.enable_grad():  # so that a no_grad of the module's own is seen
                return self._run_first(tensors)
        with torch.enable_grad(), self._notes.autocast():
            return self._run_again(tensors)

    def _run_first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # Nobody else has these aliases: if one is alive in the end, the module has put it somewhere.
        inputs = [*tensors[: self.num_state], *(tensor.detach() for tensor in tensors[self.num_state :])]
        copies = self._copies(inputs)
        before = {copy: dict(copy.__dict__) for copy in copies.values()}
        watch = Watch(self.path, inputs, self.num_state)
        with watch:
            result = self._forward(copies, inputs)
        self._made, made = _taken_apart(result, inputs)
        _check_apart(self.path, inputs, made)
        for module, copy in copies.items():
            self._check_state(module, copy, inputs)
            _write_back(self.path, module, before[copy], copy.__dict__, watch)
        made = [tensor.detach() for tensor in made]
        result = inputs = before = None  # or they would be alive
        watch.finish()
        self._captured = watch.captured
        return tuple(made)

    def _run_again(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        _, made = _taken_apart(self._forward(self._copies(tensors), tensors), tensors)
        return tuple(made)

    def _forward(self, copies: dict[nn.Module, nn.Module], tensors: Sequence[Tensor]) -> Any:
        args, kwargs = pytree.tree_unflatten(_filled(self.leaves, tensors), self.arguments)
        return copies[self.module].forward(*args, **kwargs)

    def _copies(self, tensors: Sequence[Tensor]) -> dict[nn.Module, nn.Module]:
        """The module and those inside it, with `tensors` as parameters and buffers."""
        copies = {module: object.__new__(type(module)) for module in self.attributes}
        for module, attributes in self.attributes.items():
            copy = copies[module]
            for name, value in attributes.items():
                is_own = isinstance(value, types.MethodType) and value.__self__ is module
                copy.__dict__[name] = types.MethodType(value.__func__, copy) if is_own else value
            for name in STATE:
                filled = _filled(attributes[name].values(), tensors)
                copy.__dict__[name] = dict(zip(attributes[name], filled, strict=True))
            children = attributes["_modules"].items()
            copy.__dict__["_modules"] = {name: copies.get(child) for name, child in children}
            if isinstance(copy, nn.RNNBase):
                copy._init_flat_weights()  # a second list of its parameters
        return copies

    def _check_state(self, module: nn.Module, copy: nn.Module, tensors: Sequence[Tensor]) -> None:
        for name in STATE:
            places, now = self.attributes[module][name], copy.__dict__[name]
            was = dict(zip(places, _filled(places.values(), tensors), strict=True))
            if was.keys() != now.keys() or any(was[key] is not now[key] for key in was):
                raise Refusal(self.path, "replaces its parameters or buffers")


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor."""

    index: int


@dataclass(frozen=True)
class _Output:
    leaves: list[Any]
    tree: pytree.TreeSpec


def _without_tensors(module: nn.Module, place: Callable[[Tensor], _Place]) -> dict[str, Any]:
    attributes = own_attributes(module)
    attributes["_modules"] = dict(attributes["_modules"])
    for state in STATE:
        items = attributes[state].items()
        attributes[state] = {name: None if tensor is None else place(tensor) for name, tensor in items}
    return attributes


def _filled(leaves: Iterable[Any], tensors: Sequence[Tensor]) -> list[Any]:
    return [tensors[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in leaves]


def _taken_apart(result: Any, inputs: Sequence[Tensor]) -> tuple[_Output, list[Tensor]]:
    """What a module returned, and the tensors in it that it made, each once."""
    leaves, tree = pytree.tree_flatten(result)
    places = {id(tensor): _Place(index) for index, tensor in enumerate(inputs)}
    made: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in places:
            places[id(leaf)] = _Place(len(inputs) + len(made))
            made.append(leaf)
    leaves = [places[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _Output(leaves, tree), made


def _check_apart(path: str, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    """Tensors that share memory would be changed together, which autograd could not see."""
    seen = {storage_of(tensor) for tensor in inputs}
    for tensor in made:
        if tensor.numel() > 0 and storage_of(tensor) in seen:
            raise Refusal(path, "returns a view of an input, or two views of one tensor (return copies)")
        seen.add(storage_of(tensor))


def _write_back(path: str, module: nn.Module, before: dict, after: dict, watch: Watch) -> None:
    """Gives the module the attributes, such as counters, that its copy was given."""
    for name, value in after.items():
        if name in before and before[name] is value:
            continue
        if not all(watch.is_constant(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)):
            raise Refusal(path, f"keeps a tensor that depends on its inputs, as its attribute {name!r}")
        module.__dict__[name] = value


class _Notes:
    """What the first run depended on beside its tensors, to be put back for another."""

    def __init__(self, values: Sequence[Tensor]):
        devices = {torch.device("cpu"), *(value.device for value in values if value.device.type != "meta")}
        self._versions = [version_of(value) for value in values]
        self._random = _random_states(devices)
        self._autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {device.type for device in devices}
            if torch.amp.is_autocast_available(kind)
        }
        self._caches_casts = torch.is_autocast_cache_enabled()

    def drew_random_numbers(self) -> bool:
        """Whether random numbers were drawn since; if not, there is nothing to put back."""
        self._random_after = _random_states(self._random)
        if _same(self._random, self._random_after):
            self._random = self._random_after = {}
        return bool(self._random)

    def changed(self, values: Sequence[Tensor], positions: Iterable[int]) -> bool:
        return any(version_of(values[i]) != self._versions[i] for i in positions)

    @contextlib.contextmanager
    def put_back(self, path: str) -> Generator[None]:
        """The random states, until the block ends."""
        now = _random_states(self._random)
        _load_random_states(self._random)
        try:
            yield
            if not _same(_random_states(self._random), self._random_after):
                raise Refusal(path, "drew other random numbers when it ran again, or another thread did")
        finally:
            _load_random_states(now)

    @contextlib.contextmanager
    def autocast(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for kind, (dtype, enabled) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._caches_casts))
            yield


def _random_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    states = {}
    for device in devices:
        on_cpu = device.type == "cpu"
        states[device] = (
            torch.get_rng_state() if on_cpu else torch.get_device_module(device).get_rng_state(device)
        )
    return states


def _same(one: dict[torch.device, Tensor], other: dict[torch.device, Tensor]) -> bool:
    return all(torch.equal(state, other[device]) for device, state in one.items())


def _load_random_states(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
