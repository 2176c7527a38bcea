"""Counts of `monitor_router` in every mixture-of-experts family of the installed transformers, as a table.

python -m tests.interop.moe_families --write docs/moe_families.md
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import veofunc as vf
from tests.interop.moe_models import Case, NotBuilt, moe_families, moe_model
from tests.interop.moe_truth import Truth, expert_counts

# Nothing there is a router's choice that a module shows to another: `find_routers` must say so.
WITHOUT_ROUTER = {"vitpose_backbone": "the caller names the expert of each image"}
# In some versions nothing but the logits crosses the border of a module; to say so is right, too.
MAY_REFUSE = {"aria": "the experts choose, inside, from logits"}
MODES = ("eval", "reentrant", "non-reentrant")


class Row(NamedTuple):
    """One family in the table."""

    family: str
    model: str = ""
    router: str = ""
    seen: str = ""
    experts: str = ""
    checkpointing: str = ""
    """in which kinds of gradient checkpointing it was trained, or why not"""
    known_from: str = ""
    """what the right counts are known from, if not from weights alone"""
    wrong: str | None = None
    """what is wrong, or None if every count is right"""


class Refused(Exception):
    """`find_routers` found no router."""


class CannotTrain(Exception):
    """The model does not do a training step with gradient checkpointing, whoever counts."""


def check_found(case: Case) -> tuple[tuple[vf.Router, Truth], ...]:
    """The routers that `find_routers` found, each with the block that it is in: one router for each block.

    Raises:
        Refused: it found none.
        AssertionError: it found other routers than those of the blocks.
    """
    truths = expert_counts(case.model, case.inputs)
    try:
        routers = vf.find_routers(case.model, **case.inputs)
    except ValueError as error:
        raise Refused(str(error).partition(":")[0]) from error
    return _pairs(routers, truths)


def check_counts(case: Case, mode: str) -> None:
    """Compares what `monitor_router` counts, in two calls, with what the experts have worked on.

    In training the backward pass follows each call and computes the blocks again.

    Raises:
        CannotTrain: in training, the model itself fails, or has no gradient checkpointing.
        AssertionError: a count differs.
    """
    _prepare(case, mode)
    torch.manual_seed(1)
    truths = expert_counts(case.model, case.inputs)
    monitored = vf.monitor_router(case.model)
    for _ in range(2):
        torch.manual_seed(1)
        try:
            out, obs = monitored(**case.inputs)
            if mode != "eval":
                _backward(out, case, truths)
        except RuntimeError as error:
            _must_train(case, truths)
            raise AssertionError(f"monitored, the model fails: {error}") from error
        counted = obs["router", "tokens_per_expert"].tolist()
        for (router, truth), counts in zip(_pairs(monitored.routers, truths), counted, strict=True):
            expected = truth.counts + [0] * (len(counts) - len(truth.counts))
            assert counts == expected, f"{router.path}: counted {counts}, the experts got {expected}"


def _pairs(routers: Iterable[vf.Router], truths: list[Truth]) -> tuple[tuple[vf.Router, Truth], ...]:
    """Each router with the innermost block around it."""
    pairs = []
    for router in routers:
        around = [truth for truth in truths if f"{router.path}.".startswith(f"{truth.path}.")]
        assert around, f"router {router.path} is in none of the blocks {[t.path for t in truths]}"
        pairs.append((router, max(around, key=lambda truth: len(truth.path))))
    paths, blocks = sorted(truth.path for _, truth in pairs), sorted(truth.path for truth in truths)
    assert paths == blocks, f"routers were found in the blocks {paths}, the blocks are {blocks}"
    return tuple(pairs)


def _prepare(case: Case, mode: str) -> None:
    case.model.train(mode != "eval")
    if mode == "eval":
        return
    try:
        case.model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    except ValueError as error:
        raise CannotTrain(str(error).partition(".")[0]) from error


def _backward(out: Any, case: Case, truths: list[Truth]) -> None:
    """The backward pass, in which every block that ran must run again: else the check checks nothing."""
    again = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=truth.path: again.add(path))
        for truth in truths
        for module in case.model.get_submodule(truth.path).modules()
    ]
    try:
        losses = [t.float().pow(2).mean() for t in tensors(out) if t.requires_grad]
        torch.stack(losses).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    if missing := {truth.path for truth in truths if any(truth.counts)} - again:
        raise CannotTrain(f"checkpointing leaves out the blocks {sorted(missing)}")


def _must_train(case: Case, truths: list[Truth]) -> None:
    try:
        _backward(case.model(**case.inputs), case, truths)
    except RuntimeError as error:
        raise CannotTrain(" ".join(str(error).split())) from error


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def family_row(family: str) -> Row:
    """The family's line of the table."""
    try:
        case = moe_model(family)
    except NotBuilt as error:
        return Row(family, wrong=f"not built: {str(error).partition(';')[0]}")
    row = Row(family, type(case.model).__name__)
    truths = expert_counts(case.model, case.inputs)
    row = row._replace(
        experts=", ".join(sorted({str(len(truth.counts)) for truth in truths})),
        seen=", ".join(where_choices_show(case, truths)) or "nowhere",
        known_from=truths[0].known_from,
    )
    try:
        pairs = check_found(case)
    except Refused as error:
        return row._replace(wrong=WITHOUT_ROUTER.get(family) or f"not counted: {error}")
    except AssertionError as error:
        return row._replace(wrong=f"no: {error}")
    kinds = {type(case.model.get_submodule(router.path)).__name__ for router, _ in pairs}
    row = row._replace(router=", ".join(sorted(kinds)))
    trained = {}
    for mode in MODES:
        try:
            check_counts(case, mode)
        except CannotTrain as error:
            trained[mode] = f"{mode}: {str(error)[:80]}"
        except AssertionError as error:
            return row._replace(wrong=f"no: {mode}: {error}")
        else:
            trained[mode] = mode
    del trained["eval"]
    reasons = [said for mode, said in trained.items() if said != mode]
    return row._replace(checkpointing="; ".join(reasons) or "both")


