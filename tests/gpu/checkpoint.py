"""Saves of a state on an accelerator: `python -m tests.gpu.checkpoint`. `--device cpu` is a rehearsal.

Every way to save is given a state that an optimizer changes as soon as it may; what was saved is compared
with a copy, and the run that goes on from it with the one that was never stopped. Then the wait for a save
is measured beside a plain copy into pinned memory.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import veofunc as vf
from tests.bench import measure

WAYS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the checkpointer, and of a save
    "copied": ({}, {}),
    "copied while training goes on": ({}, {"block": False}),
    "two buffers": ({"double_buffer": True}, {}),
    "not copied": ({"copy": False}, {}),
}


def make(width: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.Dropout(0.1), nn.Linear(4 * width, width)).to(
        device
    )
    return model, torch.optim.AdamW(model.parameters(), fused=device.type != "cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    parameter = next(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(8, parameter.shape[1], device=parameter.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check(way: str, width: int, device: torch.device, directory: Path) -> None:
    """What is saved is what was there, and training goes on from it bit for bit."""
    options, how = WAYS[way]
    model, optimizer = make(width, device)
    train(model, optimizer, 2)
    state = vf.train_state(model, optimizer, step=2)
    expected = state.clone()
    with vf.async_checkpointer(state, directory, **options) as ckpt:
        save = ckpt.save(state, 2, **how)
        if options.get("copy", True):
            save.wait_staged()
        else:
            save.result()
        train(model, optimizer, 2)
        restored = ckpt.restore(state, 2)
    for key, leaf in expected.items(include_nested=True, leaves_only=True):
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(
                restored[key], leaf, rtol=0, atol=0, equal_nan=True, msg=f"{way}: {key}"
            )
    other, other_optimizer = make(width, device)
    vf.load_train_state(restored, other, other_optimizer)
    train(other, other_optimizer, 2)
    assert all(map(torch.equal, other.parameters(), model.parameters())), way


def run(device: str = "", width: int = 4096, rounds: int = 5) -> str:
    place = torch.device(device) if device else torch.accelerator.current_accelerator(check_available=True)
    if place is None:
        return "no accelerator: nothing checked (--device cpu rehearses)"
    with tempfile.TemporaryDirectory() as path:
        for way in WAYS:
            check(way, min(width, 256), place, Path(path) / way)
        text = f"checked on {place}: {', '.join(WAYS)}"
        model, optimizer = make(width, place)
        train(model, optimizer, 1)
        state = vf.train_state(model, optimizer, rng=False)
        tensors = [leaf for leaf in state.values(True, True) if isinstance(leaf, torch.Tensor)]
        pinned = [torch.empty_like(t, device="cpu", pin_memory=place.type == "cuda") for t in tensors]
        with vf.async_checkpointer(state, Path(path) / "measured", keep_last=1) as ckpt:
            steps = iter(range(1 << 30))

            def copy() -> None:
                torch._foreach_copy_(pinned, tensors, non_blocking=True)

            variants = {
                "copy into pinned memory": measure.timed(copy, place.type),
                "save": measure.timed(lambda: ckpt.save(state, next(steps)), place.type),
            }
            settled = {name: lambda v=variant: (ckpt.wait(), v())[1] for name, variant in variants.items()}
            samples = measure.interleaved(settled, rounds)
    return f"{text}\n\n{measure.table('training waits', samples)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    print(run(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    main()
