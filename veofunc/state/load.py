"""`load_train_state`: the training state copied back to where it was taken from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from veofunc.checkpoint.values import decode
from veofunc.rng import load_rng_state, of_host, rng_state
from veofunc.state.take import Path, by_path, is_packed, parameter_names, scratch_buffers, unpacked
from veofunc.transform import bare_module

__all__ = ["load_train_state"]

IN_PLACE = (nn.Module, Tensor, TensorDictBase)  # extras that are checked in full before they are loaded


def load_train_state(
    state: TensorDictBase,
    model: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    scheduler: LRScheduler | Mapping[str, LRScheduler] | None = None,
    strict: bool = True,
    **extra: Any,
) -> None:
    """Copy `state` into the model and, if given, the optimizer, the scheduler and the extras.

    Random states are set if it has any. The next steps are bit-equal to those of a run that was
    never stopped. All names, shapes and dtypes are compared before anything is changed. What an
    optimizer keeps for a parameter must have its shape, and nothing that it keeps for the others of
    a group may be missing; only of optimizers that are not torch's own this cannot be known. Neither can
    it be known what an extra with a `load_state_dict` of its own takes: such are loaded first. Whole
    tensors are split for parameters that are DTensors. `state` is not aliased.

    Args:
        state: as `train_state` makes it and `Checkpointer.restore` gives it; its other sections are
            ignored.
        model: gets the section `model`; buffers that are not persistent if it has them.
        optimizer: gets the section `optimizer`; the same parameters in the same groups as when it
            was taken. Several by the names under which they were taken.
        scheduler: gets the section `scheduler`; several as several optimizers.
        strict: False leaves as they are what `state` lacks (a parameter, a section), and leaves out what
            the others lack; what both have must fit all the same.
        extra: what gets the sections of these names, as `train_state` was given it: modules, tensors,
            TensorDicts, and what has `load_state_dict`. Read the others from `state`.

    Raises:
        TypeError: `optimizer` is not an Optimizer, or an extra cannot be loaded in place.
        ValueError: a section is missing or differs from its target; lists all names. Nothing was
            changed.

    Warns:
        RuntimeWarning: with `strict=False`, lists what was left.

    Example:
        >>> import torch, veofunc as vf
        >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> vf.load_train_state(vf.train_state(model), other)
        >>> torch.equal(model.weight, other.weight)
        True
        >>> mean = torch.optim.swa_utils.AveragedModel(model)
        >>> state = vf.train_state(model, ema=mean)
        >>> vf.load_train_state(state, other, ema=torch.optim.swa_utils.AveragedModel(other))
    """
    loading = _Loading(state)
    with torch.inference_mode(False), torch.no_grad():  # what is made here is trained on
        # What may refuse only when it is called comes first.
        for name, target in sorted(extra.items(), key=lambda item: isinstance(item[1], IN_PLACE)):
            loading.extra(name, target)
        loading.module("model", model)
        for path, each in by_path("scheduler", scheduler).items():
            loading.stateful(path, each, compare=True)
        for path, each in by_path("optimizer", optimizer).items():
            loading.optimizer(path, each, parameter_names(model, each))
        for section, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            loading.several(section, given)
        rng = state.get("rng", None)
        if rng is not None:
            loading.compare(_leaves("rng", of_host(rng)), _leaves("rng", of_host(rng_state())), whole=True)
        loading.check(strict)
        for copy in loading.copies:
            copy()
    if rng is not None:
        load_rng_state(rng)


class _Loading:
    """A load in the making: nothing is changed before `copies` are called, after `check`.

    Attributes:
        wrong: what both have and does not fit.
        left: what only the state has, or only its targets.
        copies: what to call, in this order.
    """

    def __init__(self, state: TensorDictBase):
        self._state = state
        self.wrong: list[str] = []
        self.left: list[str] = []
        self.copies: list[Callable[[], Any]] = []

    def extra(self, name: str, target: Any) -> None:
        if isinstance(target, Tensor | TensorDictBase):
            self.tensors(name, target)
        elif isinstance(target, nn.Module):
            self.module(name, target)
        elif isinstance(target, Stateful) and not isinstance(target, Optimizer):
            self.stateful((name,), target, compare=isinstance(target, LRScheduler | GradScaler))
        else:
            raise TypeError(
                f"{name} must be a module, a tensor, a TensorDict or have load_state_dict, got "
                f"{type(target).__name__}; read it from the state: state[{name!r}]"
            )

    def tensors(self, name: str, target: Any) -> None:
        saved, here = _leaves(name, self._state.get(name, TensorDict())), _leaves(name, target)
        self.compare(saved, here)
        for path in sorted(here.keys() & saved.keys()):
            value, own = saved[path], here[path]
            if is_non_tensor(own):
                self.copies.append(partial(target.set_non_tensor, path[1:], value.data))
            else:
                self.copies.append(partial(own.copy_, _placed(value, own)))

    def module(self, name: str, module: nn.Module) -> None:
        module = bare_module(module)
        saved = dict(self._state.get(name, TensorDict()).items())
        values = module.state_dict()
        scratch = {key: value for key, value in scratch_buffers(module, values).items() if key in saved}
        self.compare(_below(name, saved), _below(name, {**values, **scratch}))
        extra_states = {key: unpacked(saved[key]) for key in values if _is_extra(key) and key in saved}

        def copy() -> None:
            whole = {key: _placed(saved[key], target) for key, target in values.items() if key in saved}
            values.update(whole | extra_states)  # in a whole state, as the hooks of modules may want
            module.load_state_dict(values)
            for key, buffer in scratch.items():
                buffer.copy_(_placed(saved[key], buffer))

        self.copies.append(copy)

    def stateful(self, path: Path, target: Any, *, compare: bool) -> None:
        where, saved = ".".join(path), self._state.get(path, None)
        if saved is None:
            self.left.append(f"{where}: missing, it was not saved")
        elif not is_packed(saved):
            self.wrong.append(f"{where}: must be what state_dict gave, is {_words(saved)}")
        else:
            value = unpacked(saved)
            if compare:
                own = target.state_dict()
                self.wrong += _other_names(where, value, own)
                value = _beside(value, own)
            self.copies.append(partial(target.load_state_dict, value))

    def optimizer(self, path: Path, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        where, saved = ".".join(path), self._state.get(path, None)
        if saved is None:
            self.left.append(f"{where}: missing, it was not saved")
            return
        absent = [f"{where}.{name}" for name in ("param_groups", "state") if name not in saved.keys()]
        if absent:
            self.wrong += [f"{name}: missing, it was not saved" for name in absent]
            return
        groups, states = decode(saved["param_groups"]), saved["state"]
        states = {name: dict(values.items()) for name, values in states.items()}
        self.groups(f"{where}.param_groups", groups, optimizer, names)
        # What others keep for a parameter cannot be known; LBFGS keeps vectors of all parameters at one.
        if type(optimizer).step.__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS):
            for group in optimizer.param_groups:
                shapes = {names[parameter]: parameter.shape for parameter in group["params"]}
                self.wrong += _state_problems(f"{where}.state", states, shapes)
        groups = _beside(groups, optimizer.param_groups)
        self.copies.append(partial(_load_optimizer, optimizer, names, groups, states))

    def groups(
        self, where: str, groups: list[dict[str, Any]], optimizer: Optimizer, names: Mapping[Tensor, str]
    ) -> None:
        here = optimizer.param_groups
        if len(groups) != len(here):
            self.wrong.append(f"{where}: must be {len(here)} groups, is {len(groups)}")
        left = self.wrong if isinstance(optimizer, LBFGS) else self.left
        for index, (group, own) in enumerate(zip(groups, here, strict=False)):
            there, wanted = set(group["params"]), {names[parameter] for parameter in own["params"]}
            options = sorted(optimizer.defaults.keys() - group.keys())
            left += [f"{where}.{index}: missing {name}" for name in sorted(wanted - there)]
            left += [f"{where}.{index}: unexpected {name}" for name in sorted(there - wanted)]
            self.wrong += [f"{where}.{index}: missing option {option}" for option in options]

    def several(self, section: str, given: Any) -> None:
        """Note those of a section of several that nobody asked for."""
        saved = self._state.get(section, None)
        if isinstance(given, Mapping) and isinstance(saved, TensorDictBase):
            self.left += [f"{section}.{name}: unexpected" for name in sorted(saved.keys() - given.keys())]

    def compare(self, saved: Mapping[Path, Any], here: Mapping[Path, Any], *, whole: bool = False) -> None:
        """Note the differences between leaves of the same section, which may be of use only as a whole."""
        left = self.wrong if whole else self.left
        for path in sorted(here.keys() | saved.keys()):
            name = ".".join(path)
            if path not in saved:
                left.append(f"{name}: missing, it was not saved")
            elif path not in here:
                left.append(f"{name}: unexpected")
            elif not _is_extra(name) and (is_ := _words(saved[path])) != (must := _words(here[path])):
                self.wrong.append(f"{name}: must be {must}, is {is_}")

    def check(self, strict: bool) -> None:
        listed = "\n".join(f"  {problem}" for problem in self.wrong + self.left)
        if self.wrong or (strict and self.left):
            way_out = "" if self.wrong else "\nload_train_state(..., strict=False) loads the rest"
            raise ValueError(f"the state does not fit, nothing was loaded:\n{listed}{way_out}")
        if self.left:
            text = f"the state was loaded in part; left as it was, or left out:\n{listed}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def _is_extra(name: str) -> bool:
    """Whether a name in the state of a module is that of its `get_extra_state`, which may be anything."""
    return name.rpartition(".")[2] == "_extra_state"


def _below(name: str, leaves: Mapping[str, Any]) -> dict[Path, Any]:
    return {(name, key): leaf for key, leaf in leaves.items()}


def _leaves(name: str, value: Tensor | TensorDictBase) -> dict[Path, Any]:
    """All tensors and JSON values in the section `name`, by their paths."""
    if not isinstance(value, TensorDictBase):
        return {(name,): value}
    found = value.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {(name, *((key,) if isinstance(key, str) else key)): leaf for key, leaf in found}


def _words(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return "JSON" if is_non_tensor(leaf) else f"a TensorDict of {', '.join(sorted(leaf.keys()))}"


def _state_problems(
    where: str, states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> Iterator[str]:
    """What a torch optimizer could not go on with, in the state of the parameters of one group.

    A parameter may lack state, as one without a gradient does. Adafactor keeps other values for
    matrices than for vectors; but nowhere has one parameter a part of what another has.
    """
    states = {name: states[name] for name in shapes if name in states}
    keys = {frozenset(values) for values in states.values()}
    for name, values in states.items():
        fuller = [other for other in keys if values and values.keys() < other]
        missing = {key for other in fuller for key in other - values.keys()}
        yield from (f"{where}.{name}.{key}: missing, other parameters have it" for key in sorted(missing))
        sizes = {
            key: value.shape for key, value in values.items() if isinstance(value, Tensor) and value.ndim
        }
        if not _fits([*sizes.values()], shapes[name]):
            wrong = {key: size for key, size in sizes.items() if size != shapes[name]}
            wanted = f"must be {list(shapes[name])} as its parameter, or []"
            yield from (f"{where}.{name}.{key}: {wanted}, is {list(size)}" for key, size in wrong.items())


def _fits(sizes: list[torch.Size], shape: torch.Size) -> bool:
    """Whether all `sizes` are `shape`, or factors of it: Adafactor keeps [R, 1] and [1, C] for [R, C].

    Unless `shape` has dimensions of 1, no factor is as large as it.
    """
    if all(size == shape for size in sizes):
        return True
    if any(len(size) != len(shape) for size in sizes) or (shape in sizes and 1 not in shape):
        return False
    return all(
        {*lengths} <= {1, whole} and max(lengths) == whole
        for whole, *lengths in zip(shape, *sizes, strict=True)
    )


def _other_names(where: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """The differences of two states of schedulers or scalers; also of those that a scheduler holds."""
    yield from (f"{where}.{name}: missing, it was not saved" for name in sorted(here.keys() - saved.keys()))
    yield from (f"{where}.{name}: unexpected" for name in sorted(saved.keys() - here.keys()))
    for name in sorted({"_schedulers", "lr_lambdas"} & here.keys() & saved.keys()):
        if len(saved[name]) != len(here[name]):
            yield f"{where}.{name}: must be {len(here[name])} of them, is {len(saved[name])}"
        for index, pair in enumerate(zip(saved[name], here[name], strict=False)):
            if all(isinstance(one, dict) for one in pair):
                yield from _other_names(f"{where}.{name}.{index}", *pair)


def _beside(value: Any, own: Any) -> Any:
    """`value`, its tensors on the devices of those at the same places in `own`."""
    if isinstance(value, Tensor):
        return value.to(own.device) if isinstance(own, Tensor) else value
    if isinstance(value, list | tuple) and isinstance(own, list | tuple):
        places = [*own, *[None] * len(value)]
        return type(value)(_beside(item, place) for item, place in zip(value, places, strict=False))
    if isinstance(value, dict) and isinstance(own, dict):
        return type(value)({key: _beside(item, own.get(key)) for key, item in value.items()})
    return value


def _placed(value: Tensor, target: Tensor) -> Tensor:
    """`value`, split as `target` is; each rank keeps its part of its own copy."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    return value


def _load_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    groups: list[dict[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    saved = {name for group in groups for name in group["params"]}
    state = {p: values for p, values in optimizer.state.items() if names.get(p) not in saved}
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = [names[parameter] for parameter in own["params"]]
        for parameter in own["params"]:
            values = states.get(names[parameter], {})
            if values:
                state[parameter] = {k: _state_value(k, v, parameter, group) for k, v in values.items()}
    # The state is set apart: this call would cast it to the dtype of the parameters.
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    optimizer.state.update(state)


def _state_value(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A copy of `value` where the optimizer wants it, in the dtype in which it was saved."""
    if isinstance(value, TensorDictBase):
        return unpacked(value.to(parameter.device))
    if not isinstance(value, Tensor) or (
        key == "step" and not (group.get("capturable") or group.get("fused"))
    ):
        return unpacked(value)
    value = value.to(parameter.device, copy=True)
    return _placed(value, parameter) if value.shape == parameter.shape else value
