"""Offload on an accelerator: `python -m tests.gpu.offload`, some minutes. `--device cpu` is a rehearsal.

First the gradients of every variant are compared with plain's, bit for bit, and some properties of
`HostStore` are checked that need a device. Then a training step is measured, plain and in every other way,
all in turn in one process: the medians of its seconds and their ratio to plain's, and the most device memory
that it takes beyond what was there before.
"""

import argparse
import contextlib
import importlib
import inspect
import os
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import veofunc as vf
from tests.bench import measure
from tests.bench.offload import Model, checkpointed, plain

p = vf.policies

PEERS = {"torchtune": "torchtune.training", "TRL": "trl.models.activation_offloading"}
LOSSY = " (lossy)"


def run(
    device: str = "",
    rounds: int = 7,
    width: int = 4096,
    layers: int = 12,
    heads: int = 32,
    batch: int = 2,
    tokens: int = 4096,
    dtype: str = "bfloat16",
) -> str:
    place = torch.device(device) if device else torch.accelerator.current_accelerator(check_available=True)
    if place is None:
        return "no accelerator: nothing measured (--device cpu rehearses)"
    torch.manual_seed(0)
    with place:
        model = Model(width, heads, layers).to(getattr(torch, dtype))
        x = torch.randn(batch, tokens, width, dtype=getattr(torch, dtype))
    plain(model, x[:1]).backward()  # makes room for the gradients, and loads the kernels
    variants, remarks = variants_of(model, x)
    num_equal = check_gradients(model, variants)
    checked = [f"checked: {check.__doc__}" for check in CHECKS if check(model, x)]
    samples = measure.interleaved({name: step(model, fn) for name, fn in variants.items()}, rounds)
    return "\n".join(
        (
            f"{layers} blocks of width {width}, {batch} texts of {tokens} tokens, {dtype}, on {x.device}",
            *remarks,
            f"checked: gradients of {num_equal} variants are equal bit for bit",
            *checked,
            "",
            measure.table("forward + backward", samples, others=("held MiB", "peak MiB")),
        )
    )


