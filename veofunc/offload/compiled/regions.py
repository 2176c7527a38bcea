"""Tensors that a compiled region saves.

To autograd a region that `torch.compile` made is one operation, and what it saves comes back all at once
when its backward starts. Moving it gains something only while other regions run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["Region", "first_argument", "names_of_saved", "saving_region", "why_little_gained"]


@dataclass(frozen=True)
class Region:
    """A compiled region in one place.

    Attributes:
        number: what PyTorch calls it. Modules that run the same code may share one.
        module: the module whose forward runs it; None if a function does.
        function: what it is to autograd.
    """

    number: int
    module: nn.Module | None
    function: type | None = field(default=None, compare=False, repr=False)


def saving_region() -> Region | None:
    """For a hook that packs a tensor: the compiled region that saves it, if one does."""
    # `apply` of the region's autograd function calls the hook. Nothing else says whose tensor it is.
    apply = torch.autograd.Function.apply.__func__.__code__
    nearest = itertools.islice(_frames(sys._getframe(1)), 8)  # the hook may be wrapped a few times
    frame = next((frame for frame in nearest if frame.f_code is apply), None)
    function = None if frame is None else frame.f_locals["cls"]
    number = getattr(function, "_aot_id", None)
    return None if number is None else Region(number, _running_module(frame), function)


def names_of_saved(region: Region) -> list[str]:
    """For each tensor that one run of `region` saves, in order, the node of its graph that makes it.

    Ask before its first backward, which compiles the graph that knows. Empty if that is not there.
    """
    graph = getattr(getattr(region.function, "_lazy_backward_info", None), "bw_module", None)
    if not isinstance(graph, fx.GraphModule):
        return []
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [
        node.name
        for node in given
        if isinstance(node.meta.get("val"), Tensor)
        and not node.name.startswith("tangents")  # the gradients
        and not node.meta.get("saved_tensor_with_no_vc_check")  # which the region keeps by itself
    ]


def why_little_gained(moved: Mapping[Region | None, int]) -> str | None:
    """What to tell who moved so many tensors that each region saved, and None, which is no region.

    None if there is nothing to tell: with several regions, what one saved is away while others run.
    """
    regions = [region for region, count in moved.items() if region is not None and count > 0]
    if len(regions) != 1:
        return None
    return (
        "little is gained in a compiled region: one region of torch.compile saved "
        f"{moved[regions[0]]} of the {sum(moved.values())} tensors that were moved, and PyTorch brings all "
        "of them back when its backward starts, so the peak is as high as before. Compile each block by "
        "itself (`for block in model.layers: block.compile()`) and offload the whole model: then a block's "
        'tensors are away while others run. Or recompute, with blocks="layers.*" and a policy that answers '
        "RECOMPUTE: the compiler does that within the region. Measure both"
    )


def _running_module(frame: FrameType | None) -> nn.Module | None:
    """The module whose forward called PyTorch's own code down to `frame`."""
    for caller in _frames(frame):
        # `f_locals` keeps what it shows alive until its frame ends, so it is read in as few as possible.
        module = first_argument(caller.f_code, caller.f_locals)
        if isinstance(module, nn.Module):
            return module
        if not caller.f_globals.get("__name__", "torch.").startswith("torch."):  # generated code has no name
            break
    return None


def first_argument(code: CodeType, variables: Mapping[str, Any]) -> Any:
    """What a function that runs was given first: `self`, whatever it is called."""
    return variables.get(code.co_varnames[0]) if code.co_argcount else None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
