"""Offload: a training step and what it holds, plain, checkpointed, and moved.

"held" is what one forward pass leaves on the device for backward, "peak" the most during a step. On a
CPU `save_on_cpu` has nowhere to go, and a disk store writes to the page cache first.
"""

import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import veofunc as vf
from tests.bench import measure


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


def run(
    rounds: int = 7,
    width: int = 256,
    layers: int = 6,
    batch: int = 4,
    tokens: int = 256,
    device: str = "cpu",
    directory: str = "",
) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, num_heads=4) for _ in range(layers))).to(device)
    x = torch.randn(batch, tokens, width, device=device)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    with tempfile.TemporaryDirectory(dir=directory or None) as path:
        forwards = forward_passes(model, loss, x, path)
        steps = {}
        for name, forward in forwards.items():
            memory = measure.mebibytes_on(device, forward)
            steps[name] = measure.timed(lambda forward=forward: forward().backward(), device, **memory)
        samples = measure.interleaved(steps, rounds)
    return measure.table("forward + backward", samples, others=("held MiB", "peak MiB"))


def forward_passes(model: nn.Sequential, loss: Callable, x: Tensor, directory: str) -> dict[str, Callable]:
    """Forward pass by name: plain first, then the ways to hold less for backward."""
    p = vf.policies
    disk = vf.DiskStore(directory)
    large = x.numel() * x.element_size()

    def checkpointed() -> Tensor:
        h = x
        for block in model:
            h = checkpoint(block, h, use_reentrant=False)
        return h.square().mean()

    def saved_on_cpu() -> Tensor:
        with save_on_cpu(pin_memory=x.device.type != "cpu"):
            return loss(x)

    ways = {
        "nothing": vf.offload(loss, p.nothing, model=model),
        "everything to disk": vf.offload(loss, p.everything, model=model, store=disk),
        f"larger_than({large}) to disk": vf.offload(loss, p.larger_than(large), model=model, store=disk),
        "everything but 1/4 (keep=)": vf.offload(
            loss, p.everything, model=model, store=disk, keep=9 * large * len(model) // 2
        ),
    }
    if x.device.type != "cpu":
        ways["everything to the host"] = vf.offload(loss, p.everything, model=model)
    return {
        "plain": lambda: loss(x),
        "torch.utils.checkpoint per block": checkpointed,
        "torch save_on_cpu": saved_on_cpu,
        **{f"offload: {name}": lambda fn=fn: fn(x) for name, fn in ways.items()},
    }
