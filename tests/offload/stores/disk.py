"""What tests of the disk store have in common: its I/O held back or failing, and looks at its file."""

import contextlib
import os
import threading

import torch


class Gate:
    """Stands in for `os.pwrite` or `os.preadv`: lets nobody pass until it is opened."""

    def __init__(self, function):
        self._function = function
        self._open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, *args):
        self.reached.set()
        self._open.wait()
        return self._function(*args)

    def open(self):
        self._open.set()


@contextlib.contextmanager
def held(monkeypatch, name):
    """In the block, calls of `os.pwrite` or `os.preadv` wait for the gate, or for the block's end."""
    gate = Gate(getattr(os, name))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, gate)
        try:
            yield gate
        finally:
            gate.open()


@contextlib.contextmanager
def failing(monkeypatch, name, code):
    """In the block, `os.pwrite` or `os.preadv` raises an OSError with that errno."""

    def fail(*args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


@contextlib.contextmanager
def counted(monkeypatch, name):
    """The bytes that each call of `os.pwrite` or `os.preadv` in the block moved, as a list."""
    function, counts = getattr(os, name), []

    def count(*args):
        counts.append(function(*args))
        return counts[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, name, count)
        yield counts


def settle(store):
    """Returns when `store` has no write and no read left to do."""
    traffic = store._traffic
    with traffic:
        while traffic._num_tasks:
            traffic._wait()


def crowd_out(store):
    """Makes `store` forget what its buffers still hold."""
    settle(store)
    store.put(torch.empty(store.inflight_bytes, dtype=torch.uint8, device="cpu"))
    settle(store)


def until_somebody_waits(store, number=1):
    """Returns when that many threads wait in `store`."""
    while len(store._traffic._condition._waiters) < number:
        threading.Event().wait(0.001)


def io_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("veofunc ")]


def open_files(directory):
    """The nameless files that this process has open in `directory`, as paths."""
    links = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links[f"/proc/self/fd/{number}"] = os.readlink(f"/proc/self/fd/{number}")
    return [path for path, target in links.items() if target.startswith(f"{directory}/")]


def size_of_file(directory):
    (path,) = open_files(directory)
    return os.stat(path).st_size
