"""Tensors that a compiled region saves.

To autograd a region that `torch.compile` made is one operation, and what it saves comes back all at once
when its backward starts. Moving it gains something only while other regions run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["Region", "first_argument", "saving_region", "why_little_gained"]


@dataclass(frozen=True)
class Region:
    """A compiled region in one place.

    Attributes:
        number: what PyTorch calls it. Modules that run the same code may share one.
        module: the module whose forward runs it; None if a function does.
    """

    number: int
    module: nn.Module | None


def saving_region() -> Region | None:
    """For a hook that packs a tensor: the compiled region that saves it, if one does."""
    # `apply` of the region's autograd function calls the hook. Nothing else says whose tensor it is.
    apply = torch.autograd.Function.apply.__func__.__code__
    nearest = itertools.islice(_frames(sys._getframe(1)), 8)  # the hook may be wrapped a few times
    frame = next((frame for frame in nearest if frame.f_code is apply), None)
    number = None if frame is None else getattr(frame.f_locals["cls"], "_aot_id", None)
    return None if number is None else Region(number, _running_module(frame))


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
