"""Nothing waits for an accelerator: `python -m tests.gpu.no_sync`. `--device cpu` is a rehearsal.

Steps with every kind of channel loss and with the router monitor run under
`torch.cuda.set_sync_debug_mode("error")`, which raises where the host waits, and their sums are compared with
those on the CPU.
"""

import argparse
import contextlib
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import veofunc as vf
from tests.laws.subject import CHANNELS, VOCABULARY, WIDTH, make_batch, make_model

EXTRAS = ("probabilities", "entropy", "z", "coactivation", "batch_max_vio")


def objectives(model: nn.Module) -> dict[str, Callable]:
    """Every loss by name, as a function of a batch."""

    def unreduced(batch):
        return F.cross_entropy(model(batch["tokens"]).mT, batch["labels"], reduction="none")

    def mean(batch):
        return F.cross_entropy(model(batch["tokens"]).mT, batch["labels"])

    def linear(batch):
        hidden = model.embedding(batch["tokens"])
        return vf.linear_cross_entropy(hidden, model.head.weight, batch["labels"])

    def channel(fn, **options):
        return vf.with_channel_loss(fn, CHANNELS, **options)

    return {
        "output": channel(unreduced),
        "output, deterministic": channel(unreduced, deterministic=True),
        "intercept": channel(mean, extras=("correct", "z_sum")),
        "pair": channel(linear, token_bytes=torch.arange(VOCABULARY, device=model.head.weight.device)),
        "router": vf.monitor_router(
            mean, model=model, extras=EXTRAS, by_channel="channel", channels=CHANNELS
        ),
    }


@contextlib.contextmanager
def no_synchronisation(device: torch.device):
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(device: str = "") -> str:
    place = torch.device(device) if device else torch.accelerator.current_accelerator(check_available=True)
    if place is None:
        return "no accelerator: nothing checked (--device cpu rehearses)"
    model, batch = make_model().eval(), make_batch()
    assert model.head.weight.shape == (VOCABULARY, WIDTH)
    there, batch_there = copy.deepcopy(model).to(place), batch.to(place)
    expected = objectives(model)
    for name, objective in objectives(there).items():
        objective(batch_there)  # the first call looks closer
        with no_synchronisation(place):
            loss, obs = objective(batch_there)
            loss.backward()
        right = expected[name](batch)[1]
        for key, leaf in right.items(True, True):
            torch.testing.assert_close(obs[key].cpu(), leaf, rtol=1e-4, atol=1e-5)
    return f"checked on {place}: {', '.join(expected)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="")
    print(run(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    main()
