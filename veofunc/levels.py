"""The transforms of `torch.func` that run now, and the tensors they wrap.

Each transform has a level, counted from 1, and wraps the tensors that it follows, the innermost outside.
Level 0 is plain autograd. When a transform ends its number is used again, and its wrappers are dead.

PyTorch has no public way to ask for any of this.
"""

from __future__ import annotations

from torch import Tensor
from torch._C import _functorch
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad

__all__ = [
    "alive",
    "get_unwrapped",
    "in_forward_mode",
    "is_functorch_wrapped_tensor",
    "is_last",
    "level",
    "num_vmaps",
    "plain_of",
    "requires_grad",
]


def level() -> int:
    """Level of the innermost transform; 0 outside of all."""
    interpreter = _functorch.peek_interpreter_stack()
    return 0 if interpreter is None else interpreter.level()


def num_vmaps() -> int:
    """How many of the transforms are `vmap`."""
    return sum(i.key() == _functorch.TransformType.Vmap for i in _functorch.get_interpreter_stack() or ())


def in_forward_mode() -> bool:
    """Whether derivatives are taken in forward mode, by `jvp` and its kin or by plain autograd."""
    return forward_ad._current_level >= 0


def is_last(variable: Tensor) -> bool:
    """Whether this backward pass is the one by which `torch.func.grad` ends the level of `variable`.

    That pass, alone, records a graph although it gives up the one it runs on.
    """
    in_level = _functorch.is_gradtrackingtensor(variable) and alive(variable) is variable
    return in_level and not _get_current_graph_task_keep_graph()


def alive(tensor: Tensor) -> Tensor:
    """`tensor` without the wrappers of transforms that have ended."""
    while (inner := _functorch.unwrap_if_dead(tensor)) is not tensor:
        tensor = inner
    return tensor


def plain_of(tensor: Tensor) -> Tensor:
    """`tensor` without any wrappers."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def requires_grad(tensor: Tensor) -> bool:
    """Whether `tensor` requires grad at any level."""
    while is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad
