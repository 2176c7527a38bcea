"""`Lanes`: the side streams of an accelerator. Whatever is said to a stream or an event is said here."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

__all__ = ["Lanes"]


class Lanes:
    """A stream out of and a stream back to one device; nothing here makes the host wait.

    Work on one stream runs in the order in which it was given. Between streams there is no order but
    what `record` and `wait` make.

    Attributes:
        out: the stream for copies to the host.
        back: the stream for copies to the device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.out, self.back = torch.Stream(device), torch.Stream(device)

    def current(self) -> torch.Stream:
        """The stream on which this thread computes now: never to be remembered as such."""
        return torch.accelerator.current_stream(self._device)

    def empty(self, nbytes: int) -> Tensor:
        """Device memory, a uint8 vector. It may still be in use by earlier work of the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, destination: Tensor, source: Tensor, stream: torch.Stream) -> None:
        """Lets `stream` copy a vector."""
        with _running_on(stream):
            destination.copy_(source, non_blocking=True)

    def record(self, stream: torch.Stream) -> torch.Event:
        """An event that is over when all that `stream` was given so far is done."""
        return stream.record_event()

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Lets all that `stream` is given from now on wait until `event` is over."""
        stream.wait_event(event)

    def is_over(self, event: torch.Event) -> bool:
        return event.query()

    def share(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Keeps the memory of `tensor`, once freed, until what `stream` was given by then is done."""
        tensor.record_stream(stream)


@contextlib.contextmanager
def _running_on(stream: torch.Stream) -> Generator[None]:
    # Not `with stream:`, which remembers in the stream where to return to: two threads would mix that up.
    device, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)
