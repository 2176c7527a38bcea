"""How many tokens each expert of each mixture-of-experts block got, without looking at the routing.

The output of a block is computed again with noise on the last weight of one expert. The rows that move
are the tokens which that expert has worked on, with a weight other than 0. Nothing here knows what a router
is or returns, except for what no weight can tell: see `_weightless` and `_by_logits`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Truth(NamedTuple):
    """What the experts of one block did in a call of the model."""

    path: str
    """of the block: the smallest module around the experts that is called, and is no experts itself"""
    counts: list[int]
    """token rows per expert, over all calls of the block"""
    known_from: str = ""
    """what they are known from, if not from weights alone"""


@dataclass(frozen=True)
class _Experts:
    """The experts of one block: their path, how many, and the last weight of one of them."""

    path: str
    number: int
    weight: Callable[[nn.Module, int], Tensor]


@dataclass(frozen=True)
class _Call:
    """What it takes to run a block again: a copy of it as it was, its arguments, the state of the dice."""

    block: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    dice: Tensor

    def again(self, change: Callable[[nn.Module], None] | None = None) -> Any:
        """What the block returns, after `change` to a copy of it."""
        block, args, kwargs = copy.deepcopy((self.block, self.args, self.kwargs))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if change is not None:
                change(block)
            torch.set_rng_state(self.dice)
            return block(*args, **kwargs)


def expert_counts(model: nn.Module, inputs: dict[str, Tensor]) -> list[Truth]:
    """Token rows per expert of every block in `model(**inputs)`, in `named_modules` order."""
    experts = _find_experts(model)
    called = _called(model, inputs)
    blocks = [_block(model, each.path, called) for each in experts]
    calls = _record(model, inputs, set(blocks))
    num_tokens = inputs["input_ids"].numel() if "input_ids" in inputs else None
    truths = []
    for each, block in zip(experts, blocks, strict=True):
        inside = each.path.removeprefix(block + ".") if block else each.path
        counts = [_count(call, inside, each, num_tokens) for call in calls[block]]
        per_expert = [sum(column) for column in zip(*counts, strict=True)]
        truths.append(Truth(block, per_expert, _known_from(model.get_submodule(each.path))))
    return truths


def _find_experts(model: nn.Module) -> list[_Experts]:
    """The experts of every block: of several stages of one block, the last."""
    found: dict[str, _Experts] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if "shared" in name or not re.search("expert|moe", f"{name} {type(module).__name__}".lower()):
            continue
        if (experts := _experts(path, module)) is not None:
            found[path.rpartition(".")[0]] = experts
    return list(found.values())


def _experts(path: str, module: nn.Module) -> _Experts | None:
    own = dict(module.named_parameters(recurse=False))
    stacked = [name for name, p in own.items() if p.dim() == 3]
    if stacked:  # [E, ...]
        name = stacked[-1]
        return _Experts(path, own[name].shape[0], lambda m, expert: getattr(m, name)[expert])
    number = getattr(module, "moe_num_experts", 0)
    flat = [name for name, p in own.items() if p.dim() == 2]
    if number and flat:  # [E * width, ...]
        name = flat[-1]
        return _Experts(path, number, lambda m, expert: getattr(m, name).chunk(number)[expert])
    number = getattr(module, "num_experts", 0)
    tables = [
        name for name, child in module.named_children() if getattr(child, "num_embeddings", -1) == number
    ]
    if tables:  # [E, width]
        name = tables[-1]
        return _Experts(path, number, lambda m, expert: getattr(m, name).weight[expert])
    number = len(_matrices(module))
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and number > 1:  # one child for each
        return _Experts(path, number, lambda m, expert: _matrices(m)[expert][-1])
    return None


def _matrices(experts: nn.Module) -> list[list[Tensor]]:
    """The matrices of each child that has some."""
    each = ([p for p in child.parameters() if p.dim() == 2] for child in experts.children())
    return [matrices for matrices in each if matrices]


def _block(model: nn.Module, path: str, called: set[str]) -> str:
    modules = dict(model.named_modules())
    while path:
        path = path.rpartition(".")[0]
        if path in called and "Expert" not in type(modules[path]).__name__:
            break
    return path


def _called(model: nn.Module, inputs: dict[str, Tensor]) -> set[str]:
    called = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, args, path=path: called.add(path))
        for path, module in model.named_modules()
    ]
    try:
        _run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _record(model: nn.Module, inputs: dict[str, Tensor], blocks: set[str]) -> dict[str, list[_Call]]:
    calls: dict[str, list[_Call]] = {path: [] for path in blocks}
    modules = dict(model.named_modules())

    def keep(path: str) -> Callable:
        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            dice = torch.get_rng_state()
            block, args, kwargs = copy.deepcopy((module, args, kwargs))
            for part in block.modules():  # these hooks
                part._forward_pre_hooks.clear()
            calls[path].append(_Call(block, args, kwargs, dice))

        return before

    hooks = [modules[path].register_forward_pre_hook(keep(path), with_kwargs=True) for path in blocks]
    try:
        _run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """One call, after which the dice are as they were."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(**inputs)


def _known_from(experts: nn.Module) -> str:
    if "Nllb" in type(experts).__name__:
        return "the router's logits"
    return "the top-k for experts without weights" if getattr(experts, "zero_expert_num", 0) else ""


def _count(call: _Call, inside: str, experts: _Experts, num_tokens: int | None) -> list[int]:
    holder = call.block.get_submodule(inside)
    if _known_from(holder) == "the router's logits":
        return _by_logits(call)
    before = _rows(call.again(), num_tokens)
    counts = []
    for expert in range(experts.number):

        def change(block: nn.Module, expert: int = expert) -> None:
            weight = experts.weight(block.get_submodule(inside), expert)
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(expert)))

        after = _rows(call.again(change), num_tokens)
        counts.append(int((before != after).any(-1).sum()))
    return counts + _weightless(call, holder)


def _rows(output: Any, num_tokens: int | None) -> Tensor:
    """The first tensor of a block's output, one row for each token."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    rows = output.reshape(-1, output.shape[-1]) if num_tokens is None else output.reshape(num_tokens, -1)
    assert rows.isfinite().all()
    return rows


def _weightless(call: _Call, holder: nn.Module) -> list[int]:
    """Tokens of the experts that have no weight to change, because they return what they get (LongCat)."""
    number = getattr(holder, "zero_expert_num", 0)
    if not number:
        return []
    with _TopK() as top_k:
        call.again()
    ids = top_k.indices[-1].flatten().tolist()
    return [ids.count(holder.num_routed_experts + i) for i in range(number)]


def _by_logits(call: _Call) -> list[int]:
    """The two best by the router's logits: NLLB, where every token goes to the experts 0 and 1 (seen in
    transformers 5.9.0 and 5.24.0): they take the router's one-hot mask for ids.
    """
    logits = []
    call.again(
        lambda block: block.router.classifier.register_forward_hook(lambda *a: logits.append(a[-1])) and None
    )
    best = logits[0].reshape(-1, logits[0].shape[-1]).topk(2).indices.flatten().tolist()
    return [best.count(expert) for expert in range(logits[0].shape[-1])]


class _TopK(TorchFunctionMode):
    """Keeps the indices of every top-k."""

    def __init__(self):
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function in (torch.topk, Tensor.topk):
            self.indices.append(output[1])
        return output
