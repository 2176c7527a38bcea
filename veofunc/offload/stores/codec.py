"""Codecs: offloaded tensors in fewer bits, with a loss that has a bound.

For an element x and what comes back for it, y:

- `torch.bfloat16`: |y - x| <= |x| / 257 for float32 and 2**-126 <= |x| <= 3.389e38, the least and the
  greatest normal number; the bound is reached at 1 + 2**-8. Lesser x are off by 2**-133 at most, greater
  ones may become infinite. float64 is rounded to float32 on the way, which adds |x| * 2**-24.
- `torch.int8`: |y - x| <= absmax / 254, where absmax is the largest magnitude in the row of the last
  dimension that x is in, or 127 * 2**-126 if that is larger (127 * 2**-1022 for float64). Computing it, in
  float32 or for float64 in that, adds 3 * absmax * 2**-24 (2**-53), and the tensor's own dtype half a unit
  in its last place: at most |y| * 2**-11 for float16, |y| * 2**-8 for bfloat16.

What is infinite or NaN stays so in bfloat16; with int8 its whole row comes back as NaN: never as plausible
numbers.

What a codec would not make smaller is kept exactly: other dtypes than floating ones, floating ones that are
not wider than the codec, and, with `torch.int8`, rows of so few elements that the row's scale outweighs
the gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from veofunc.offload.layout import Layout
from veofunc.offload.stores.store import Slot

__all__ = ["check_codec", "put_coded"]


def check_codec(codec: torch.dtype | None) -> None:
    """Raises a ValueError if there is no such codec."""
    if not any(codec is known for known in (None, torch.bfloat16, torch.int8)):
        raise ValueError(f"codec must be torch.bfloat16, torch.int8 or None, got {codec!r}")


def put_coded(put: Callable[[Tensor], Slot], tensor: Tensor, codec: torch.dtype | None) -> Slot:
    """`put(tensor)`, or a slot that holds `tensor` in `codec` by what `put` makes of its parts.

    Args:
        put: a store's own `put`.
        tensor: strided, with elements of its own.
        codec: None, or one that `check_codec` lets pass.
    """
    layout = Layout.of(tensor)
    if codec is None or not _gains(layout, codec):
        return put(tensor)
    core = layout.core(tensor)
    parts = (core.to(codec),) if codec is torch.bfloat16 else _quantized(core)
    return _CodedSlot(layout, tuple(put(part) for part in parts))


@dataclass(frozen=True, eq=False)
class _CodedSlot:
    layout: Layout
    slots: tuple[Slot, ...]

    def prefetch(self) -> None:
        for slot in self.slots:
            prefetch = getattr(slot, "prefetch", None)
            if prefetch is not None:
                prefetch()

    def get(self) -> Tensor:
        layout = self.layout
        core = torch.empty_strided(layout.core_shape, layout.stride, dtype=layout.dtype, device=layout.device)
        parts = [slot.get() for slot in self.slots]
        if len(parts) == 1:
            core.copy_(parts[0])
        else:
            torch.mul(*parts, out=core)
        return core.as_strided(layout.shape, layout.stride)


def _gains(layout: Layout, codec: torch.dtype) -> bool:
    """Whether a tensor takes fewer bytes in `codec`."""
    if not layout.dtype.is_floating_point or layout.dtype.itemsize <= codec.itemsize:
        return False
    if codec is torch.bfloat16:
        return True
    if not layout.core_shape:
        return False
    row = layout.core_shape[-1]
    return row + _scale_dtype(layout.dtype).itemsize < row * layout.dtype.itemsize


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _quantized(core: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers, int8 like `core`, and the scale of each row, [..., 1]: their product is `core`."""
    dtype = _scale_dtype(core.dtype)
    x = core.to(dtype, copy=True)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    absmax = torch.maximum(-low, high)
    limits = torch.finfo(dtype)
    # Neither x / scale nor 127 * scale may overflow.
    scale = (absmax / 127).clamp_(limits.tiny, limits.max / 127 * (1 - limits.eps))
    scale = torch.where(absmax.isfinite(), scale, torch.nan)
    return x.div_(scale).round_().to(torch.int8), scale  # whatever a NaN became, the scale makes it NaN again
