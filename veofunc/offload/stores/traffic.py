"""`Traffic`: tensors on their way through buffers into a file, and back."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Generator
from queue import SimpleQueue
from typing import Literal

from torch import Tensor

from veofunc.offload.stores import malloc
from veofunc.offload.stores.buffers import Buffer, Buffers, shown, shown_until
from veofunc.offload.stores.diskfile import PrivateFile
from veofunc.offload.stores.ferry import MemoryOrder
from veofunc.offload.stores.monitor import Monitor

__all__ = ["Copy", "Traffic"]

TRIM_EVERY = 64 << 20  # bytes

Task = Literal["write", "read"]


class Copy:
    """A tensor's bytes: in a buffer, in the file, or in both.

    Attributes:
        start: of its block in the file; None if it has none.
        buffer: where its bytes are, or will be when its task is done.
        task: what is to be done with the buffer; `running` while it is.
        in_file: whether the file has the bytes.
        users: how many threads are getting it.
        is_wanted: whether it will be got soon.
        failure: why it could not be written, until somebody is told.
        is_dead: whether nobody can get it any more.
    """

    __slots__ = (
        "buffer",
        "failure",
        "in_file",
        "is_dead",
        "is_wanted",
        "nbytes",
        "order",
        "running",
        "start",
        "task",
        "users",
    )

    def __init__(self, order: MemoryOrder):
        self.order, self.nbytes = order, order.layout.nbytes
        self.start: int | None = None
        self.buffer: Buffer | None = None
        self.task: Task | None = None
        self.running = self.in_file = self.is_wanted = self.is_dead = False
        self.users = 0
        self.failure: BaseException | None = None


class Traffic(Monitor):
    """Brings tensors into a file and back, by a thread each way.

    A buffer is in use while its copy is put, written, read or got. After that it goes on holding its
    bytes until its memory is needed for another: `_kept`, and `_ready` for those wanted soon, both in the
    order in which they are given up. So the newest tensors are often still there when backward begins.

    There is always a way on. Tasks need nothing but the disk. `put` waits for tasks alone, takes what is
    only kept or ready, and an extra buffer where no task is left to wait for. `get` waits for the one read
    that it needs, and takes an extra buffer if there is no room.

    Args:
        file: where tensors go.
        capacity: bytes of all buffers together.
    """

    def __init__(self, file: PrivateFile, capacity: int):
        super().__init__()
        self.process = os.getpid()
        self._file, self._buffers = file, Buffers(capacity)
        self._queues: dict[Task, SimpleQueue[tuple[Traffic, Copy] | None]] = {}
        self._num_tasks = 0
        self._kept: OrderedDict[Copy, None] = OrderedDict()
        self._ready: OrderedDict[Copy, None] = OrderedDict()
        self._ahead: deque[Copy] = deque()  # to be read as soon as there is room
        self._failed: list[Copy] = []  # could not be written
        self._untrimmed_bytes = 0

    # Into the file.

    def put(self, tensor: Tensor) -> Copy:
        """Copies `tensor` and returns at once, or as soon as there is room. To be buried after use.

        Raises:
            OSError: the disk is full, or an earlier tensor could not be written.
        """
        copy = Copy(MemoryOrder.of(tensor))
        try:
            with self:
                self._start_threads()
                self._raise_failures()
                copy.start = self._file.take(copy.nbytes)
                copy.buffer = buffer = self._room(copy.nbytes)
                self._begin(copy, "write")
            core = copy.order.layout.core(tensor).permute(copy.order.dims)
            shown(buffer, copy.nbytes).view(core.dtype).view(core.shape).copy_(core)
            self._queues["write"].put((self, copy))
            return copy
        except BaseException:
            self.bury(copy)
            raise

    def _raise_failures(self) -> None:
        """Tells of failed writes, once; after that they are tried again."""
        failures = [copy.failure for copy in self._failed if copy.failure is not None]
        for copy in self._failed:
            copy.failure = None
        if failures:
            raise failures[0]
        while self._failed:
            self._submit(self._failed.pop(), "write")

    def _room(self, nbytes: int) -> Buffer:
        while (buffer := self._take(nbytes, self._kept, self._ready)) is None:
            if self._num_tasks == 0:
                return self._buffers.extra(nbytes)
            self._wait()
            self._raise_failures()
        return buffer

    def _take(self, nbytes: int, *givers: OrderedDict[Copy, None]) -> Buffer | None:
        """A buffer, at the cost of those that `givers` hold."""
        if not self._buffers.can_hold(nbytes):
            return None
        while (buffer := self._buffers.take(nbytes)) is None:
            giver = next(filter(None, givers), None)
            if giver is None:
                return None
            copy, _ = giver.popitem(last=False)
            self._drop_buffer(copy)
        return buffer

    # Back.

    def prefetch(self, copy: Copy) -> None:
        """Has `copy` read as soon as there is room, and its buffer kept until `get`. Never waits."""
        with self:
            copy.is_wanted = True
            if copy in self._kept:
                self._kept.pop(copy)
                self._ready[copy] = None
            elif copy.buffer is None and self._buffers.can_hold(copy.nbytes):
                self._ahead.append(copy)
                self._read_ahead()

    def _read_ahead(self) -> None:
        while self._ahead:
            copy = self._ahead[0]
            if copy.is_wanted and copy.buffer is None:
                copy.buffer = self._take(copy.nbytes, self._kept)
                if copy.buffer is None:
                    return
                self._submit(copy, "read")
            self._ahead.popleft()

    def get(self, copy: Copy) -> Tensor:
        """The tensor again.

        Raises:
            OSError: it could not be written, which is said once, or cannot be read.
        """
        order, device = copy.order, copy.order.layout.device
        with self._used(copy):
            with self:
                buffer = self._bring(copy)
                is_free = copy.in_file and copy.users == 1
                becomes_tensor = is_free and order.dense and device.type == "cpu"
                if becomes_tensor:
                    copy.buffer = None
            if becomes_tensor:
                alive: weakref.ref[Traffic] = weakref.ref(self)
                ended = functools.partial(_bury, alive, buffer)
                return order.rebuild(shown_until(buffer, copy.nbytes, ended))
            # If it is dense, `rebuild` returns a view.
            return order.rebuild(shown(buffer, copy.nbytes).to(device, copy=order.dense))

    @contextlib.contextmanager
    def _used(self, copy: Copy) -> Generator[None]:
        """Nobody else takes the buffer of `copy` meanwhile."""
        with self:
            if copy.failure is not None:
                failure, copy.failure = copy.failure, None
                raise failure
            copy.users += 1
            copy.is_wanted = False
            self._kept.pop(copy, None)
            self._ready.pop(copy, None)
        try:
            yield
        finally:
            with self:
                copy.users -= 1
                self._keep_buffer(copy)
                self._read_ahead()

    def _bring(self, copy: Copy) -> Buffer:
        """The buffer with the bytes of `copy`, which are read now if they must be."""
        while copy.task == "read" and copy.running:
            self._wait()
        if copy.buffer is None:
            copy.buffer = self._take(copy.nbytes, self._kept) or self._buffers.extra(copy.nbytes)
            self._begin(copy, "read")
        if copy.task == "read":  # also if it was queued: rather do it than wait
            failure = self._carry_out(copy)
            if failure is not None:
                raise failure
        return copy.buffer

    # Tasks.

    def _begin(self, copy: Copy, task: Task) -> None:
        copy.task = task
        self._num_tasks += 1

    def _submit(self, copy: Copy, task: Task) -> None:
        self._begin(copy, task)
        self._queues[task].put((self, copy))

    def _start_threads(self) -> None:
        if self._queues:
            return
        queues: dict[Task, SimpleQueue] = {"write": SimpleQueue(), "read": SimpleQueue()}
        for task, queue in queues.items():
            # Daemons: what is not written at exit will never be read.
            threading.Thread(target=_serve, args=(task, queue), name=f"veofunc {task}", daemon=True).start()
        self._queues = queues

    def run(self, copy: Copy, task: Task) -> None:
        """Carries a queued task out, if it still is to be."""
        with self:
            if copy.task != task or copy.running:
                return
            self._carry_out(copy)
        if task == "write" and copy.order.layout.device.type == "cpu":
            self._untrimmed_bytes += copy.nbytes
            if self._untrimmed_bytes >= TRIM_EVERY:
                self._untrimmed_bytes = 0
                malloc.trim()

    def _carry_out(self, copy: Copy) -> BaseException | None:
        """Runs the task of `copy` without the lock, which the caller has."""
        buffer, start = copy.buffer, copy.start
        assert buffer is not None and start is not None, "a task has both"
        move = self._file.write if copy.task == "write" else self._file.read
        copy.running, failure = True, None
        self._condition.release()
        try:
            move(buffer.pages, start)
        except BaseException as error:
            failure = error
        finally:
            self._condition.acquire()
        self._finish(copy, failure)
        return failure

    def _finish(self, copy: Copy, failure: BaseException | None) -> None:
        task, copy.task, copy.running = copy.task, None, False
        self._num_tasks -= 1
        if failure is None:
            copy.in_file = True
        elif task == "read":  # `get` will try again
            self._drop_buffer(copy)
        elif not copy.is_dead:
            copy.failure = _without_frames(failure)
            self._failed.append(copy)
        if copy.is_dead:
            self._release(copy)
        self._keep_buffer(copy)
        self._read_ahead()
        self._notify()

    # Buffers and blocks that are not needed any more.

    def _keep_buffer(self, copy: Copy) -> None:
        """Lets others take the buffer of `copy` when they need it, if the file has its bytes."""
        if copy.buffer is None or copy.users or copy.task or not copy.in_file:
            return
        if copy.buffer.start is None and not copy.is_wanted:  # extra ones are not for keeping
            self._drop_buffer(copy)
        else:
            (self._ready if copy.is_wanted else self._kept)[copy] = None

    def _drop_buffer(self, copy: Copy) -> None:
        if copy.buffer is not None:
            self._buffers.give(copy.buffer)
            copy.buffer = None

    def _release(self, copy: Copy) -> None:
        self._kept.pop(copy, None)
        self._ready.pop(copy, None)
        self._drop_buffer(copy)
        if copy.start is not None:
            self._file.give(copy.start, copy.nbytes)

    def _undo(self, dead: object) -> None:
        if isinstance(dead, Buffer):
            self._buffers.give(dead)
        elif isinstance(dead, Copy) and not dead.is_dead:
            dead.is_dead, dead.is_wanted = True, False
            if dead in self._failed:
                self._failed.remove(dead)
            if not dead.running:
                if dead.task is not None:  # queued, and now for nothing
                    dead.task = None
                    self._num_tasks -= 1
                self._release(dead)
        self._read_ahead()
        self._notify()

    def __del__(self):
        for queue in getattr(self, "_queues", {}).values():
            queue.put(None)


def _bury(traffic: weakref.ref[Traffic], buffer: Buffer) -> None:
    """Gives a buffer back, if there still is somebody to give it to."""
    alive = traffic()
    if alive is not None:
        alive.bury(buffer)


def _serve(task: Task, queue: SimpleQueue) -> None:
    """What an I/O thread does. It holds on to no traffic between two tasks."""
    while (item := queue.get()) is not None:
        traffic, copy = item
        traffic.run(copy, task)
        del item, traffic, copy


def _without_frames(error: BaseException) -> BaseException:
    """`error` and its causes without tracebacks, whose frames would keep everything alive."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__
    return error
