"""`Ferry`: copies between a device and host memory that run beside the computation.

Three streams are involved: the one that computes, `lanes.out` and `lanes.back`. Each rule of their order is
one `wait` below. The memory of a tensor that was allocated on another stream than the one it is put from is
the caller's care, as everywhere in PyTorch (`Tensor.record_stream`).
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from veofunc.offload.layout import Layout
from veofunc.offload.stores.arena import Arena, Region
from veofunc.offload.stores.lanes import Lanes
from veofunc.offload.stores.store import Slot

__all__ = ["Ferry", "MemoryOrder"]


class Ferry:
    """Copies between one device and host memory beside its computation."""

    def __init__(self, lanes: Lanes, arena: Arena, inflight_bytes: int):
        self.lanes = lanes
        self._arena, self._inflight_bytes = arena, inflight_bytes
        self._departures: deque[_Departure] = deque()
        self._departing_bytes = 0
        self._lock = threading.Lock()

    def put(self, tensor: Tensor) -> Slot:
        lanes, order = self.lanes, MemoryOrder.of(tensor)
        source = order.flatten(tensor)
        region = self._arena.take(source.numel())
        stream = lanes.current()
        lanes.wait(lanes.out, lanes.record(stream))  # the values may not be there yet
        lanes.copy(region.memory, source, lanes.out)
        departure = _Departure(lanes, source, stream)
        self._depart(departure)
        return _FerrySlot(lanes, order, region, departure)

    def _depart(self, departure: _Departure) -> None:
        with self._lock:
            self._departures.append(departure)
            self._departing_bytes += departure.nbytes
            while self._departures and (
                self._departing_bytes > self._inflight_bytes or self.lanes.is_over(self._departures[0].event)
            ):
                oldest = self._departures.popleft()
                self._departing_bytes -= oldest.nbytes
                oldest.let_go()


class _Departure:
    """A copy to the host that was begun, and its source for as long as it is held.

    Holding the source, and letting it go behind a wait, frees its memory in the order of the stream that
    it came from. `record_stream` would free it when the copy is over by the clock: a host that runs ahead
    would find nothing free, and the peak would be as without offload.
    """

    def __init__(self, lanes: Lanes, source: Tensor, stream: torch.Stream):
        self.source: Tensor | None = source
        self.stream, self.nbytes = stream, source.numel()
        self.event = lanes.record(lanes.out)
        self._lanes = lanes

    def let_go(self) -> None:
        if self.source is not None:
            self._lanes.wait(self.stream, self.event)
            self.source = None  # only now: another thread may be about to take it


class _FerrySlot:
    """A tensor in host memory, or on its way there or back."""

    def __init__(self, lanes: Lanes, order: MemoryOrder, region: Region, departure: _Departure):
        self._lanes, self._order, self._region, self._departure = lanes, order, region, departure
        self._reads: list[torch.Event] = []
        self._arrival: _Arrival | None = None
        self._lock = threading.Lock()

    def prefetch(self) -> None:
        with self._lock:
            if self._arrival is None:
                self._arrival = self._bring_back()

    def get(self) -> Tensor:
        with self._lock:
            arrival, self._arrival = self._arrival or self._bring_back(), None
        return self._order.rebuild(arrival.take())

    def _bring_back(self) -> _Arrival:
        lanes, source = self._lanes, self._departure.source
        stream = lanes.current()
        if source is not None and stream == self._departure.stream:
            return _Arrival(lanes, source, stream, self._departure.event, copied=False)
        flat = lanes.empty(self._region.memory.numel())
        lanes.wait(lanes.back, lanes.record(stream))  # its memory may be in use until here
        lanes.wait(lanes.back, self._departure.event)
        lanes.copy(flat, self._region.memory, lanes.back)
        self._reads.append(lanes.record(lanes.back))
        return _Arrival(lanes, flat, stream, self._reads[-1], copied=True)

    def __del__(self):
        # Takes no lock: it may run anywhere. The region's next content comes by `out`.
        self._departure.let_go()
        for event in self._reads:
            self._lanes.wait(self._lanes.out, event)


class _Arrival:
    """Bytes on the device that are about to be taken: being copied back, or never having left."""

    def __init__(self, lanes: Lanes, flat: Tensor, stream: torch.Stream, event: torch.Event, *, copied: bool):
        self._lanes, self._stream, self._event, self._copied = lanes, stream, event, copied
        self._flat: Tensor | None = flat

    def take(self) -> Tensor:
        """The vector, for the stream that is current now."""
        lanes, flat, stream = self._lanes, self._flat, self._lanes.current()
        assert flat is not None, "taken twice"
        if self._copied or stream != self._stream:
            lanes.wait(stream, self._event)
        if stream != self._stream:
            lanes.share(flat, stream)
        self._flat = None
        return flat

    def __del__(self):
        if self._flat is not None and self._copied:  # never taken, and maybe still being filled
            self._lanes.wait(self._stream, self._event)


@dataclass(frozen=True)
class MemoryOrder:
    """A tensor's elements as a vector of bytes in the order in which they lie in memory, and back.

    Attributes:
        layout: how the tensor lies in memory.
        dims: the dimensions, the outermost in memory first.
        dense: whether the elements lie in memory without gaps: then neither way needs a copy.
    """

    layout: Layout
    dims: tuple[int, ...]
    dense: bool

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryOrder:
        layout = Layout.of(tensor)
        dims = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
        return cls(layout, dims, layout.core(tensor).permute(dims).is_contiguous())

    def flatten(self, tensor: Tensor) -> Tensor:
        """The core's bytes, a uint8 vector [layout.nbytes]: a view if it can be one."""
        core = self.layout.core(tensor).permute(self.dims).resolve_conj().resolve_neg().contiguous()
        return core.as_strided((core.numel(),), (1,)).view(torch.uint8)  # a single element may have stride 0

    def rebuild(self, flat: Tensor) -> Tensor:
        """The tensor again, from what `flatten` gave: a view of it if it can be one."""
        layout, core = self.layout, flat.view(self.layout.dtype)
        if not self.dense:
            elements, device = core, flat.device
            core = torch.empty_strided(layout.core_shape, layout.stride, dtype=layout.dtype, device=device)
            in_order = core.permute(self.dims)
            in_order.copy_(elements.view(in_order.shape))
        return core.as_strided(layout.shape, layout.stride)
