"""Train a small mixture of experts on real text: the four transforms in a loop of one's own.

    python examples/train.py

Nothing is downloaded. The run may be killed at any moment: the same command goes on after the last
checkpoint and ends, on a CPU, with the same bits as a run that was never killed.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import data
import numpy as np
import report
import torch
import torch.nn.functional as F
from model import Config, LanguageModel
from tensordict import TensorDictBase
from torch import nn

import veofunc as vf

NUM_TOKENS = 256  # per row
LEARNING_RATE = 4e-3
BALANCE_RATE = 0.03  # by which one step moves a router's bias against the load


def main(argv: list[str] | None = None) -> None:
    """Train, or finish what an earlier call began, and report."""
    options = parse(argv)
    try:
        train(options)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on in {options.out}", file=sys.stderr)
        raise SystemExit(130) from None  # what shells expect after Ctrl-C
    print(report.table(options.out))


def train(options: argparse.Namespace) -> None:
    """The loop."""
    torch.set_num_threads(options.threads)
    seed(options.seed)
    out, device = options.out, options.device
    corpus = data.load_corpus()
    claim(options, corpus)
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


def claim(options: argparse.Namespace, corpus: data.Corpus) -> None:
    """Make `--out` the directory of this run, or know it again; never touch anything else."""
    out, file = options.out, options.out / "run.json"
    names = ("seed", "device", "batch_size", "log_every", "threads")
    ours = {name: str(getattr(options, name)) for name in names}
    ours["installed_text"] = data.fingerprint(corpus)
    if not file.exists() or not file.read_text():  # empty: killed before it was written
        if out.exists() and set(out.iterdir()) - {file}:
            raise SystemExit(f"{out} holds something else than a run; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(ours) + "\n")
    elif not options.resume:
        raise SystemExit(f"{out} holds a run; choose another --out, or go on with it by --resume")
    theirs = json.loads(file.read_text())
    changed = [name for name in ours if theirs[name] != ours[name]]
    if changed:
        differences = ", ".join(f"{name} {theirs[name]} (now {ours[name]})" for name in changed)
        raise SystemExit(
            f"{out} holds a run with {differences}, which cannot go on exactly; "
            "choose another --out, or the settings it began with"
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, default=400, help="steps in all (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="the run's directory (default: %(default)s)",
    )
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on with the run in --out, if there is one (default); --no-resume refuses to",
    )
    add("--seed", type=natural, default=0, help="seed of parameters and batches (default: %(default)s)")
    add(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1, ... (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=positive,
        default=8,
        help=f"rows of {NUM_TOKENS} bytes per step (default: %(default)s)",
    )
    add("--log-every", type=positive, default=25, help="steps in one window (default: %(default)s)")
    add(
        "--save-every",
        type=positive,
        default=100,
        help="steps between checkpoints (default: %(default)s)",
    )
    add("--threads", type=positive, default=1, help="torch's threads on the CPU (default: %(default)s)")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """An argument that is an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def device(text: str) -> torch.device:
    """An argument that is a device of this machine."""
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:  # torch raises either, by the kind of device
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {error}") from error


if __name__ == "__main__":
    main()
