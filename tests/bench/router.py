"""Router monitor: counting beside a router's matmul and in a training step, ours and others'.

One layer: a monitored module that returns a choice made before, so a router without its matmul, in whose
noise the counting would be lost. From each time that of the same call for one token is taken off: Python,
hooks, and the dispatch of operations.

A step: forward, backward and optimizer of the example's model, at the size of `examples/train.py`. Two
variants are the same, `plain`: they differ by noise, which is larger than what a monitor adds. So that is
measured directly, too: after each step a stand-in of the model, with as many layers and choices but without
computation, runs with the monitor and without.

Each variant of a step, and each number of experts, has a process of its own with one thread, and all take
turns. All that is timed is CPU time. Before and after, all monitors must have counted the same in all steps
so far. VeOmni's finds routers by the names of their classes, so it is told the example's.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import veofunc as vf
from examples.model import Config, LanguageModel, MoE, Router
from tests.bench import measure
from tests.bench.measure import Samples

TOP_K, CHANNELS = 8, 8
MATMUL, BINCOUNT, ONE_HOT = "F.linear", "torch.bincount", "F.one_hot, sum"
PLAIN, AGAIN, OURS = "plain", "plain, again", "monitor_router"
HOOKS, VEOMNI = "hooks with F.one_hot", "VeOmni MoERouterMonitor"


def run(
    rounds: int = 25,
    tokens: int = 8192,
    hidden: int = 2048,
    experts: str = "64 128 256",
    batch: int = 8,
    length: int = 256,
) -> str:
    of_layer = one_layer(rounds, tokens, hidden, [int(number) for number in experts.split()])
    of_step = training(rounds, batch, length)
    added = {name: of_step[name] for name in of_step if name in MONITORS}
    return "\n".join(
        (
            f"one layer: {tokens} tokens, hidden {hidden}, {TOP_K} experts per token, float32",
            shares(of_layer),
            "",
            f"a step: {batch} x {length} tokens; {Config()}",
            *([] if VEOMNI in of_step else [f"not installed, and left out: {VEOMNI}"]),
            measure.table("forward + backward + AdamW, CPU", of_step, seconds="CPU s"),
            "",
            measure.table("added to a step, measured alone, CPU", added, seconds="added s"),
            "",
            *goals(of_layer, of_step),
        )
    )


def cpu_seconds(act: Callable[[], object]) -> float:
    """Of this thread, which also runs backward on the CPU."""
    start = time.thread_time()
    act()
    return time.thread_time() - start


class Chosen(nn.Module):
    """A router that returns what was computed before."""

    def __init__(self, output: tuple[Tensor, ...]):
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.output


# One layer


def one_layer(rounds: int, tokens: int, hidden: int, experts: list[int]) -> dict[int, Samples]:
    """Samples of each way to count, for each number of experts."""
    with contextlib.ExitStack() as stack:
        calls = {}
        for number in experts:
            worker = stack.enter_context(measure.Worker(Layer, number, tokens, hidden))
            for name in (MATMUL, *countings(torch.zeros(1, 2 * TOP_K))):
                calls[number, name] = partial(worker.call, "run", name)
        samples = measure.interleaved(calls, rounds)
    return {e: {name: samples[e, name] for of, name in calls if of == e} for e in experts}


class Layer:
    """A router's matmul, and ways to count what it chose."""

    def __init__(self, experts: int, tokens: int, hidden: int):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        # Freed at once: from then on glibc keeps what is freed of smaller blocks, as it does in training.
        torch.empty(31 << 20, dtype=torch.uint8)
        x, weight = torch.randn(tokens, hidden), torch.randn(experts, hidden) * hidden**-0.5
        self.matmul = partial(F.linear, x, weight)
        self.counted = countings(self.matmul())
        self.one_token = countings(torch.randn(1, 2 * TOP_K))
        for _ in range(2):  # the first call looks for routers
            require_same_counts({name: count().numpy() for name, count in self.counted.items()})

    def run(self, name: str, repetitions: int = 5) -> dict[str, float]:
        """CPU time: of all tokens beyond one, and of one; ids are in caches, as topk leaves them."""
        if name == MATMUL:
            return {"CPU s": cpu_seconds(self.matmul)}
        pair = self.one_token[name], self.counted[name]
        times = [[cpu_seconds(count) for count in pair] for _ in range(repetitions)]
        one_token, all_tokens = map(median, zip(*times, strict=True))
        return {"one token s": one_token, "CPU s": all_tokens - one_token}


