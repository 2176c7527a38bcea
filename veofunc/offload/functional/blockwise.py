"""`offload` under `torch.func`, where PyTorch forbids saved-tensor hooks: block by block.

A block (a module that was named) becomes one operation whose backward runs it again, from its inputs. Those
that are offloaded wait in the store. What autograd holds in their place are ghosts: expanded scalars that
keep the way of the gradient, and with it every order of derivatives at every level of transforms.

The backward of a block is again such an operation, of the same inputs and of the gradient that comes in,
and so on. So there is one rule, exact at any order, and no order holds more than inputs.

Source: `jax.checkpoint` with offloaded residuals; `torch.func`'s rules for `torch.autograd.Function`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from veofunc.levels import (
    alive,
    in_forward_mode,
    is_last,
    level,
    num_vmaps,
    plain_of,
    requires_grad,
)
from veofunc.offload.ahead import ReadAhead
from veofunc.offload.functional.pure import PureCall, pure_call
from veofunc.offload.functional.watch import Refusal, version_of
from veofunc.offload.layout import Layout, is_plain
from veofunc.offload.ledger import Ledger
from veofunc.offload.saved import Moved
from veofunc.offload.stores.store import Store
from veofunc.transform import module_calls

__all__ = ["run_under_torch_func"]


def run_under_torch_func(
    fn: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    blocks: Mapping[nn.Module, str],
    decide: Callable[[nn.Module, str, Tensor], bool],
    store: Store,
    ledger: Ledger,
    ahead: ReadAhead | None = None,
) -> Any:
    """`fn(*args, **kwargs)`, with derivatives of `blocks` by recomputation from their inputs.

    Args:
        fn: what to call.
        args: positional arguments, and `kwargs`: by name.
        blocks: modules that `fn` runs, with their paths. One inside another is part of it.
        decide: whether a tensor (without the wrappers of transforms) that is passed to a block waits in the
            store. It is not asked about the block's parameters and buffers, nor about sparse tensors,
            subclasses and other kinds that are no plain memory: these are kept.
        store: where they wait; it must take what `decide` chooses.
        ledger: counts.
        ahead: what brings them back ahead of backward, if anything does.

    Raises:
        RuntimeError: a block does what recomputation would get wrong; see `veofunc.offload.functional.watch`.
    """
    for block, path in blocks.items():
        _check_block(block, path)
    run = _Run(blocks, decide, store, ledger, ahead or ReadAhead(0))
    with module_calls(blocks, run.around):
        return fn(*args, **kwargs)


def _check_block(block: nn.Module, path: str) -> None:
    if any(map(_is_compiled, block.modules())):
        raise Refusal(path, "is compiled, or a module in it")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import

        if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in block.modules()):
            raise Refusal(path, "is sharded by FSDP, whose parameters are not there in backward")


def _is_compiled(module: nn.Module) -> bool:
    by_dynamo = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    return by_dynamo or isinstance(module, torch.jit.ScriptModule)


@dataclass
class _Run:
    """One call of the wrapped function.

    Attributes:
        known: what was moved: by the id of a tensor, it, its version then, and its copy.
    """

    blocks: Mapping[nn.Module, str]
    decide: Callable[[nn.Module, str, Tensor], bool]
    store: Store
    ledger: Ledger
    ahead: ReadAhead
    known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Moved]]] = field(default_factory=dict)

    def around(self, block: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """What the block returns, from the operation that stands for it if there may be a derivative.

        In forward mode nothing is saved, so the block runs as it is.
        """
        if not torch.is_grad_enabled() or in_forward_mode():
            return forward(*args, **kwargs)
        call, tensors = pure_call(block, self.blocks[block], args, kwargs)
        if not any(map(requires_grad, tensors)):
            return forward(*args, **kwargs)
        waiting = self._waiting(block, call, tensors)
        operands = [_Ghost.apply(t) if i in waiting else t for i, t in enumerate(tensors)]
        made = _Block.apply(_Rule(call, waiting, call.run, len(operands), num_vmaps()), *operands)
        for wait in waiting.values():
            wait.tensor = None
        return call.output(tensors, made)

    def _waiting(self, block: nn.Module, call: PureCall, tensors: Sequence[Tensor]) -> dict[int, _Waiting]:
        waiting = {}
        for index, tensor in enumerate(tensors):
            plain = plain_of(tensor)
            movable = is_plain(plain)
            nbytes = Layout.of(plain).nbytes if movable else plain.numel() * plain.element_size()
            self.ledger.add("packed", nbytes)
            if movable and index >= call.num_state and self.decide(block, call.path, plain):
                waiting[index] = _Waiting(plain, nbytes, self)
            else:
                self.ledger.add("kept", nbytes)
        return waiting

    def move(self, tensor: Tensor, nbytes: int) -> Moved:
        """The copy of `tensor` in the store. A tensor that several blocks are given is moved once."""
        source, version, moved = self.known.get(id(tensor), (lambda: None, 0, lambda: None))
        moved = moved() if source() is tensor and version == version_of(tensor) else None
        if moved is not None:
            self.ledger.add("deduplicated", nbytes)
            return moved
        moved = Moved(self.store, tensor.detach(), nbytes, self.ledger, self.ahead)
        self.ledger.add("moved", nbytes)
        self.ahead.add(moved)
        self.known[id(tensor)] = (weakref.ref(tensor), version_of(tensor), weakref.ref(moved))
        return moved


class _Waiting:
    """A tensor that waits in the store until a block is run again. It dies with the graph."""

    def __init__(self, tensor: Tensor, nbytes: int, run: _Run):
        self.tensor: Tensor | None = tensor  # itself, as long as the forward pass needs it
        self.nbytes, self.run = nbytes, run
        self.moved: Moved | None = None
        self.position = self.times = 0

    def get(self) -> Tensor:
        if self.moved is None:  # the forward pass; the copy is made while it computes
            assert self.tensor is not None
            self.position = self.run.ahead.position
            self.moved = self.run.move(self.tensor, self.nbytes)
            return self.tensor
        self.moved.wanted()
        self.run.ahead.reached(self.position, self.times)
        tensor = self.moved.get()
        self.run.ledger.add("restored_again" if self.times else "restored", self.nbytes)
        self.times += 1
        return tensor

    def __del__(self):
        if self.moved is not None and not self.times:
            self.run.ledger.add("dropped", self.nbytes)


@dataclass(frozen=True)
class _Rule:
    """A function of tensors, that one call of a block and transforms of it make, and how to compute it.

    Attributes:
        call: the call. Its tensors are the first operands.
        waiting: by position, what waits for the operands that are ghosts.
        function: what to compute.
        num_operands: how many it has.
        num_vmaps: of those that the block ran under, how many are not among the transforms.
        last_at: level of transforms at which nobody will differentiate the result.
    """

    call: PureCall
    waiting: Mapping[int, _Waiting]
    function: Callable[..., tuple[Tensor, ...]]
    num_operands: int
    num_vmaps: int
    last_at: int | None = None

    def compute(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The result, for plain tensors."""
        values = [self.waiting[i].get() if i in self.waiting else t for i, t in enumerate(operands)]
        values = [value.detach() for value in values]
        kept = [i for i in range(self.call.num_tensors) if i not in self.waiting]
        with self.call.surroundings(values, kept, self.num_vmaps):
            return self.function(*values)

    def vjp(self, wrt: Sequence[int], outs: Sequence[int], last_at: int | None) -> _Rule:
        """Gradients of operands `wrt`. Further operands: the gradients of the results `outs`."""

        def gradients(*operands: Tensor) -> tuple[Tensor, ...]:
            of = self._of(wrt, operands)

            def outputs(*variables: Tensor) -> tuple[Tensor, ...]:
                results = of(*variables)
                return tuple(results[i] for i in outs)

            pull_back = torch.func.vjp(outputs, *(operands[i] for i in wrt))[1]
            return pull_back(operands[self.num_operands :])

        return replace(self, function=gradients, num_operands=self.num_operands + len(outs), last_at=last_at)

    def jvp(self, wrt: Sequence[int]) -> _Rule:
        """Tangents of the results. Further operands: the tangents of operands `wrt`."""

        def tangents(*operands: Tensor) -> tuple[Tensor, ...]:
            primals = tuple(operands[i] for i in wrt)
            return torch.func.jvp(self._of(wrt, operands), primals, operands[self.num_operands :])[1]

        return replace(self, function=tangents, num_operands=self.num_operands + len(wrt), last_at=None)

    def vmap(self, info: Any, in_dims: tuple[int | None, ...]) -> _Rule:
        """The same for a batch; the results have it in front."""
        # A vmap that began after the block ran does not change the random numbers that it drew.
        began_before = any(dim is not None for dim in in_dims[: self.call.num_tensors])
        function = torch.func.vmap(
            self.function, in_dims, randomness=info.randomness if began_before else "same"
        )
        return replace(self, function=function, num_vmaps=self.num_vmaps - 1)

    def _of(self, wrt: Sequence[int], operands: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """The function, of the operands `wrt` alone."""

        def of(*variables: Tensor) -> tuple[Tensor, ...]:
            inner = list(operands[: self.num_operands])
            for i, variable in zip(wrt, variables, strict=True):
                inner[i] = variable
            return self.function(*inner)

        return of


class _Block(torch.autograd.Function):
    """The operation that stands for a block, or for a derivative of it of any order."""

    @staticmethod
    def forward(*inputs):
        rule, *operands = inputs
        return rule.compute(operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rule, *operands = inputs
        ctx.level = level()
        ctx.set_materialize_grads(False)
        if ctx.rule.last_at != ctx.level:
            ctx.save_for_backward(*operands)
        if in_forward_mode():
            ctx.save_for_forward(*operands)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        rule, *operands = inputs
        return _Block.apply(rule.vmap(info, in_dims[1:]), *operands), 0

    @staticmethod
    def backward(ctx, *grads):
        if ctx.rule.last_at == ctx.level:
            raise RuntimeError(
                "a gradient that offload computed in torch.autograd.grad(..., create_graph=True, "
                "retain_graph=False) under torch.func cannot be differentiated: leave out retain_graph, "
                "or use veofunc.grad"
            )
        wrt = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        outs = [i for i, grad in enumerate(grads) if grad is not None]
        if not outs:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        operands = [alive(t) for t in (*saved, *(grads[i] for i in outs))]
        if not torch.is_grad_enabled():  # for lower levels too, as it is for any other operation
            operands = [t.detach() for t in operands]
        rule = ctx.rule.vjp(wrt, outs, ctx.level if is_last(saved[wrt[0]]) else None)
        found = dict(zip(wrt, _Block.apply(rule, *operands), strict=True))
        return (None, *map(found.get, range(len(saved))))

    @staticmethod
    def jvp(ctx, *tangents):
        _, *tangents = tangents
        wrt = [i for i, tangent in enumerate(tangents) if tangent is not None]
        return _Block.apply(ctx.rule.jvp(wrt), *ctx.saved_tensors, *(tangents[i] for i in wrt))


class _Ghost(torch.autograd.Function):
    """An expanded scalar with the shape of `tensor` and its place in the graph, but without its values."""

    @staticmethod
    def forward(*inputs):
        (tensor,) = inputs
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _Ghost.apply(*inputs), in_dims[0]

    @staticmethod
    def backward(ctx, *grads):
        return grads
