"""A function with blocks under `torch.func`, a store that counts, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils import _pytree as pytree

from veofunc.offload.functional.blockwise import run_under_torch_func
from veofunc.offload.ledger import Ledger

WIDTH = 4


class CloneStore:
    """Keeps clones, and counts those that live."""

    def __init__(self):
        self.live = 0
        self.asked: list[tuple[int, ...]] = []  # shapes of what was to be brought back ahead

    def accepts(self, tensor):
        return True

    def put(self, tensor):
        assert not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        return CloneSlot(self, tensor.clone())


class CloneSlot:
    def __init__(self, store, content):
        self.store, self.content = store, content
        store.live += 1

    def prefetch(self):
        self.store.asked.append(tuple(self.content.shape))

    def get(self):
        return self.content.clone()

    def __del__(self):
        self.store.live -= 1


class Offloaded:
    """`fn` with `blocks` run by `run_under_torch_func`, and what it counted."""

    def __init__(self, fn, blocks, decide=lambda block, path, tensor: True, store=None, ahead=None):
        self.fn, self.decide, self.ahead = fn, decide, ahead
        self.blocks = {block: f"layers.{i}" for i, block in enumerate(blocks)}
        self.ledger, self.store = Ledger(), store or CloneStore()

    def __call__(self, *args, **kwargs):
        return run_under_torch_func(
            self.fn,
            args,
            kwargs,
            blocks=self.blocks,
            decide=self.decide,
            store=self.store,
            ledger=self.ledger,
            ahead=self.ahead,
        )

    @property
    def counts(self):
        return {event: int(n) for event, n in self.ledger.snapshot()["count"].items() if n}


def randn(*shape, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, **options)


def assert_close(actual, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-11}
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, **tolerance)
        assert got.requires_grad == wanted.requires_grad


def assert_equal(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0)


# A chain of blocks, and its loss.


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Chain(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)


class MlpChain(Chain):
    def __init__(self):
        super().__init__(Mlp() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(3).mean()


def squares(tree):
    return sum(leaf.pow(2).sum() for leaf in pytree.tree_leaves(tree))


@dataclass(frozen=True)
class Subject:
    """A loss, of parameters and an input, and where to evaluate it."""

    loss: Callable
    params: dict[str, Tensor]
    x: Tensor
    xs: Tensor

    @property
    def variables(self):
        return {name: value.clone().requires_grad_() for name, value in self.params.items()}

    def at(self, params=None, x=None):
        return replace(self, params=self.params if params is None else params, x=self.x if x is None else x)

    @property
    def name(self):
        return next(name for name in self.params if name.endswith("bias"))

    @property
    def bias(self):
        return self.params[self.name]

    def of_bias(self, bias):
        return self.loss({**self.params, self.name: bias}, self.x)


def subject_of(kind):
    torch.manual_seed(0)
    model = kind().double()
    params = {name: value.detach() for name, value in model.named_parameters()}
    loss = lambda params, x: functional_call(model, params, (x,))  # noqa: E731
    return model, Subject(loss, params, randn(3, WIDTH), randn(2, 3, WIDTH, seed=1))


def with_loss(subject, loss):
    return replace(subject, loss=loss)


# Routes to a gradient.


def by_params(s):
    return grad(s.loss)(s.params, s.x)


def by_input(s):
    return grad(s.loss, argnums=1)(s.params, s.x)


def by_example(s, **options):
    return vmap(grad(s.loss), (None, 0), **options)(s.params, s.xs)


def jacobian(s):
    return jacrev(lambda x: torch.stack([s.loss(s.params, x), s.loss(s.params, -x)]))(s.x)


def second(s):
    return grad(lambda p: squares(grad(s.loss)(p, s.x)))(s.params)


# One block, and whatever it does.


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(randn(3, seed=5))

    def forward(self, x, *others):
        return self.what(self, x, *others)


def check(what, use=lambda out: out.sum()):
    """The block's gradients by its input and its weight are those of the bare block."""
    block = Returns(what)
    loss = lambda p, x: use(functional_call(block, p, (x,)))  # noqa: E731
    params = {"weight": block.weight.detach()}
    offloaded = Offloaded(loss, [block])
    for route in (by_params, by_input, by_example, second):
        subject = Subject(loss, params, randn(2, 3), randn(2, 2, 3, seed=1))
        assert_close(route(with_loss(subject, offloaded)), route(subject))
    return offloaded


def assert_untouched(model):
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
