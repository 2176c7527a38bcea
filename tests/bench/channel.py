"""Loss per channel: forward and backward of the last projection and its loss, ours and others'.

Each variant lives in a process of its own, and all take turns. Before and after, the loss and the gradients
of each are compared with plain's, and its sums per channel with those of a second pass. The columns:

- CPU s: seconds of computation in all threads of the process, which other load disturbs least.
- extra MiB: the most that a step makes the process grow over what it had just before, without gradients.

VeOmni takes the loss, and then the token losses once more, in chunks and without gradient: from the logits if
the model makes them, else from hidden by a second projection. Its own code runs, too, if it is installed.
torchtune leaves out ignored tokens, and takes the loss chunk by chunk.

The allocator is set as for `offload`: it gives freed memory back, in large pages.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from numpy.linalg import norm
from torch import Tensor, nn

import veofunc as vf
from tests.bench import measure
from tests.bench.measure import Samples
from veofunc.offload.stores import malloc

IGNORED = -100
TOLERANCE = 1e-5  # of the norm
PLAIN, UNREDUCED, ONE_PASS = "F.cross_entropy, mean", "F.cross_entropy, none", "vf.linear_cross_entropy"
FROM_HIDDEN = "plain + second pass, hidden"


@dataclass(frozen=True)
class Batch:
    """Packed documents; a label is already where it is predicted. One channel and position per token."""

    labels: Tensor
    channel: Tensor
    position: Tensor
    sources: list[int]  # channel of each document
    channels: int

    @classmethod
    def random(cls, tokens: int, documents: int, vocabulary: int, channels: int) -> "Batch":
        labels = torch.randint(vocabulary, (tokens,))
        labels[3::4] = labels[-1] = IGNORED
        parts = torch.arange(tokens).tensor_split(documents)
        sources = torch.randint(channels, (documents,)).tolist()
        channel = torch.cat([torch.full_like(part, c) for part, c in zip(parts, sources, strict=True)])
        return cls(labels, channel, torch.cat([part - part[0] for part in parts]), sources, channels)


Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Tensor | None]]  # hidden, weight -> loss, sums [C]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def reducing(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction)


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")


# What each route of ours wraps, and the loss that it is without sums.
ROUTES = {
    "output": (token_losses, UNREDUCED),
    "reduction": (reducing, PLAIN),
    "pair": (vf.linear_cross_entropy, ONE_PASS),
    "intercept": (plain, PLAIN),
}


def with_sums(route: str) -> str:
    return f"with_channel_loss, {route}"


def ours(route: str, channels: int) -> Loss:
    wrapped = vf.with_channel_loss(ROUTES[route][0], channels, per_token=route)

    def loss(hidden: Tensor, weight: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, obs = wrapped(hidden, weight, batch.labels, channel=batch.channel)
        return loss, obs["channel", "loss_sum"]

    return loss


def second_pass_from_hidden(hidden: Tensor, weight: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    loss = plain(hidden, weight, batch.labels)
    return loss, second_pass(lambda rows: F.linear(hidden[rows], weight), batch)


def second_pass_from_logits(hidden: Tensor, weight: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits, batch.labels), second_pass(lambda rows: logits[rows], batch)


@torch.no_grad()
def second_pass(logits: Callable[[slice], Tensor], batch: Batch, chunk: int = 512) -> Tensor:
    """Sum of the losses of every channel, from logits of some rows at a time."""
    losses = torch.empty(len(batch.labels))
    for start in range(0, len(losses), chunk):
        rows = slice(start, start + chunk)
        losses[rows] = F.cross_entropy(logits(rows), batch.labels[rows], reduction="none")
    return torch.zeros(batch.channels).index_add(0, batch.channel, losses)


def veomni(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    module = import_module("veomni.ops.kernels.cross_entropy.chunk_loss")
    return module.chunk_loss_function(hidden[None], weight, unshifted(labels))[0]


def veomni_with_sums(hidden: Tensor, weight: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    loss = veomni(hidden, weight, batch.labels)
    computer = import_module("veomni.trainer.callbacks.channel_loss_callback").ChannelLossComputer()
    computer.begin_step([batch.sources], [batch.position[None]], [None])
    computer.before_micro_step()
    computer.compute_side_channel(None, unshifted(batch.labels), None, hidden[None], weight)
    computer.after_micro_step()
    none = torch.zeros(()), None
    return loss, torch.stack([computer.step_totals.get(c, none)[0] for c in range(batch.channels)])


def unshifted(labels: Tensor) -> Tensor:
    """[1, N], as VeOmni wants them, which shifts them itself."""
    return F.pad(labels[:-1], (1, 0), value=IGNORED)[None]


def torchtune(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    counted, total = labels != IGNORED, torch.zeros(())
    for x, label, rows in zip(*(tensor.tensor_split(8) for tensor in (hidden, labels, counted)), strict=True):
        total = total + F.cross_entropy(F.linear(x[rows], weight).float(), label[rows], reduction="sum")
    return total / counted.sum()


def torch_chunked(hidden: Tensor, weight: Tensor, labels: Tensor, **options: int) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, labels, options=nn.LinearCrossEntropyOptions(**options))


def variants(channels: int) -> dict[str, Loss]:
    """All, by name."""

    def only(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
        return lambda hidden, weight, batch: (loss(hidden, weight, batch.labels), None)

    return {
        PLAIN: only(plain),
        UNREDUCED: only(lambda *args: token_losses(*args).sum() / (args[2] != IGNORED).sum()),
        ONE_PASS: only(lambda *args: vf.linear_cross_entropy(*args)[0]),
        **{with_sums(route): ours(route, channels) for route in ROUTES},
        FROM_HIDDEN: second_pass_from_hidden,
        "plain + second pass, logits": second_pass_from_logits,
        "VeOmni chunk_loss": only(veomni),
        "VeOmni chunk_loss + its second pass": veomni_with_sums,
        "torchtune, 8 chunks": only(torchtune),
        "torch linear_cross_entropy": only(torch_chunked),
        "torch linear_cross_entropy, 512": only(partial(torch_chunked, batch_chunk_size=512)),
    }


def names() -> tuple[list[str], list[str]]:
    """Of the variants that can run here, and of the others."""
    has = {"VeOmni": find_spec("veomni"), "torch linear": hasattr(nn, "LinearCrossEntropyOptions")}
    absent = [name for name in variants(1) if any(name.startswith(start) and not has[start] for start in has)]
    return [name for name in variants(1) if name not in absent], absent


def run(
    rounds: int = 3,
    tokens: int = 4096,
    documents: int = 16,
    hidden: int = 512,
    vocabulary: int = 32_000,
    channels: int = 8,
    threads: int = 2,
    allocator: str = "MALLOC_MMAP_THRESHOLD_=1048576 THP_MEM_ALLOC_ENABLE=1",
) -> str:
    present, absent = names()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, (pair.split("=") for pair in allocator.split())))
        sizes = tokens, documents, hidden, vocabulary, channels, threads
        workers = {name: stack.enter_context(measure.Worker(Step, name, *sizes)) for name in present}
        for worker in workers.values():
            worker.call("run")
        require_same_results(workers)
        steps = {name: lambda worker=worker: worker.call("run") for name, worker in workers.items()}
        samples = measure.interleaved(steps, rounds)
        require_same_results(workers)
    return "\n".join(
        (
            f"{tokens} tokens in {documents} documents, a quarter ignored; hidden {hidden}, vocabulary "
            f"{vocabulary}, {channels} channels, float32, {threads} threads",
            f"allocator: {allocator or 'as it is'}",
            *([f"not installed, and left out: {'; '.join(absent)}"] if absent else []),
            "",
            measure.table("forward + backward", samples, others=("CPU s", "extra MiB")),
            "",
            "added seconds: a step with sums, as many tokens, a vocabulary of 2: sums, wrapper and more",
            *goals(samples),
        )
    )


class Step:
    """Forward and backward of one variant, and the process it runs in."""

    def __init__(self, name, tokens, documents, hidden, vocabulary, channels, threads):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.batch = Batch.random(tokens, documents, vocabulary, channels)
        self.hidden = torch.randn(tokens, hidden, requires_grad=True)
        self.weight = torch.randn(vocabulary, hidden).mul_(hidden**-0.5).requires_grad_()
        self.fn, self.is_ours = variants(channels)[name], name in map(with_sums, ROUTES)

    def run(self) -> dict[str, float]:
        """Time and memory that a step takes, and the time of our part of it."""
        self.hidden.grad = self.weight.grad = None
        malloc.trim()
        resident = measure.resident_mebibytes()
        quantities = measure.resources(self._step)
        quantities["extra MiB"] = quantities["RSS MiB"] - resident
        return {**quantities, "alone s": self._alone()} if self.is_ours else quantities

    def _step(self) -> None:
        self.loss, self.sums = self.fn(self.hidden, self.weight, self.batch)
        self.loss.backward()
        self.loss = self.loss.detach()

    def _alone(self, repetitions: int = 20) -> float:
        """Seconds of a step over a vocabulary of 2."""
        hidden = torch.zeros(len(self.hidden), 1, requires_grad=True)
        weight = torch.zeros(2, 1, requires_grad=True)
        batch = replace(self.batch, labels=self.batch.labels.clamp(max=1))
        step = measure.timed(lambda: self.fn(hidden, weight, batch)[0].backward())
        return median(step()["seconds"] for _ in range(repetitions))

    def results(self) -> dict[str, np.ndarray]:
        """Of the last step; arrays, since tensors would go by shared memory, which may be too small."""
        results = {
            "loss": self.loss,
            "hidden": self.hidden.grad,
            "weight": self.weight.grad,
            "sums": self.sums,
        }
        return {what: tensor.numpy() for what, tensor in results.items() if tensor is not None}


def require_same_results(workers: dict[str, measure.Worker]) -> None:
    expected = {**workers[PLAIN].call("results"), "sums": workers[FROM_HIDDEN].call("results")["sums"]}
    wrong = [
        f"{what} of {name}"
        for name, worker in workers.items()
        for what, value in worker.call("results").items()
        if not norm(value - expected[what]) <= TOLERANCE * norm(expected[what])  # NaN is wrong, too
    ]
    if wrong:
        raise RuntimeError(
            f"results must be those of {PLAIN!r} (sums: of {FROM_HIDDEN!r}), but are not: {wrong}"
        )


def goals(samples: Samples) -> list[str]:
    """What we want, and whether it is so."""

    def middle(name: str, quantity: str) -> float:
        return median(quantities[quantity] for quantities in samples[name])

    wanted, pair = [], with_sums("pair")
    for route, (_, alike) in ROUTES.items():
        name, seconds = with_sums(route), middle(alike, "seconds")
        wanted.append((f"{name}: seconds / {alike}'s", middle(name, "seconds") / seconds, 1.01))
        wanted.append((f"{name}: added seconds / {alike}'s", middle(name, "alone s") / seconds, 0.01))
    for quantity, limit in (("seconds", 0.95), ("extra MiB", 1 / 9)):
        ratio = middle(pair, quantity) / middle(PLAIN, quantity)
        wanted.append((f"{pair}: {quantity} / plain's", ratio, limit))
    width = max(len(what) for what, _, _ in wanted)
    return [
        f"{'met' if value <= limit else 'missed':<6}  {what:<{width}}  {value:7.4f}, at most {limit:.3f}"
        for what, value, limit in wanted
    ]
