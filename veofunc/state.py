"""The training state as one value: taken from model and optimizer, and copied back into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from veofunc.channel.channels import Channels
from veofunc.checkpoint.values import decode, encode, to_json
from veofunc.rng import load_rng_state, rng_state
from veofunc.transform import bare_module
from veofunc.window import Window

__all__ = ["load_train_state", "train_state"]


def train_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: LRScheduler | None = None,
    rng: bool = True,
    **extra: Any,
) -> TensorDict:
    """The whole training state as one TensorDict, by fully qualified names.

    Nothing is copied or changed: its tensors are those of the model and the optimizer, and change
    with them. `Checkpointer.save` copies them; `.clone()` does, too. What the optimizer makes at
    its first step is absent before it.

    Args:
        model: its sharded parameters (FSDP2) are DTensors; tied ones appear under each name. Names are
            those of the module inside `torch.compile` and `DistributedDataParallel`.
        optimizer: over parameters of `model`. The options of its groups are JSON, tuples, Counters,
            dicts with keys that are ints, and tensors of no dimensions.
        scheduler: its state is made of the same kinds of values.
        rng: whether to take the random states of torch on the CPU and all CUDA devices, numpy and
            Python.
        extra: tensors, TensorDicts, JSON values, a `Window` or `Channels`, under names of your choice.

    Returns:
        A TensorDict of the sections `model` (parameters and persistent buffers), `optimizer`
        (`state` and `param_groups`), `scheduler`, `rng` and the names in `extra`. In `param_groups`
        and `scheduler` what is not JSON is encoded as such, and is a copy.

    Raises:
        TypeError: a value is neither a tensor nor JSON; names it. Or `optimizer` is not an Optimizer.
        ValueError: a parameter of the optimizer is not in the model, or numpy's global generator was
            replaced by one of another kind.

    Example:
        >>> import torch, veofunc as vf
        >>> model = torch.nn.Linear(2, 1)
        >>> state = vf.train_state(model, torch.optim.AdamW(model.parameters()), step=3)
        >>> sorted(state.keys()), sorted(state["model"].keys()), state["step"]
        (['model', 'optimizer', 'rng', 'step'], ['bias', 'weight'], 3)
    """
    sections: dict[str, Any] = {"model": _model_state(model)}
    if optimizer is not None:
        sections["optimizer"] = _optimizer_state(model, optimizer)
    if scheduler is not None:
        sections["scheduler"] = NonTensorData(encode(scheduler.state_dict(), "scheduler"))
    if rng:
        sections["rng"] = rng_state()
    for name, value in extra.items():
        sections[name] = _leaf(value, name)
    return TensorDict(sections)


def load_train_state(
    state: TensorDictBase,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: LRScheduler | None = None,
) -> None:
    """Copy `state` into the model and, if given, the optimizer and the scheduler.

    Random states are set if it has any. The next steps are bit-equal to those of a run that was
    never stopped. All names, shapes and dtypes are compared before anything is changed. What an
    optimizer keeps for a parameter must have its shape, and nothing that it keeps for the others of
    a group may be missing; only of optimizers that are not torch's own this cannot be known. Whole
    tensors are split for parameters that are DTensors. `state` is not aliased.

    Args:
        state: as `train_state` makes it and `Checkpointer.restore` gives it; its other sections are
            ignored.
        model: gets the section `model`.
        optimizer: gets the section `optimizer`; the same parameters in the same groups as when it
            was taken.
        scheduler: gets the section `scheduler`.

    Raises:
        TypeError: `optimizer` is not an Optimizer.
        ValueError: a section is missing or differs from its target; lists all names. Nothing was
            changed.

    Example:
        >>> import torch, veofunc as vf
        >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> vf.load_train_state(vf.train_state(model), other)
        >>> torch.equal(model.weight, other.weight)
        True
    """
    rng = state.get("rng", None)
    problems = [*_differences("model", state.get("model", TensorDict()), _model_state(model))]
    if optimizer is not None:
        problems += _optimizer_problems(state.get("optimizer", None), model, optimizer)
    if scheduler is not None:
        problems += _scheduler_problems(state.get("scheduler", None), scheduler)
    if rng is not None:  # there may be other CUDA devices than there were
        problems += _differences("rng", rng.exclude("cuda"), rng_state().exclude("cuda"))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"the state does not fit, nothing was loaded:\n{listed}")
    with torch.inference_mode(False):  # what is made here is trained on
        # All is decoded before anything is changed, as that may fail.
        if scheduler is not None:
            schedule = _beside(decode(state["scheduler"]), scheduler.state_dict())
        if optimizer is not None:
            groups = _beside(decode(state["optimizer", "param_groups"]), optimizer.param_groups)
    _load_model(state["model"], model)
    with torch.inference_mode(False):
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
        if optimizer is not None:
            _load_optimizer(state["optimizer", "state"], groups, model, optimizer)
    if rng is not None:
        load_rng_state(rng)


def _model_state(model: nn.Module) -> TensorDict:
    tensors = bare_module(model).state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"model.{name} must be a tensor, got extra state of {type(value)}")
    return TensorDict(dict(tensors))


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> TensorDict:
    names = list(_names(model, optimizer).values())
    packed = optimizer.state_dict()
    try:
        state = {
            names[index]: {
                key: _leaf(value, f"optimizer.state.{names[index]}.{key}") for key, value in values.items()
            }
            for index, values in packed["state"].items()
        }
    except TypeError as error:
        kind = type(optimizer).__name__
        raise TypeError(
            f"{error}; the state of {kind} cannot be saved: call train_state without it"
        ) from error
    groups = [
        {**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]
    ]
    groups = NonTensorData(encode(groups, "optimizer.param_groups"))
    return TensorDict({"state": TensorDict(state), "param_groups": groups})


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Fully qualified names of the optimizer's parameters, in the order of its numbers."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    names: dict[Tensor, str] = {}
    for name, parameter in bare_module(model).named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [list(parameter.shape) for parameter in parameters if parameter not in names]
    if foreign:
        raise ValueError(
            f"every parameter of the optimizer must be one of the model; it has others, of shapes {foreign}"
        )
    return {parameter: names[parameter] for parameter in parameters}


def _leaf(value: Any, where: str) -> Any:
    """`value` for a TensorDict: tensors detached, JSON wrapped, a window or channels as its arguments."""
    if isinstance(value, Tensor | TensorDictBase):
        return value.detach()
    if isinstance(value, Window):
        names = [field.name for field in fields(value)]
        return TensorDict({name: _leaf(getattr(value, name), f"{where}.{name}") for name in names})
    if isinstance(value, Channels):
        value = {"names": [*value.names], "capacity": value.capacity}
    return NonTensorData(to_json(value, where))


def _differences(section: str, saved: TensorDictBase, here: TensorDictBase) -> Iterator[str]:
    there, wanted = _by_name(saved), _by_name(here)
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            yield f"{section}.{name}: missing, it was not saved"
        elif name not in wanted:
            yield f"{section}.{name}: unexpected"
        elif there[name] != wanted[name]:
            yield f"{section}.{name}: must be {wanted[name]}, is {there[name]}"


def _by_name(state: TensorDictBase) -> dict[str, str]:
    """Dtype and shape of all leaves, in words."""
    leaves = state.items(include_nested=True, leaves_only=True)
    return {
        key if isinstance(key, str) else ".".join(key): f"{leaf.dtype}{list(leaf.shape)}"
        for key, leaf in leaves
    }


def _optimizer_problems(
    saved: TensorDictBase | None, model: nn.Module, optimizer: Optimizer
) -> Iterator[str]:
    names = _names(model, optimizer)
    if saved is None:
        yield "optimizer: missing, it was not saved"
        return
    absent = [f"optimizer.{name}" for name in ("param_groups", "state") if name not in saved.keys()]
    if absent:
        yield from (f"{name}: missing, it was not saved" for name in absent)
        return
    here = [{names[parameter] for parameter in group["params"]} for group in optimizer.param_groups]
    groups = decode(saved["param_groups"])
    if len(groups) != len(here):
        yield f"optimizer.param_groups: must be {len(here)} groups, is {len(groups)}"
    for index, (group, wanted) in enumerate(zip(groups, here, strict=False)):
        where, there = f"optimizer.param_groups.{index}", set(group["params"])
        yield from (f"{where}: missing {name}" for name in sorted(wanted - there))
        yield from (f"{where}: unexpected {name}" for name in sorted(there - wanted))
        options = sorted(optimizer.defaults.keys() - group.keys())
        yield from (f"{where}: missing option {option}" for option in options)
    # What others keep for a parameter cannot be known; LBFGS keeps vectors of all parameters at one.
    if type(optimizer).step.__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS):
        for group in optimizer.param_groups:
            shapes = {names[parameter]: parameter.shape for parameter in group["params"]}
            yield from _state_problems(saved["state"], shapes)


def _state_problems(saved: TensorDictBase, shapes: Mapping[str, torch.Size]) -> Iterator[str]:
    """What a torch optimizer could not go on with, in the state of the parameters of one group.

    A parameter may lack state, as one without a gradient does. Adafactor keeps other values for
    matrices than for vectors; but nowhere has one parameter a part of what another has.
    """
    states = {name: dict(saved[name].items()) for name in shapes if name in saved.keys()}
    keys = {frozenset(values) for values in states.values()}
    for name, values in states.items():
        where = f"optimizer.state.{name}"
        fuller = [other for other in keys if values and values.keys() < other]
        missing = {key for other in fuller for key in other - values.keys()}
        yield from (f"{where}.{key}: missing, other parameters have it" for key in sorted(missing))
        sizes = {
            key: value.shape for key, value in values.items() if isinstance(value, Tensor) and value.ndim
        }
        if not _fits([*sizes.values()], shapes[name]):
            wrong = {key: size for key, size in sizes.items() if size != shapes[name]}
            wanted = f"must be {list(shapes[name])} as its parameter, or []"
            yield from (f"{where}.{key}: {wanted}, is {list(size)}" for key, size in wrong.items())


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


def _scheduler_problems(saved: NonTensorData | None, scheduler: LRScheduler) -> Iterator[str]:
    if saved is None:
        yield "scheduler: missing, it was not saved"
        return
    here, there = scheduler.state_dict().keys(), decode(saved.data).keys()
    yield from (f"scheduler.{name}: missing, it was not saved" for name in sorted(here - there))
    yield from (f"scheduler.{name}: unexpected" for name in sorted(there - here))


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


def _load_model(saved: TensorDictBase, model: nn.Module) -> None:
    model = bare_module(model)
    values = model.state_dict()
    values.update({name: _placed(saved[name], target) for name, target in values.items()})
    model.load_state_dict(values)


def _placed(value: Tensor, target: Tensor) -> Tensor:
    """`value`, split as `target` is; each rank keeps its part of its own copy."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    return value


def _load_optimizer(
    saved: TensorDictBase, groups: list[dict[str, Any]], model: nn.Module, optimizer: Optimizer
) -> None:
    # The state is set below: this call would cast it to the dtype of the parameters.
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    names = _names(model, optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = saved.get(names[parameter], TensorDict())
            state = {k: _state_value(k, v, parameter, group) for k, v in values.items()}
            if state:
                optimizer.state[parameter] = state


def _state_value(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A copy of `value` where the optimizer wants it, in the dtype in which it was saved."""
    if not isinstance(value, Tensor):
        return value.data
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.clone()
    value = value.to(parameter.device, copy=True)
    return _placed(value, parameter) if value.shape == parameter.shape else value
