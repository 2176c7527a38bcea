"""What a module reads and what it lets out while it runs, so that nothing passes by a pure function of it.

What such a function cannot stand for raises: reading tensors from elsewhere that are differentiated or
batched, results that leave by another way than the output, changes in place of what came from outside.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from veofunc.levels import get_unwrapped, is_functorch_wrapped_tensor, plain_of

__all__ = ["Refusal", "Watch", "changed", "storage_of", "version_of"]

DETACHES = (Tensor.detach, Tensor.detach_, torch.detach, vars(torch._C.TensorBase)["data"].__get__)


class Refusal(RuntimeError):
    """A block does what only the autograd engine can follow."""

    def __init__(self, path: str, what: str):
        super().__init__(
            f"offload cannot run block {path!r} under torch.func: it {what}. Use veofunc.grad or "
            "veofunc.grad_and_value, which have torch.func's signatures and allow it, or leave the block out"
        )


class Watch(TorchFunctionMode):
    """Follows which tensors depend on the inputs, and sees those that come from elsewhere.

    Args:
        path: the module's path, for messages.
        inputs: the tensors that the module may read: parameters and buffers, then arguments.
        num_state: how many of them are parameters and buffers.

    Attributes:
        captured: constants from elsewhere that it read, with their versions.

    Raises:
        RuntimeError: while it is on, or in `finish`: see above.
    """

    def __init__(self, path: str, inputs: Sequence[Tensor], num_state: int):
        super().__init__()
        self.path, self.num_state = path, num_state
        # By id: a tensor, and whether it depends on the inputs.
        self._known: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self.captured: list[tuple[weakref.ref[Tensor], int]] = []
        for tensor in inputs:
            self._note(tensor, depends=True)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        is_getter = getattr(func, "__name__", None) == "__get__"  # of an attribute, such as shape or mT
        if not is_getter:
            self._meet(func, args, kwargs, given)
        depends = torch.is_grad_enabled() and func not in DETACHES and any(map(self._depends, given))
        result = func(*args, **kwargs)
        if not is_getter or all(map(self._is_known, given)):
            for made in _tensors(result):
                self._note(made, depends or self._depends(made))
        if func is Tensor.__setitem__ and depends:
            self._note(given[0], depends=True)
        return result

    def _meet(self, func: Callable, args: tuple, kwargs: dict, given: Sequence[Tensor]) -> None:
        if _moves_statistics(func, args, kwargs):
            raise Refusal(self.path, "moves the running statistics of a normalisation (eval() keeps them)")
        for tensor in given:
            if self._is_known(tensor):
                continue
            inner = tensor
            while is_functorch_wrapped_tensor(inner) and not self._is_known(inner):
                inner = get_unwrapped(inner)
            if self._is_known(inner):  # wrapped by a transform that the module runs itself
                continue
            if is_functorch_wrapped_tensor(tensor):
                raise Refusal(self.path, _reads(tensor, "that torch.func transforms"))
            if tensor.requires_grad and torch.is_grad_enabled() and func not in DETACHES:
                raise Refusal(self.path, _reads(tensor, "that requires grad"))
            self.captured.append((weakref.ref(tensor), version_of(tensor)))
            self._note(tensor, depends=False)

    def _note(self, tensor: Tensor, depends: bool) -> None:
        depends = depends and (tensor.is_floating_point() or tensor.is_complex())
        self._known[id(tensor)] = (weakref.ref(tensor), depends)

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known[0]() is tensor  # an id is used again after a tensor's death

    def _depends(self, tensor: Tensor) -> bool:
        return self._is_known(tensor) and self._known[id(tensor)][1]

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a derivative of `tensor` is zero, and it means something when the module has ended."""
        is_lasting = not is_functorch_wrapped_tensor(tensor)
        return is_lasting and self._is_known(tensor) and not self._depends(tensor)

    def finish(self) -> None:
        """The module has ended, and its output was let go: nothing that depends on inputs may be alive."""
        if changed(self.captured):
            raise Refusal(self.path, "changes a tensor in place that is not its own")
        for generation in (1, 2):  # what only a cycle holds is as good as dead
            if not self._alive():
                return
            gc.collect(generation)
        if alive := self._alive():
            raise Refusal(
                self.path,
                f"lets out a tensor of shape {list(alive[0].shape)} by another way than its output, such as "
                "an attribute or a list, or returns it in an object that is no pytree",
            )

    def _alive(self) -> list[Tensor]:
        made = [(ref(), depends) for ref, depends in list(self._known.values())[self.num_state :]]
        return [t for t, depends in made if t is not None and (depends or is_functorch_wrapped_tensor(t))]


def version_of(tensor: Tensor) -> int:
    """How often `tensor` was changed in place; what was made in inference mode does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def changed(noted: Iterable[tuple[weakref.ref[Tensor], int]]) -> bool:
    """Whether any of these tensors, if it is still there, was changed in place since."""
    return any(version_of(t) != version for ref, version in noted if (t := ref()) is not None)


def storage_of(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    plain = plain_of(tensor)
    return plain.untyped_storage()._cdata if plain.layout is torch.strided else id(plain)


def _tensors(tree: Any) -> Generator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def _reads(tensor: Tensor, that: str) -> str:
    return (
        f"reads a tensor of shape {list(tensor.shape)} {that}, and that is neither its argument nor its "
        "parameter or buffer (pass it as an argument)"
    )


def _moves_statistics(func: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a normalisation changes running statistics, which it does without raising their versions."""
    if func in (F.batch_norm, F.instance_norm):
        statistics = args[1] if len(args) > 1 else kwargs.get("running_mean")
        return statistics is not None and bool(kwargs.get("training") or kwargs.get("use_input_stats"))
    if func in (torch.batch_norm, torch.instance_norm, torch.native_batch_norm):
        return args[3] is not None and args[5]
    return False
