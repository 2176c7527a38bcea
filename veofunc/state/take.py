"""`train_state`: the training state as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, TypeAlias

from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from veofunc.channel.channels import Channels
from veofunc.checkpoint.values import decode, encode, to_json
from veofunc.rng import rng_state
from veofunc.transform import bare_module
from veofunc.window import Window

__all__ = ["Path", "by_path", "is_packed", "parameter_names", "scratch_buffers", "train_state", "unpacked"]

Path: TypeAlias = tuple[str, ...]  # keys from the root of the state

SECTIONS = {  # what may be one or several
    "optimizer": (Optimizer, "be a torch.optim.Optimizer"),
    "scheduler": (Stateful, "have state_dict and load_state_dict"),
}


def train_state(
    model: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    scheduler: LRScheduler | Mapping[str, LRScheduler] | None = None,
    rng: bool = True,
    buffers: Literal["persistent", "all"] = "persistent",
    **extra: Any,
) -> TensorDict:
    """The whole training state as one TensorDict, by fully qualified names.

    Nothing is copied or changed: its tensors are those of the model, the optimizer and the extras, and
    change with them. `Checkpointer.save` copies them; `.clone()` does, too. What is not a tensor is
    a copy. What the optimizer makes at its first step is absent before it.

    Args:
        model: its sharded parameters (FSDP2) are DTensors; tied ones appear under each name. Names are
            those of the module inside `torch.compile` and `DistributedDataParallel`.
        optimizer: over parameters of `model`; or several, by names of your choice.
        scheduler: one, or several by name.
        rng: whether to take the random states of torch on the CPU and all devices of the accelerator,
            numpy and Python.
        buffers: "all" takes those of modules that are not persistent, too.
        extra: under names of your choice: a module, as an average of the weights; a gradient scaler, data
            loader or anything else that has `state_dict` and `load_state_dict`; tensors, TensorDicts, JSON
            values, a `Window` or `Channels`. Tensors in the state of a loader come and go: leave it out of
            the state that `Checkpointer.restore` is given, and what was saved comes as it is.

    Returns:
        A TensorDict of the sections `model` (parameters and buffers), `optimizer` (`state` and
        `param_groups`), `scheduler`, `rng` and the names in `extra`. Of several optimizers or
        schedulers each has its own part of the section. What is neither tensor nor JSON in a
        state is encoded as JSON; tensors among it are under `tensors`, the rest is under `json`.

    Raises:
        TypeError: a value is neither a tensor nor JSON, nor can be encoded as such; names it. Or `optimizer`
            is not an Optimizer, or a scheduler has no state.
        ValueError: a parameter of the optimizer is not in the model, `buffers` is another word, or numpy's
            global generator was replaced by one of another kind.

    Example:
        >>> import torch, veofunc as vf
        >>> model = torch.nn.Linear(2, 1)
        >>> state = vf.train_state(model, torch.optim.AdamW(model.parameters()), step=3)
        >>> sorted(state.keys()), sorted(state["model"].keys()), state["step"]
        (['model', 'optimizer', 'rng', 'step'], ['bias', 'weight'], 3)
    """
    if buffers not in ("persistent", "all"):
        raise ValueError(f'buffers must be "persistent" or "all", got {buffers!r}')
    state = TensorDict({"model": _module_state(model, "model", buffers)})
    for path, each in by_path("optimizer", optimizer).items():
        state[path] = _optimizer_state(model, each, ".".join(path))
    for path, each in by_path("scheduler", scheduler).items():
        state[path] = NonTensorData(encode(each.state_dict(), ".".join(path)))
    if rng:
        state["rng"] = rng_state()
    for name, value in extra.items():
        state[name] = _extra_state(value, name, buffers)
    return state


def by_path(section: str, given: Any) -> dict[Path, Any]:
    """The one object of a section, or the several, by their path in the state.

    Raises:
        TypeError: one is of another kind.
    """
    if given is None:
        return {}
    found: dict[Path, Any] = {(section,): given}
    if isinstance(given, Mapping):
        found = {(section, name): one for name, one in given.items()}
    kind, wanted = SECTIONS[section]
    for path, one in found.items():
        if not isinstance(one, kind):
            raise TypeError(f"{'.'.join(path)} must {wanted}, got {type(one).__name__}")
    return found


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Fully qualified names of the optimizer's parameters, in the order of its numbers.

    Raises:
        ValueError: the model lacks some; tells their shapes.
    """
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


def scratch_buffers(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The buffers that are not among the `values` of the module's own state: those not persistent."""
    named = bare_module(module).named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in named if name not in values}


def is_packed(leaf: Any) -> bool:
    """Whether `leaf` is what `_packed` makes of all but tensors."""
    return is_non_tensor(leaf) or (isinstance(leaf, TensorDictBase) and "json" in leaf.keys())


def unpacked(leaf: Any) -> Any:
    """A copy of what `_packed` was given."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    if is_non_tensor(leaf):
        return decode(leaf.data)
    return decode(leaf["json"], dict(leaf["tensors"].items()))


def _module_state(module: nn.Module, where: str, buffers: str) -> TensorDict:
    values = dict(bare_module(module).state_dict())
    if buffers == "all":
        values |= scratch_buffers(module, values)
    return TensorDict({name: _packed(value, f"{where}.{name}") for name, value in values.items()})


def _optimizer_state(model: nn.Module, optimizer: Optimizer, where: str) -> TensorDict:
    names = list(parameter_names(model, optimizer).values())
    packed = optimizer.state_dict()
    try:
        state = {
            names[index]: {
                key: _packed(value, f"{where}.state.{names[index]}.{key}") for key, value in values.items()
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
    groups = NonTensorData(encode(groups, f"{where}.param_groups"))
    return TensorDict({"state": TensorDict(state), "param_groups": groups})


def _extra_state(value: Any, where: str, buffers: str) -> Any:
    if isinstance(value, Tensor | TensorDictBase):
        return value.detach()
    if isinstance(value, Window):
        names = [field.name for field in fields(value)]
        return TensorDict({n: _extra_state(getattr(value, n), f"{where}.{n}", buffers) for n in names})
    if isinstance(value, Optimizer):
        raise TypeError(f"{where} is an optimizer; of several give a mapping: optimizer={{{where!r}: ...}}")
    if isinstance(value, nn.Module):
        return _module_state(value, where, buffers)
    if isinstance(value, Stateful):
        return _packed(value.state_dict(), where)
    if isinstance(value, Channels):
        value = {"names": [*value.names], "capacity": value.capacity}
    return NonTensorData(to_json(value, where))


def _packed(value: Any, where: str) -> Any:
    """`value` for a TensorDict; of a list, dict or the like the tensors, and beside them the rest as JSON.

    Also if there are no tensors: later there may be, and the structure stays.
    """
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    tensors: dict[str, Tensor] = {}
    rest = encode(value, where, tensors)
    if not isinstance(rest, list | dict):
        return NonTensorData(rest)
    return TensorDict({"json": NonTensorData(rest), "tensors": TensorDict(tensors)})
