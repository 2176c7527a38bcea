"""Which modules run inside code that `torch.compile` made, and how to run them without it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable

import torch
from torch import nn

from veofunc.transform import inside

__all__ = ["as_written", "compiled_modules"]


class _Uncompiled:
    """How many want nothing to be compiled now. The stance of the compiler is one for all threads."""

    def __init__(self):
        self.lock, self.number, self.stance = threading.Lock(), 0, contextlib.ExitStack()

    def more(self) -> None:
        with self.lock:
            if not self.number:
                self.stance.enter_context(torch.compiler.set_stance("force_eager"))
            self.number += 1

    def fewer(self) -> None:
        with self.lock:
            self.number -= 1
            if not self.number:
                self.stance.close()


uncompiled = _Uncompiled()


@contextlib.contextmanager
def as_written() -> Generator[None]:
    """While it lasts nothing is compiled, and what is compiled runs as it was written, in all threads."""
    uncompiled.more()
    try:
        yield
    finally:
        uncompiled.fewer()


def compiled_modules(fn: Callable, model: nn.Module) -> set[nn.Module]:
    """Those modules of `model`, which `fn` runs, whose hooks would be part of compiled code.

    Such code is compiled anew when one of its modules has another hook than before.
    """
    around: Callable | None = fn
    while around is not None and not isinstance(around, nn.Module):
        if _is_compiled(around):
            return set(model.modules())
        around = inside(around)
    outermost = model if around is None else around
    roots = {root for module in outermost.modules() for root in _compiled_in(module)}
    return {module for root in roots for module in root.modules()}


def _compiled_in(module: nn.Module) -> Iterable[nn.Module]:
    if module._compiled_call_impl is not None:
        return [module]
    return module.children() if _is_compiled(module.forward) else []  # its own hooks run around that


def _is_compiled(function: Callable) -> bool:
    return getattr(function, "_torchdynamo_orig_callable", None) is not None
