"""Interleaved measurement: each round runs every variant once, in a rotating order.

Load of the machine then falls on all variants alike; what is reported is the ratio of medians.
"""

import multiprocessing
import re
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Samples = Mapping[str, list[Mapping[str, float]]]  # variant -> one mapping of quantities per round


def interleaved(variants: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int) -> Samples:
    """The quantities that every variant returned, in each of `rounds`; a first round is not counted."""
    samples = {name: [] for name in variants}
    names = list(variants)
    for i in range(-1, rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            quantities = variants[name]()
            if i >= 0:
                samples[name].append(quantities)
    return samples


def timed(
    act: Callable[[], object], device: str = "cpu", **quantities: float
) -> Callable[[], dict[str, float]]:
    """`act` as a variant that returns its `seconds`, and `quantities` as they are."""

    def variant() -> dict[str, float]:
        synchronize(device)
        start = time.perf_counter()
        act()
        synchronize(device)
        return {"seconds": time.perf_counter() - start, **quantities}

    return variant


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def table(title: str, samples: Samples, *, seconds: str = "seconds", others: tuple[str, ...] = ()) -> str:
    """Median and least of the quantity `seconds`, its median over the first variant's, largest `others`."""
    width = max(map(len, (title, *samples)))
    head = [f"{title:<{width}}", f"{'median s':>10}", f"{'min s':>10}", f"{'ratio':>8}"]
    lines = ["  ".join(head + [f"{other:>9}" for other in others])]
    baseline = None
    for name, rounds in samples.items():
        values = [quantities[seconds] for quantities in rounds]
        baseline = median(values) if baseline is None else baseline
        row = [f"{name:<{width}}", f"{median(values):10.6f}", f"{min(values):10.6f}"]
        row += [f"{median(values) / baseline:7.3f}x"]
        row += [f"{max(quantities[other] for quantities in rounds):9.2f}" for other in others]
        lines.append("  ".join(row))
    return "\n".join(lines)


class Worker(AbstractContextManager):
    """An object in a process of its own, so that what the process uses is what this object uses.

    Args:
        make: a class or function of a module, which makes the object there.
        args: its arguments, and those of all calls, as far as they can be pickled.
    """

    def __init__(self, make: Callable[..., object], *args: object):
        # The server has imported `make` once; its forks need not, and there is no thread in it to lose.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([make.__module__])
        self._name = f"{make.__name__}{args}"
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: object):
        """What the object's method returns."""
        try:
            self._pipe.send((method, args))
            return self._pipe.recv()
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"{self._name} failed in {method}; its error is above") from None

    def __exit__(self, *exception) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe, make: Callable[..., object], args: tuple) -> None:
    subject = make(*args)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(subject, method)(*args))


def resources(act: Callable[[], object], device: str = "cpu") -> dict[str, float]:
    """Seconds that `act` takes, on the clock and on all cores, and the most MiB of RAM the process has."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    cpu = time.process_time()
    seconds = timed(act, device)()["seconds"]
    return {"seconds": seconds, "CPU s": time.process_time() - cpu, "RSS MiB": _status("VmHWM")}


def resident_mebibytes() -> float:
    """MiB of RAM that the process has now."""
    return _status("VmRSS")


def _status(key: str) -> float:
    (kibibytes,) = re.findall(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kibibytes) / 1024


def mebibytes_on(device: str, forward: Callable[[], torch.Tensor]) -> dict[str, float]:
    """MiB of tensors on `device` that a forward pass leaves for backward, and at most in both."""
    if device.startswith("cuda"):
        return _mebibytes_on_cuda(device, forward)
    with _Tensors() as tensors:
        out = forward()
        held = tensors.live
        out.backward()
    return {"held MiB": held / 2**20, "peak MiB": tensors.peak / 2**20}


class _Tensors(TorchDispatchMode):
    """Bytes of the storages that operations make, while they live; `peak` is the most at once."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for given in tree_leaves((args, kwargs)):
            self._note(given, new=False)
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            self._note(made, new=True)
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, leaf: object, *, new: bool) -> None:
        if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage()._cdata in self._known:
            return
        storage = leaf.untyped_storage()
        nbytes = storage.nbytes() if new else 0
        self._known.add(storage._cdata)
        self.live += nbytes
        weakref.finalize(storage, self._forget, storage._cdata, nbytes)

    def _forget(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self.live -= nbytes


def _mebibytes_on_cuda(device: str, forward: Callable[[], torch.Tensor]) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = forward()
    held = torch.cuda.memory_allocated(device) - before
    out.backward()
    peak = torch.cuda.max_memory_allocated(device) - before
    return {"held MiB": held / 2**20, "peak MiB": peak / 2**20}