def variants_of(model: Model, x: Tensor) -> tuple[dict[str, Callable[[], Tensor]], list[str]]:
    """Forward pass by name, plain first; and what there is to say about them."""
    store = host_store(x, cache_bytes=1 << 40)  # the variants use its memory in turn
    offload = partial(vf.offload, partial(plain, model), model=model)
    plan = vf.plan_offload(partial(plain, model), p.everything, model=model, store=store)(x)
    moved = plan.bytes["moved"]
    rates = {"bytes_per_second": bytes_per_second(x), "flops_per_second": flops_per_second(plan, model, x)}
    ours = {
        "everything": offload(p.everything, store=store),
        "everything, prefetch=0": offload(p.everything, store=store, prefetch=0),
        "everything, prefetch=1 GiB": offload(p.everything, store=store, prefetch=1 << 30),
        "everything, keep=1/4": offload(p.everything, store=store, keep=moved // 4),
        "everything, sync": offload(p.everything, store=host_store(x, sync=True), prefetch=0),
        "larger_than(input)": offload(p.larger_than(x.nbytes), store=store),
        "in_modules('layers.*.mlp')": offload(p.in_modules("layers.*.mlp"), store=store),
        "budget(plan, as measured)": offload(p.budget(plan, **rates), store=store),
        f"everything, int8{LOSSY}": offload(p.everything, store=host_store(x, codec=torch.int8)),
    }
    peers = {f"{name} OffloadActivations": peer(module) for name, module in PEERS.items()}
    remarks = [f"{name}: not installed" for name, context in peers.items() if context is None]
    remarks += [
        f"{moved / 2**20:.0f} MiB can be moved; " + ", ".join(f"{k} {v:.3g}" for k, v in rates.items())
    ]
    contexts = {"torch save_on_cpu": partial(save_on_cpu, pin_memory=x.device.type != "cpu"), **peers}
    return {
        "plain": partial(plain, model, x),
        "torch.utils.checkpoint per block": partial(checkpointed, model, x),
        **{name: partial(under, make, model, x) for name, make in contexts.items() if make is not None},
        **{f"offload {name}": partial(fn, x) for name, fn in ours.items()},
    }, remarks


class Rehearsed(vf.HostStore):
    """Takes tensors in host memory for those of an accelerator, so that the script runs without one."""

    def accepts(self, tensor: Tensor) -> bool:
        return True


def host_store(x: Tensor, **options) -> vf.HostStore:
    if x.device.type != "cpu":
        return vf.HostStore(pin=True, **options)
    return Rehearsed(pin=False, **options)


def peer(module: str) -> Callable | None:
    try:
        return importlib.import_module(module).OffloadActivations
    except ImportError:
        return None


def under(make: Callable[[], contextlib.AbstractContextManager], model: Model, x: Tensor) -> Tensor:
    with make():
        return plain(model, x)


# Measuring


def step(model: Model, forward: Callable[[], Tensor]) -> Callable[[], Mapping[str, float]]:
    """One step as a variant for `measure.interleaved`."""

    def on_cpu() -> Mapping[str, float]:
        return {
            "seconds": seconds_of(lambda: forward().backward(), device),
            **measure.mebibytes_on("cpu", forward),
        }

    def on_accelerator() -> Mapping[str, float]:
        torch.accelerator.reset_peak_memory_stats()
        before, held = torch.accelerator.memory_allocated(), 0

        def both() -> None:
            nonlocal held
            loss = forward()
            held = torch.accelerator.memory_allocated() - before
            loss.backward()

        seconds = seconds_of(both, device)
        peak = torch.accelerator.max_memory_allocated() - before
        return {"seconds": seconds, "held MiB": held / 2**20, "peak MiB": peak / 2**20}

    device = next(model.parameters()).device
    return on_cpu if device.type == "cpu" else on_accelerator


def seconds_of(act: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bytes_per_second(x: Tensor) -> float:
    """What the link copies one way: the slower one."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type != "cpu")
    ways = partial(host.copy_, x, non_blocking=True), partial(x.copy_, host, non_blocking=True)
    return min(x.nbytes / min(seconds_of(way, x.device) for _ in range(5)) for way in ways)


def flops_per_second(plan: vf.Plan, model: Model, x: Tensor) -> float:
    """What the device achieves on the forward pass."""
    return plan.flops / min(seconds_of(lambda: plain(model, x), x.device) for _ in range(3))


# Checking


def check_gradients(model: Model, variants: Mapping[str, Callable[[], Tensor]]) -> int:
    """How many variants have plain's gradients, bit for bit; raises if one has not."""
    exact = {name: forward for name, forward in variants.items() if LOSSY not in name}
    expected = gradients(model, variants["plain"])
    for name, forward in exact.items():  # plain among them: it must be like itself
        require_equal(gradients(model, forward), expected, name)
    return len(exact)


def gradients(model: Model, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    with deterministic():
        return torch.autograd.grad(forward(), tuple(model.parameters()))


@contextlib.contextmanager
def deterministic() -> Generator[None]:
    """Attention's backward adds in any order otherwise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def require_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], name: str) -> None:
    if not all(map(torch.equal, actual, expected)):
        raise RuntimeError(f"the gradients of {name!r} are not plain's")


def check_options(model: Model, x: Tensor) -> bool:
    """gradients are equal with any options of HostStore, twice over one graph"""
    fn = partial(plain, model, x[:1])
    expected, parameters = gradients(model, fn), tuple(model.parameters())
    for options in (
        {},
        {"inflight_bytes": 0},
        {"inflight_bytes": 1 << 40},
        {"cache_bytes": 0},
        {"sync": True},
    ):
        offloaded = vf.offload(fn, p.everything, model=model, store=host_store(x, **options))
        with deterministic():
            loss = offloaded()
            for retain in (True, False):
                actual = torch.autograd.grad(loss, parameters, retain_graph=retain)
                require_equal(actual, expected, f"HostStore with {options}")
    return True


def check_streams(model: Model, x: Tensor) -> bool:
    """gradients are equal when every step runs on another stream"""
    if x.device.type == "cpu":
        return False
    fn = partial(plain, model, x[:1])
    offloaded = vf.offload(fn, p.everything, model=model, store=host_store(x))
    expected, before = gradients(model, fn), torch.accelerator.current_stream()
    for stream in (before, torch.Stream(x.device), torch.Stream(x.device)):
        stream.wait_stream(before)
        with stream:
            actual = gradients(model, offloaded)
        before.wait_stream(stream)
        require_equal(actual, expected, f"offload on {stream}")
    return True


def check_waits(model: Model, x: Tensor) -> bool:
    """the host waits for nothing in a step, once there are buffers"""
    if x.device.type != "cuda":
        return False
    fn = vf.offload(partial(plain, model, x[:1]), p.everything, model=model, store=host_store(x))
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            fn().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return True


def check_memory(model: Model, x: Tensor) -> bool:
    """no device memory is left when graphs are gone, with and without backward"""
    if x.device.type == "cpu":
        return False
    fn = vf.offload(partial(plain, model, x[:1]), p.everything, model=model, store=host_store(x))
    allocated = []
    for _ in range(3):
        fn()
        fn().backward()
        allocated.append(torch.accelerator.memory_allocated())
    left = allocated[-1] - allocated[0]
    if left > 0:
        raise RuntimeError(f"{left} bytes of device memory are left of graphs that are gone")
    return True


CHECKS = (check_options, check_streams, check_waits, check_memory)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.offload", description=__doc__)
    for option in inspect.signature(run).parameters.values():
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    print(run(**vars(parser.parse_args(argv))), flush=True)


if __name__ == "__main__":
    main()