def countings(logits: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Functions that count how often each expert is among the `TOP_K` best of `logits` [N, E], by name."""
    num_tokens, num_experts = logits.shape
    weights, ids = logits.softmax(-1).topk(TOP_K)
    mask, channel = torch.ones(num_tokens, 1).bool(), torch.arange(num_tokens)[:, None] % CHANNELS

    def ours(**options) -> Callable[[], Tensor]:
        monitored = vf.monitor_router(nn.Sequential(Chosen((logits, weights, ids))), **options)
        return lambda: monitored(logits)[1]["router", "tokens_per_expert"][0]

    extras = ("probabilities", "entropy", "z", "coactivation", "batch_max_vio")
    return {
        OURS: ours(),
        BINCOUNT: lambda: torch.bincount(ids.flatten(), minlength=num_experts),
        ONE_HOT: lambda: F.one_hot(ids, num_experts).sum((0, 1)),
        f"{OURS}, mask": ours(mask=lambda x: mask),
        f"{OURS}, by_channel": ours(by_channel=lambda x: channel, channels=CHANNELS),
        **{f"{OURS}, {extra}": ours(extras=(extra,)) for extra in extras},
    }


def middle(rounds: list[Mapping[str, float]], quantity: str = "CPU s") -> float:
    return median(quantities[quantity] for quantities in rounds)


def shares(of_layer: Mapping[int, Samples]) -> str:
    """A table of what each way to count takes, in % of the matmul of as many experts."""
    first, *_ = of_layer.values()
    width = max(map(len, first))
    lines = [" " * width + "".join(f"{f'E={number}':>10}" for number in of_layer)]
    for name in first:
        parts = [middle(samples[name]) / middle(samples[MATMUL]) for samples in of_layer.values()]
        lines.append(f"{name:<{width}}" + "".join(f"{part:10.3%}" for part in parts))
    matmuls = ", ".join(f"{1e3 * middle(samples[MATMUL]):.2f}" for samples in of_layer.values())
    overhead = median(middle(samples[OURS], "one token s") for samples in of_layer.values())
    return "\n".join(
        (
            *lines,
            f"100 %: {matmuls} ms of CPU",
            f"taken off from {OURS}: {1e3 * overhead:.3f} ms, as for one token among {2 * TOP_K} experts",
        )
    )


# A step


# A function, and one that returns what has been counted in it so far, [L, E].
Monitored = tuple[Callable[..., Tensor], Callable[[], Tensor]]


def ours(fn: Callable[..., Tensor], model: nn.Module, num_experts: int) -> Monitored:
    monitored, window = vf.monitor_router(fn, model=model), vf.Window()

    def call(*args: Tensor) -> Tensor:
        nonlocal window
        out, obs = monitored(*args)
        window = window.add(obs, 0)
        return out

    return call, lambda: window.obs["router", "tokens_per_expert"]


def veomni(fn: Callable[..., Tensor], model: nn.Module, num_experts: int) -> Monitored:
    module = import_module("veomni.utils.moe_monitor")
    for router in (Router, Chosen):
        module.register_router_extractor(router.__name__)(lambda output: output[2])
    monitor = module.MoERouterMonitor(num_experts)
    module.attach_moe_router_monitor(model, monitor)

    def call(*args: Tensor) -> Tensor:
        module.set_active_monitor(monitor)
        return fn(*args)

    return call, monitor._stack_and_reduce


def hooks(fn: Callable[..., Tensor], model: nn.Module, num_experts: int) -> Monitored:
    counts = {module: 0 for module in model.modules() if isinstance(module, Router | Chosen)}

    def count(router: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> None:
        counts[router] = counts[router] + F.one_hot(output[2], num_experts).sum((0, 1))

    for router in counts:
        router.register_forward_hook(count)
    return fn, lambda: torch.stack(list(counts.values()))


MONITORS = {OURS: ours, HOOKS: hooks, VEOMNI: veomni}


def names() -> list[str]:
    """Of the variants of a step that can run here."""
    return [PLAIN, AGAIN, OURS, HOOKS, *([VEOMNI] if find_spec("veomni") else [])]


def training(rounds: int, batch: int, length: int) -> Samples:
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(measure.Worker(Training, name, batch, length)) for name in names()
        }
        steps = {name: partial(worker.call, "run") for name, worker in workers.items()}
        for step in steps.values():
            step()
        require_same_counts(counts(workers))
        samples = measure.interleaved(steps, rounds)
        require_same_counts(counts(workers))
    return samples


def counts(workers: Mapping[str, measure.Worker]) -> dict[str, np.ndarray]:
    return {name: worker.call("counts") for name, worker in workers.items() if name in MONITORS}


class Training:
    """Steps of the example's model with a monitor or none, and the process they run in."""

    def __init__(self, name: str, batch: int, length: int):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = Config()
        self.tokens = torch.randint(config.vocabulary, (batch, length))
        self.documents = torch.arange(length).expand(batch, length) // max(length // 2, 1)
        self.model = LanguageModel(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3, betas=(0.9, 0.95))
        self.loss, self.bare, self.monitored = self._loss, None, None
        if name in MONITORS:
            monitor = partial(MONITORS[name], num_experts=config.num_experts)
            self.loss, self.counted = monitor(self._loss, self.model)
            self.bare, copy = stand_in(config, batch * length), stand_in(config, batch * length)
            self.monitored, _ = monitor(copy, copy)
            self.x = torch.zeros(batch, length, config.width)
            self.monitored(self.x)

    def _loss(self, tokens: Tensor, documents: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens, documents).mT, tokens.roll(-1, 1))

    def run(self) -> dict[str, float]:
        """CPU time of a step, and what the monitor adds to the stand-in, in the step's caches."""
        quantities = {"CPU s": cpu_seconds(self._step)}
        if self.monitored is not None:
            seconds = cpu_seconds(partial(self.monitored, self.x))
            quantities["added s"] = seconds - cpu_seconds(partial(self.bare, self.x))
        return quantities

    def _step(self) -> None:
        self.loss(self.tokens, self.documents).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counts(self) -> np.ndarray:
        """Of all steps, [L, E]."""
        return self.counted().numpy().copy()


