"""A device simulated on the host: its streams run in any order that their events allow, as late as they can.

`Simulation` has the methods of `veofunc.offload.stores.lanes.Lanes`. Real streams without a device do
nothing, so they cannot show that a wait is missing. Here it shows:

- What a stream is given is queued, and runs one step at a time.
- Device memory that is given out may still be in use by work of that stream that was queued before: it is
  written to until then.
- Device memory that is freed belongs to somebody else from there on, in the order of its stream, who writes
  poison to it. If that is not there in the end, somebody wrote to memory of another.
"""

import sys
import weakref
from collections import deque
from ctypes import c_uint8
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0xFF  # in a float: NaN


class Stream:
    def __init__(self):
        self.steps = deque()  # functions that say whether they could run


@dataclass
class Event:
    over: bool = False

    def end(self):
        self.over = True


@dataclass
class Memory:
    array: np.ndarray
    stream: Stream
    sharing: list = field(default_factory=list)


class Simulation:
    """Streams and memory of a device.

    `num_live` is how many tensors are on it as the host sees it, `num_copies` how many were ordered.

    Args:
        random: makes the scheduler's choices.
        eager: how many steps of the lanes run with each step that computes, as the tensors are the host's
            own and what computes does so at once. None: what computes is queued like the rest.
        deaf_to: a call site (see `sites`) whose `wait` or `share` is not heard: a seeded fault.
    """

    def __init__(self, random, *, eager=None, deaf_to=None):
        self.random, self.eager, self.deaf_to = random, eager, deaf_to
        self.out, self.back, *self.computing = (Stream() for _ in range(4))
        self.now = self.computing[0]
        self.sites = set()
        self.num_copies = self.num_live = 0
        self._memory, self._freed = {}, []

    # The methods of `Lanes`.

    def current(self):
        return self.now

    def empty(self, nbytes):
        memory = Memory(np.empty(nbytes, dtype=np.uint8), self.now)
        self.num_live += 1
        lent = memory.array[:]  # lives as long as the tensor's storage
        tensor = torch.from_numpy(lent)
        self._memory[tensor.data_ptr()] = memory
        weakref.finalize(lent, self._free, memory).atexit = False
        self._do(self.now, lambda: memory.array.fill(POISON))
        return tensor

    def copy(self, destination, source, stream):
        destination, source = self._bytes(destination), self._bytes(source)
        self.num_copies += 1
        self._do(stream, lambda: np.copyto(destination(), source()))

    def record(self, stream):
        event = Event()
        self._do(stream, event.end)
        return event

    def wait(self, stream, event):
        if self._hears():
            self._add(stream, lambda: event.over)

    def is_over(self, event):
        return event.over

    def share(self, tensor, stream):
        if self._hears():
            self._memory[tensor.untyped_storage().data_ptr()].sharing.append(stream)

    # What a program on the device, and its host memory, do.

    def host(self, nbytes):
        """Page-locked memory, which outlives the copies that use it: the allocator sees to that."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self._memory[tensor.data_ptr()] = Memory(tensor.numpy(), self.now)
        return tensor

    def full(self, nbytes, value):
        """A new vector that the current stream fills."""
        tensor = self.empty(nbytes)
        content = self._bytes(tensor)
        self._do(self.now, lambda: content().fill(value))
        return tensor

    def read(self, tensor):
        """A list for the bytes that the current stream will see in `tensor`."""
        seen, content = [], self._bytes(tensor)
        self._do(self.now, lambda: seen.extend(content().tolist()))
        return seen

    def run(self, num_steps, streams=None):
        for _ in range(num_steps):
            ready = [stream for stream in streams or self._streams if stream.steps]
            if not ready:
                return
            self.random.shuffle(ready)
            assert any(map(self._run_one, ready)), "the streams wait for each other"

    def finish(self):
        """Runs all that is left; whether memory that was freed is as its next owner made it."""
        while any(stream.steps for stream in self._streams):
            self.run(1)
        return all((array == POISON).all() for array in self._freed)

    @property
    def _streams(self):
        return self.out, self.back, *self.computing

    def _bytes(self, tensor):
        """A function to reach the bytes of a vector by, that does not keep its memory alive."""
        storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        memory = self._memory.get(storage.data_ptr())
        if memory is not None:
            start = tensor.data_ptr() - storage.data_ptr()
            return lambda: memory.array[start : start + nbytes]
        weak, address = StorageWeakRef(storage), tensor.data_ptr()

        def reach():
            if weak.expired():  # the host's own, and another's by now
                return np.full(nbytes, POISON, dtype=np.uint8)
            return np.ctypeslib.as_array((c_uint8 * nbytes).from_address(address))

        return reach

    def _hears(self):
        caller = sys._getframe(2)
        site = f"{caller.f_code.co_qualname}:{caller.f_lineno}"
        self.sites.add(site)
        return site != self.deaf_to

    def _do(self, stream, act):
        self._add(stream, lambda: (act(), True)[1])

    def _add(self, stream, step):
        stream.steps.append(step)
        if self.eager is not None:
            self.run(self.eager, (self.out, self.back))
            while not all(map(self._ran, self.computing)):
                self.run(1, (self.out, self.back))

    def _ran(self, stream):
        while stream.steps and self._run_one(stream):
            pass
        return not stream.steps

    def _run_one(self, stream):
        if not stream.steps[0]():
            return False
        stream.steps.popleft()
        return True

    def _free(self, memory):
        self.num_live -= 1
        for stream in memory.sharing:
            event = Event()
            self._do(stream, event.end)
            self._add(memory.stream, lambda event=event: event.over)
        self._do(memory.stream, lambda: memory.array.fill(POISON))
        self._freed.append(memory.array)
