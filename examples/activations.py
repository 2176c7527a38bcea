"""What each policy holds for backward, and what it costs: `python examples/activations.py`."""

import argparse
import time
from pathlib import Path
from statistics import median

import data
import torch
import torch.nn.functional as F
from model import Config, LanguageModel
from options import integer

import veofunc as vf


def main(argv=None):
    """Plan and run one training step under each policy; print a table, and plot the last plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/activations"), help="default: %(default)s")
    parser.add_argument("--layers", type=integer(1), default=4, help="default: %(default)s")
    parser.add_argument("--rounds", type=integer(1), default=3, help="default: %(default)s")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = LanguageModel(Config(num_layers=options.layers))
    batch = data.make_batch(data.load_corpus(), 0, 1, batch_size=4, num_tokens=256)

    def loss_fn(batch):
        logits = model(batch["tokens"], batch["document_ids"])  # [B, T, V]
        return F.cross_entropy(logits.mT, batch["labels"])

    def step(fn):
        model.zero_grad()
        start = time.perf_counter()
        fn(batch).backward()
        return time.perf_counter() - start, [parameter.grad for parameter in model.parameters()]

    p = vf.policies
    store = vf.DiskStore(options.out / "store")  # with an accelerator: vf.HostStore()
    thrifty = p.first_of(p.recompute, p.everything)
    policies = (p.nothing, p.larger_than(1 << 18), p.matmuls, p.recompute, thrifty)
    how = {"model": model, "store": store, "blocks": "layers.*"}
    plans = {policy: vf.plan_offload(loss_fn, policy, **how)(batch) for policy in policies}
    runs = {policy: vf.offload(loss_fn, policy, **how) for policy in policies}
    seconds = {policy: [] for policy in policies}
    _, plain = step(loss_fn)
    for _ in range(options.rounds):  # interleaved, so that a busy machine is so for all
        for policy, fn in runs.items():
            taken, gradients = step(fn)
            seconds[policy].append(taken)
            assert all(map(torch.equal, gradients, plain)), f"{policy} changes the gradients"

    print(f"{'policy':<35}{'held MiB':>10}{'moved':>10}{'recomputed':>12}{'time':>8}")
    for policy, plan in plans.items():
        moved, recomputed = plan.bytes["moved"] / 2**20, plan.bytes["recomputed"] / 2**20
        ratio = median(seconds[policy]) / median(seconds[p.nothing])
        print(
            f"{policy!r:<35}{plan.held_bytes / 2**20:>10.1f}{moved:>10.1f}{recomputed:>12.1f}{ratio:>7.2f}x"
        )
    plan.plot().savefig(options.out / "plan.png")
    print(f"{options.out / 'plan.png'}: bytes held over one step with {policy!r}")


if __name__ == "__main__":
    main()