def where_choices_show(case: Case, truths: list[Truth]) -> list[str]:
    """Each place where the modules inside the blocks are called with a choice, or return one."""
    seen: dict[str, None] = {}
    num_experts = len(truths[0].counts)

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(module, nn.Embedding):
            place = "input of an embedding" if module.num_embeddings == num_experts else None
        else:
            place = _place_in_output(out, num_experts)
            if place is None and _shows_ids((args, kwargs), num_experts):
                place = "experts' input"
        if place is not None:
            seen[place] = None

    blocks = [case.model.get_submodule(truth.path) for truth in truths]
    inside = {module for block in blocks for module in block.modules()} - set(blocks)
    hooks = [module.register_forward_hook(after, with_kwargs=True) for module in inside]
    try:
        with torch.no_grad():
            case.model.eval()(**case.inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return list(seen)


def _place_in_output(out: Any, num_experts: int) -> str | None:
    if _shows_ids(out, num_experts):
        return "router's output"
    wide = [t for t in tensors(out) if t.dim() >= 2 and t.shape[-1] == num_experts]
    floats = [t for t in wide if t.is_floating_point()]
    if len(floats) < len(wide):
        return "mask in the router's output"
    if len(floats) == 2 and any((t == 0).any() for t in floats):
        return "zeros among the scores of the router's output"
    if isinstance(out, tuple | list) and any(isinstance(o, list) and len(o) == num_experts for o in out):
        return "tokens per expert in the router's output"
    return None


def _shows_ids(value: Any, num_experts: int) -> bool:
    """Whether there are ids [..., K], K < E, beside weights of the same shape."""
    found = list(tensors(value))
    ids = [
        t
        for t in found
        if t.dtype in (torch.int32, torch.int64) and t.dim() > 0 and t.shape[-1] < num_experts
    ]
    return any(t.is_floating_point() and t.shape == i.shape for i in ids for t in found)


def table(rows: list[Row]) -> str:
    """The page: totals, the table, and what went wrong."""
    built = [row for row in rows if row.model]
    right = [row for row in built if row.wrong is None]
    lines = [
        "# Mixture-of-experts families",
        "",
        "What `monitor_router` counts in every mixture-of-experts family of Hugging Face transformers "
        f"{transformers.__version__}, in a tiny random model of each. A count is right if, for every block "
        "and every expert, it is the number of tokens whose output moves when the last weight of that expert "
        "does; in eval mode, and in training with reentrant and non-reentrant gradient checkpointing where "
        "the model can do that. Where weights cannot tell, the last column says by what else the count was "
        "checked. Written by `python -m tests.interop.moe_families --write "
        "docs/moe_families.md`, from the run alone.",
        "",
        f"Families: {len(rows)}. Built: {len(built)}. Counted right: {len(right)}.",
        "",
        "| family | model | router | where the choice is seen | experts | checkpointing | counted right |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = (row.wrong or "yes").replace("|", "/").replace("\n", " ")[:200]
        if row.wrong is None and row.known_from:
            verdict += f", by {row.known_from}"
        cells = (row.family, row.model, row.router, row.seen, row.experts, row.checkpointing, verdict)
        lines.append("| " + " | ".join(f"`{c}`" if i < 3 and c else c for i, c in enumerate(cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--write", type=pathlib.Path, help="the Markdown file to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # theirs
    transformers.logging.set_verbosity_error()
    rows = []
    for family in options.families or moe_families():
        rows.append(family_row(family))
        print(family, rows[-1].wrong or "right", file=sys.stderr, flush=True)
    if options.write:
        options.write.write_text(table(rows), encoding="utf-8")
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
