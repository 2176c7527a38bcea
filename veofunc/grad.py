"""`grad` and `grad_and_value`: `torch.func`'s signatures and results on the autograd engine.

Under `torch.func.grad` PyTorch forbids saved-tensor hooks. Here they work, and with them `offload`,
activation checkpointing and whatever else hangs on the engine.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["grad", "grad_and_value"]

CLOSED = "_veofunc_closed_variable"


def grad(func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """Like `torch.func.grad`, on the autograd engine.

    Args:
        func: returns a scalar tensor, or `(scalar, aux)` with `has_aux`.
        argnums: which positional arguments to differentiate with respect to: each a tensor, a TensorDict
            or a pytree of floating-point tensors.
        has_aux: `func` returns `(scalar, aux)`; observing transforms do.

    Returns:
        A function of the same arguments that returns the gradients, shaped as the arguments, or
        `(gradients, aux)` with `has_aux`.

    Raises:
        ValueError: see `grad_and_value`.
        TypeError: see `grad_and_value`.
        RuntimeError: see `grad_and_value`.

    Example:
        >>> import torch, veofunc as vf
        >>> vf.grad(lambda x: (x**2).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])

    Source: `torch.func.grad`.
    """
    with_value = grad_and_value(func, argnums, has_aux)

    @functools.wraps(func, updated=())
    def gradient(*args, **kwargs):
        grads, value = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def grad_and_value(func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """Like `torch.func.grad_and_value`, on the autograd engine.

    Saved-tensor hooks, `offload` and activation checkpointing work inside. Nested calls give higher
    derivatives. Tensors that appear under several names (tied weights) are one variable: each name gets
    its whole gradient.

    Args:
        func: returns a scalar tensor, or `(scalar, aux)` with `has_aux`.
        argnums: which positional arguments to differentiate with respect to: each a tensor, a TensorDict
            or a pytree of floating-point tensors.
        has_aux: `func` returns `(scalar, aux)`; observing transforms do.

    Returns:
        A function of the same arguments that returns `(gradients, value)`, or
        `(gradients, (value, aux))` with `has_aux`. `value` and `aux` are detached unless an outer
        derivative needs them.

    Raises:
        ValueError: `func` did not use one of the tensors (named), where `torch.func` would return zeros;
            or it swapped parameters into an FSDP2 module, which ignores them; or its value is no scalar.
        TypeError: a tensor to differentiate with respect to is not floating-point or complex, or an option is
            of the wrong kind.
        RuntimeError: in `torch.inference_mode`, or under a transform of `torch.func`.

    Example:
        >>> import torch, veofunc as vf
        >>> from tensordict import TensorDict
        >>> params = TensorDict({"w": torch.tensor([1.0, 2.0])})
        >>> grads, value = vf.grad_and_value(lambda p: (p["w"] ** 2).sum())(params)
        >>> grads["w"], value
        (tensor([2., 4.]), tensor(5.))

    Source: `torch.func.grad_and_value`.
    """
    positions = _positions(func, argnums)

    @functools.wraps(func, updated=())
    def gradient_and_value(*args, **kwargs):
        differentiable = torch.is_grad_enabled()  # whether an outer derivative may be taken
        variables = _Variables(differentiable)
        args = list(args)
        for position in positions:
            args[position] = variables.replace(args, position)
        with torch.enable_grad(), _no_swapped_fsdp(variables.names):
            value, aux = _value_and_aux(func(*args, **kwargs), has_aux)
            create_graph = differentiable and variables.depend_on_others(value)
            grads = variables.gradients(value, create_graph)
            variables.close()
        grads = tuple(grads) if isinstance(argnums, tuple) else grads[0]
        if not create_graph:
            value, aux = pytree.tree_map_only(Tensor, Tensor.detach, (value, aux))
        return grads, ((value, aux) if has_aux else value)

    return gradient_and_value


def _positions(func: Callable, argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    if not callable(func):
        raise TypeError(f"func must be callable, got {type(func).__name__}")
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(isinstance(position, int) and not isinstance(position, bool) for position in positions):
        raise TypeError(f"argnums must be an int or a tuple of ints, got {argnums!r}")
    if not positions or len(set(positions)) < len(positions):
        raise ValueError(f"argnums must be one or more different positions, got {argnums!r}")
    return positions


class _Variables:
    """The tensors that one call differentiates with respect to, each once."""

    def __init__(self, differentiable: bool):
        self.differentiable = differentiable
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.positions: list[int] = []
        self.index: dict[int, int] = {}  # id of the user's tensor -> its place in `tensors`
        self.trees: list[tuple[list[int], pytree.TreeSpec]] = []  # one per differentiated argument

    def replace(self, args: list, position: int) -> Any:
        """`args[position]` with its tensors replaced by variables."""
        if not -len(args) <= position < len(args):
            raise ValueError(
                f"argnums names argument {position}, but there are {len(args)} positional arguments"
            )
        position %= len(args)
        if position in self.positions:
            raise ValueError(f"argnums name one argument twice, of {len(args)} positional arguments")
        self.positions.append(position)
        leaves, spec = pytree.tree_flatten_with_path(args[position])
        where = [self._place(leaf, f"{position}{pytree.keystr(path)}") for path, leaf in leaves]
        self.trees.append((where, spec))
        return pytree.tree_unflatten([self.tensors[place] for place in where], spec)

    def _place(self, leaf: Any, name: str) -> int:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"argument {name} must be a floating-point or complex tensor, got {kind}")
        if torch.is_inference_mode_enabled() or torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            raise RuntimeError(
                "veofunc.grad runs on the autograd engine, which is off in torch.inference_mode and under "
                "torch.func's transforms; use torch.func.grad there"
            )
        if id(leaf) not in self.index:
            # A tensor that an outer derivative runs through stays connected to it.
            outer = self.differentiable and leaf.requires_grad
            self.tensors.append(leaf.view_as(leaf) if outer else leaf.detach().requires_grad_())
            self.names.append(name)
            self.index[id(leaf)] = len(self.tensors) - 1
        return self.index[id(leaf)]

    def depend_on_others(self, value: Tensor) -> bool:
        """Whether an outer derivative may run through `value`: it depends on a leaf that is not ours."""
        ours = {id(tensor) for tensor in self.tensors}
        seen, todo = set(), [value.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)  # only AccumulateGrad has one
            if leaf is not None and id(leaf) not in ours and not getattr(leaf, CLOSED, False):
                return True
            todo.extend(following for following, _ in node.next_functions)
        return False

    def close(self) -> None:
        """Marks the variables: after the call nobody can differentiate with respect to them."""
        for tensor in self.tensors:
            setattr(tensor, CLOSED, True)

    def gradients(self, value: Tensor, create_graph: bool) -> list[Any]:
        """The gradients, one tree per differentiated argument."""
        grads = [None] * len(self.tensors)
        if value.requires_grad:
            grads = torch.autograd.grad(value, self.tensors, create_graph=create_graph, allow_unused=True)
        unused = [name for name, g in zip(self.names, grads, strict=True) if g is None]
        if unused:
            raise ValueError(
                f"the value does not depend on {len(unused)} of {len(grads)} tensors to differentiate "
                f"with respect to: argument {', argument '.join(unused[:5])}"
                f"{', ...' if len(unused) > 5 else ''}. Use them, leave them out of that argument, or, "
                "if a module should have used them, swap them in with torch.func.functional_call "
                "(FSDP2 modules ignore a swap: call .backward() there)"
            )
        return [pytree.tree_unflatten([grads[i] for i in where], spec) for where, spec in self.trees]


def _value_and_aux(returned: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(f"has_aux=True says that func returns (value, aux), got {returned!r}")
    value, aux = returned if has_aux else (returned, None)
    if not isinstance(value, Tensor):
        hint = "; it observes, so pass has_aux=True" if isinstance(value, tuple) else ""
        raise TypeError(f"func must return a scalar tensor, got {type(value).__name__}{hint}")
    if value.dim() != 0:
        raise ValueError(f"func must return a scalar tensor (shape []), got shape {list(value.shape)}")
    return value, aux


@contextlib.contextmanager
def _no_swapped_fsdp(names: list[str]) -> Generator[None]:
    """Refuses FSDP2 modules that have parameters of these names: they would silently ignore the swap."""
    if not (dist.is_available() and dist.is_initialized()):
        yield  # nothing can be sharded
        return
    from torch.distributed.fsdp import FSDPModule  # slow to import

    thread, keys = threading.get_ident(), {_key(name) for name in names}

    def refuse(module, args):
        if threading.get_ident() != thread or not isinstance(module, FSDPModule):
            return
        mine = tuple(name for name, _ in module.named_parameters())
        if any(key == name or key.endswith("." + name) for key in keys for name in mine):
            raise ValueError(
                "func runs an FSDP2 module, which ignores swapped parameters: their gradients would be "
                "wrong. Call loss.backward() on the module's own parameters, or shard after differentiating"
            )

    hook = nn.modules.module.register_module_forward_pre_hook(refuse)  # before FSDP2's own
    try:
        yield
    finally:
        hook.remove()


def _key(name: str) -> str:
    """`0['layers']['0.weight']` as the parameter name `layers.0.weight`."""
    return ".".join(re.findall(r"\['(.*?)'\]", name))
