"""`HostStore`: offloaded tensors wait in host memory."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from veofunc.offload.stores.arena import Arena, Region
from veofunc.offload.stores.codec import check_codec, put_coded
from veofunc.offload.stores.ferry import Ferry, MemoryOrder
from veofunc.offload.stores.lanes import Lanes
from veofunc.offload.stores.store import Slot

__all__ = ["HostStore"]


@dataclass(kw_only=True, eq=False, repr=False)
class HostStore:
    """Keeps the offloaded tensors of an accelerator in host memory.

    Copies run beside the computation, on a stream of their own in each direction, to and from
    page-locked buffers that are used again. Events order them; the host never waits. Tensors that are
    in host memory already are not accepted: nothing would be gained.

    A tensor is given up by the device when its copy is over, and in any case before more than
    `inflight_bytes` wait for that: then the device computes on only when the oldest copy is done. So peak
    memory does not depend on how far the host runs ahead. What backward wants while it is still on the
    device is not copied back.

    Args:
        pin: whether host memory is page-locked. None: if that is possible, else a warning is given and
            copies are as with False. False: pageable memory; each copy makes the host wait. True: an
            error if it is impossible.
        cache_bytes: bytes of free host memory that are kept to be used again, an int of at least 0. What is
            above goes back to PyTorch, which keeps page-locked memory for other tensors (until
            `torch.accelerator.empty_host_cache()`, where PyTorch has it).
        inflight_bytes: bytes of device memory that may wait for their copy to the host, an int of at
            least 0. With 0 the device waits for each copy.
        sync: copies on the stream that computes, and the host waits for each: nothing runs beside anything.
        codec: None, or `torch.bfloat16` or `torch.int8`: what wider floating tensors are kept in, with a
            loss; gradients are then no longer the same bit for bit. An element x comes back off by at most
            `abs(x) / 257` with bfloat16, and with int8 by at most `absmax / 254`, where absmax is the largest
            magnitude in its row of the last dimension, apart from the rounding of the tensor's own dtype; a
            row with anything infinite or NaN comes back as NaN. `veofunc.offload.stores.codec` has the fine
            print.

    Raises:
        ValueError: an option is out of range.
        RuntimeError: when a tensor is offloaded: `pin=True` and the memory cannot be page-locked.

    Warns:
        UserWarning: once, if `pin` is None and the memory cannot be page-locked.

    Example:
        >>> import torch, veofunc as vf
        >>> store = vf.HostStore(cache_bytes=1 << 30)
        >>> store
        HostStore(cache_bytes=1073741824)
        >>> store.accepts(torch.ones(3))
        False
    """

    pin: bool | None = None
    cache_bytes: int = 4 << 30
    inflight_bytes: int = 256 << 20
    sync: bool = False
    codec: torch.dtype | None = None

    def __post_init__(self):
        if self.pin is not None and not isinstance(self.pin, bool):
            raise ValueError(f"pin must be True, False or None (if possible), got {self.pin!r}")
        for name in ("cache_bytes", "inflight_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an int >= 0 (bytes), got {value!r}")
        if not isinstance(self.sync, bool):
            raise ValueError(f"sync must be True or False, got {self.sync!r}")
        check_codec(self.codec)
        self._pins = self.pin is not False
        self._pageable = _Plain(Arena(_pageable, self.cache_bytes))
        self._pinned: dict[torch.device, _Plain | Ferry] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        typed = [f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"HostStore({', '.join(typed)})"

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu"

    def put(self, tensor: Tensor) -> Slot:
        return put_coded(self._put, tensor, self.codec)

    def _put(self, tensor: Tensor) -> Slot:
        if self._pins and self.accepts(tensor):
            try:
                return self._pinned_for(tensor.device).put(tensor)
            except CannotPin as error:
                if self.pin:
                    raise
                self._stop_pinning(error)
        return self._pageable.put(tensor)

    def _pinned_for(self, device: torch.device) -> _Plain | Ferry:
        with self._lock:
            if device not in self._pinned:
                arena = Arena(_pinned, self.cache_bytes)
                self._pinned[device] = (
                    _Plain(arena) if self.sync else Ferry(Lanes(device), arena, self.inflight_bytes)
                )
            return self._pinned[device]

    def _stop_pinning(self, error: CannotPin) -> None:
        with self._lock:
            first, self._pins = self._pins, False
        if first:
            warnings.warn(
                f"{error}. {self!r} goes on with pageable memory: each copy makes the host wait. Make "
                "room, or say pin=False",
                stacklevel=2,
            )


class CannotPin(RuntimeError):
    """Host memory cannot be page-locked."""


def _pinned(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CannotPin(f"cannot page-lock {nbytes} bytes of host memory: {reason}") from error


def _pageable(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class _Plain:
    """Copies on the stream that computes, for which the host waits."""

    def __init__(self, arena: Arena):
        self._arena = arena

    def put(self, tensor: Tensor) -> Slot:
        order = MemoryOrder.of(tensor)
        source = order.flatten(tensor)
        region = self._arena.take(source.numel())
        region.memory.copy_(source)
        return _PlainSlot(order, region)


@dataclass(frozen=True, eq=False)
class _PlainSlot:
    order: MemoryOrder
    region: Region

    def get(self) -> Tensor:
        memory = self.region.memory
        flat = torch.empty(memory.numel(), dtype=torch.uint8, device=self.order.layout.device)
        return self.order.rebuild(flat.copy_(memory))
