"""Offload: a training step, plain, checkpointed, and with what it saves moved or computed again.

Each variant lives in a process of its own, and all take turns. Before and after, the gradients of each
are compared with plain's, bit for bit. The columns:

- CPU s: seconds of computation in all threads of the process, which other load disturbs least.
- held MiB: what forward leaves for backward. peak MiB: the most at once in a step. These are tensors that
  operations make, and the whole of the memory that a `DiskStore` passes tensors through, in use or not.
- RSS MiB: how much a step makes the process grow, over what it had before its first step.
- moved MiB: what goes to the store in a step.

On a CPU that is a file, and `save_on_cpu` has nowhere to go; on an accelerator it is host memory. All
processes have the allocator give freed memory back in large pages, by two environment variables that must be
set before Python starts: else RSS says little about what is in use. `--allocator ""` leaves it as it is; then
only those with a `DiskStore`, which asks for that itself, pay for it, in small pages.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from statistics import median
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import veofunc as vf
from tests.bench import measure
from tests.bench.measure import Samples
from veofunc.offload.stores import malloc

p = vf.policies


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the stream."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D/H]
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width: int, num_heads: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plain(model: Model, x: Tensor) -> Tensor:
    return model(x).square().mean()


def checkpointed(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.square().mean()


def saved_on_cpu(model: Model, x: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=x.device.type != "cpu"):
        return plain(model, x)


PLAIN, CHECKPOINT, OFFLOAD = "plain", "torch.utils.checkpoint per block", "offload large"
PEERS = {PLAIN: plain, CHECKPOINT: checkpointed, "torch save_on_cpu": saved_on_cpu}


def policies(nbytes: int) -> dict[str, p.Policy]:
    """Ours, by name. More than `nbytes` bytes are large."""
    large = p.larger_than(nbytes)
    return {
        OFFLOAD: large,
        "recompute": p.recompute,
        "recompute, offload the rest": p.first_of(p.recompute, large),
        "keep products, recompute the rest": p.matmuls,
        "offload products, recompute the rest": p.first_of(p.matmuls, large),
    }


def run(
    rounds: int = 3,
    width: int = 512,
    layers: int = 12,
    heads: int = 8,
    batch: int = 4,
    tokens: int = 512,
    inflight: int = 48,
    threads: int = 2,
    device: str = "cpu",
    directory: str = "",
    allocator: str = "MALLOC_MMAP_THRESHOLD_=1048576 THP_MEM_ALLOC_ENABLE=1",
) -> str:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, (pair.split("=") for pair in allocator.split())))
        path = stack.enter_context(tempfile.TemporaryDirectory(dir=directory or None))
        sizes = width, layers, heads, batch, tokens, inflight, threads
        workers = {
            name: stack.enter_context(measure.Worker(Step, name, device, path, *sizes))
            for name in (*PEERS, *policies(0))
        }
        memory = {name: worker.call("look") for name, worker in workers.items()}
        require_equal_gradients(workers)
        steps = {
            name: lambda worker=worker, name=name: {**worker.call("run"), **memory[name]}
            for name, worker in workers.items()
        }
        samples = measure.interleaved(steps, rounds)
        require_equal_gradients(workers)
    columns = "CPU s", "held MiB", "peak MiB", "RSS MiB", "moved MiB"
    return "\n".join(
        (
            f"{layers} blocks of width {width}, {batch} texts of {tokens} tokens, float32, {threads} threads",
            f"allocator: {allocator or 'as it is'}",
            "",
            measure.table("forward + backward", samples, others=columns),
            "",
            *goals(samples),
        )
    )


class Step:
    """A training step of one variant, and the process it runs in."""

    def __init__(
        self,
        name: str,
        device: str,
        directory: str,
        width: int,
        layers: int,
        heads: int,
        batch: int,
        tokens: int,
        inflight: int,
        threads: int,
    ):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.device, self.moved, self.buffers = device, lambda: 0, 0
        self.model = Model(width, heads, layers).to(device)
        self.x = torch.randn(batch, tokens, width, device=device)
        plain(self.model, self.x[:1]).backward()  # makes room for the gradients, and loads the kernels
        malloc.trim()  # of what else is free
        self.resident = measure.resident_mebibytes()
        self.fn = PEERS[name] if name in PEERS else self.ours(name, directory, inflight)

    def ours(self, name: str, directory: str, inflight: int) -> Callable[..., Tensor]:
        policy, store = policies(self.x.nbytes // 4)[name], None
        if self.device == "cpu" and "offload" in name:
            store, self.buffers = vf.DiskStore(directory, inflight_bytes=inflight << 20), inflight
        blocks = "layers.*" if policy.recomputes else None
        prefetch = (inflight << 20) // 2
        fn = vf.offload(plain, policy, model=self.model, store=store, prefetch=prefetch, blocks=blocks)
        self.moved = lambda: int(fn.stats()["bytes", "moved"])
        return fn

    def loss(self) -> Tensor:
        return self.fn(self.model, self.x)

    def look(self) -> dict[str, float]:
        """Memory that a step takes."""
        self.model.zero_grad(set_to_none=False)
        before = self.moved()
        memory = measure.mebibytes_on(self.device, self.loss)
        memory = {name: nbytes + self.buffers for name, nbytes in memory.items()}
        return {**memory, "moved MiB": (self.moved() - before) / 2**20}

    def run(self) -> dict[str, float]:
        """Time that a step takes."""
        self.model.zero_grad(set_to_none=False)
        quantities = measure.resources(lambda: self.loss().backward(), self.device)
        return {**quantities, "RSS MiB": quantities["RSS MiB"] - self.resident}

    def gradients(self) -> str:
        """The same string for the same gradients only."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.grad.cpu().numpy())
        return digest.hexdigest()


def require_equal_gradients(workers: dict[str, measure.Worker]) -> None:
    gradients = {name: worker.call("gradients") for name, worker in workers.items()}
    wrong = [name for name, digest in gradients.items() if digest != gradients[PLAIN]]
    if wrong:
        raise RuntimeError(f"gradients must be those of {PLAIN!r}, bit for bit; they differ in {wrong}")


def goals(samples: Samples) -> list[str]:
    """What we want, and whether it is so."""

    def middle(name: str, quantity: str) -> float:
        return median(quantities[quantity] for quantities in samples[name])

    def to_checkpoint(name: str, quantity: str) -> float:
        return middle(name, quantity) / middle(CHECKPOINT, quantity)

    ours = [name for name in samples if name not in PEERS and to_checkpoint(name, "peak MiB") <= 1]
    best = min(ours or [OFFLOAD], key=lambda name: to_checkpoint(name, "seconds"))
    peak, rss, seconds = (middle(OFFLOAD, quantity) for quantity in ("peak MiB", "RSS MiB", "seconds"))
    wanted = [
        (f"{OFFLOAD}: peak MiB / plain's", peak / middle(PLAIN, "peak MiB"), 0.15),
        (f"{OFFLOAD}: RSS MiB / peak MiB", rss / peak, 1.25),
        (f"{OFFLOAD}: seconds / plain's", seconds / middle(PLAIN, "seconds"), 1.10),
        (f"{best}: peak MiB / checkpointing's", to_checkpoint(best, "peak MiB"), 1.00),
        (f"{best}: seconds / checkpointing's", to_checkpoint(best, "seconds"), 1.00),
    ]
    width = max(len(what) for what, _, _ in wanted)
    return [
        f"{'met' if value <= limit else 'missed':<6}  {what:<{width}}  {value:6.3f}, at most {limit:.2f}"
        for what, value, limit in wanted
    ]