class Idle(nn.Module):
    """Experts that compute nothing."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x


@torch.no_grad()
def stand_in(config: Config, num_tokens: int) -> nn.Module:
    """The mixtures of experts of a model, which choose what was chosen before, and compute nothing."""
    layers = [MoE(config) for _ in range(config.num_layers)]
    for moe in layers:
        moe.router, moe.experts = Chosen(moe.router(torch.randn(num_tokens, config.width))), Idle()
    return nn.Sequential(*layers)


def require_same_counts(counts: Mapping[str, np.ndarray]) -> None:
    first, *others = counts
    wrong = [name for name in others if not np.array_equal(counts[name], counts[first])]
    if wrong or not counts[first].any():
        raise RuntimeError(f"counts must be those of {first!r}, and not all 0, but are not: {wrong}")


def goals(of_layer: Mapping[int, Samples], of_step: Samples) -> list[str]:
    """What we want, and whether it is so."""
    step, ours = middle(of_step[PLAIN]), of_step[OURS]
    wanted = [
        (f"E={e}: tensor work of counting / {MATMUL}", middle(samples[OURS]) / middle(samples[MATMUL]), 0.005)
        for e, samples in of_layer.items()
    ]
    wanted.append((f"{OURS}: added, measured alone / plain step", middle(ours, "added s") / step, 0.01))
    wanted.append((f"{OURS}: step / plain step", middle(ours) / step, 1.01))
    width = max(len(what) for what, _, _ in wanted)
    return [
        f"{'met' if value <= limit else 'missed':<6}  {what:<{width}}  {value:7.4f}, at most {limit:.3f}"
        for what, value, limit in wanted
    ]
