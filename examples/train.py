"""Train a small mixture of experts on real text: the four transforms in a loop of one's own.

    python examples/train.py

Nothing is downloaded. The run may be killed at any moment: the same command goes on after the last
checkpoint and ends, on a CPU, with the same bits as a run that was never killed.
"""

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

import data
import numpy as np
import report
import rundir
import torch
import torch.nn.functional as F
from model import Config, LanguageModel
from options import parse
from tensordict import TensorDictBase
from torch import nn

import veofunc as vf

NUM_TOKENS = 256  # per row
LEARNING_RATE = 4e-3
BALANCE_RATE = 0.03  # by which one step moves a router's bias against the load


def main(argv: list[str] | None = None) -> None:
    """Train, or finish what an earlier call began, and report."""
    try:
        options = parse(argv, description=__doc__, num_tokens=NUM_TOKENS)
        corpus = data.load_corpus()
        with rundir.claim(options.out, settings(options, corpus), resume=options.resume):
            train(options, corpus)
            print(report.table(options.out))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on after the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None  # what shells expect after Ctrl-C


def train(options: argparse.Namespace, corpus: data.Corpus) -> None:
    """The loop."""
    torch.set_num_threads(options.threads)
    seed(options.seed)
    out, device = options.out, options.device
    model = LanguageModel(Config()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    objective = make_objective(model, out)

    with vf.async_checkpointer(vf.train_state(model, optimizer), out / "checkpoints") as ckpt:
        start, window = resume_(ckpt, model, optimizer)
        if start >= options.steps:
            print(f"{out} has finished {start} steps; a larger --steps goes on from there")
            return
        if start:
            print(f"going on in {out} after step {start}")
        with report.progress_bar(start, options.steps) as bar:
            log = report.make_log(out, bar, tokens_per_step=options.batch_size * NUM_TOKENS)
            for step in range(start + 1, options.steps + 1):
                batch = data.make_batch(corpus, options.seed, step, options.batch_size, NUM_TOKENS)
                loss, obs = objective(batch.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                balance_(model, objective.routers, obs)
                window = window.add(obs, step)
                if step % options.log_every == 0 or step == options.steps:
                    log(window.all_reduce(), objective, step)
                    window = vf.Window()
                if step % options.save_every == 0 or step == options.steps:
                    ckpt.save(vf.train_state(model, optimizer, step=step, window=window), step)
                bar.update()


def seed(number: int) -> None:
    """Seed every generator that a train state holds."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def make_objective(model: nn.Module, out: Path) -> Callable:
    """The loss of a batch, with three transforms around it."""

    def loss_fn(batch: TensorDictBase) -> torch.Tensor:
        logits = model(batch["tokens"], batch["document_ids"])  # [B, T, V]
        return F.cross_entropy(logits.mT, batch["labels"], reduction="none")  # [B, T], nats

    on_cpu = next(model.parameters()).device.type == "cpu"
    store = vf.DiskStore(out / "offload") if on_cpu else vf.HostStore()
    objective = vf.offload(loss_fn, vf.policies.larger_than(1 << 20), model=model, store=store)
    objective = vf.with_channel_loss(objective, data.CHANNELS)
    return vf.monitor_router(objective, model=model)


@torch.no_grad()
def balance_(model: nn.Module, routers: tuple, obs: TensorDictBase) -> None:
    """Make experts with more than the mean load less likely, and the others more."""
    for router, load in zip(routers, obs["router", "tokens_per_expert"], strict=True):  # [E]
        bias = model.get_submodule(router.path).bias
        bias += BALANCE_RATE * (load.float().mean() - load).sign()


def resume_(ckpt, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple:
    """Load the newest checkpoint, if there is one: its step, and its window of observations."""
    if ckpt.latest() is None:
        return 0, vf.Window()
    state = ckpt.restore(vf.train_state(model, optimizer))
    vf.load_train_state(state, model, optimizer)
    return state["step"], vf.Window(**state["window"])


def settings(options: argparse.Namespace, corpus: data.Corpus) -> dict[str, str]:
    """All that decides the bits of a run."""
    names = ("seed", "device", "batch_size", "log_every", "threads")
    chosen = {name: str(getattr(options, name)) for name in names}
    return chosen | {"installed_text": data.fingerprint(corpus)}


if __name__ == "__main__":
    main()
