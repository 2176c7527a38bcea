"""Router monitor: a training step of the example's model, and the counting alone.

The counting alone is a monitored module that returns a choice made before; the router's matmul, whose
share it is compared with, is its forward pass only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import veofunc as vf
from examples.model import Config, LanguageModel, Router
from tests.bench import measure


class Chosen(nn.Module):
    """Returns a router's output that was computed before."""

    def __init__(self, output: tuple[Tensor, ...]):
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.output


def run(
    rounds: int = 15, width: int = 256, layers: int = 4, experts: int = 16, batch: int = 4, tokens: int = 256
) -> str:
    torch.manual_seed(0)
    config = Config(width=width, num_layers=layers, num_experts=experts)
    return "\n\n".join(
        (whole_step(config, batch, tokens, rounds), one_router(config, batch * tokens, rounds))
    )


def whole_step(config: Config, batch: int, tokens: int, rounds: int) -> str:
    model = LanguageModel(config)
    ids = torch.randint(config.vocabulary, (batch, tokens))
    documents = torch.zeros_like(ids)

    def loss() -> Tensor:
        return F.cross_entropy(model(ids, documents).mT, ids)

    monitored = vf.monitor_router(loss, model=model)
    steps = {
        "plain": measure.timed(lambda: loss().backward()),
        "monitor_router": measure.timed(lambda: monitored()[0].backward()),
    }
    return measure.table("forward + backward", measure.interleaved(steps, rounds))


def one_router(config: Config, num_tokens: int, rounds: int) -> str:
    router, x = Router(config), torch.randn(num_tokens, config.width)
    with torch.no_grad():
        monitored, counting = (
            vf.monitor_router(router),
            vf.monitor_router(nn.Sequential(Chosen(router(x))), routers="0"),
        )
        calls = {
            "the router's matmul": measure.timed(lambda: router.gate(x)),
            "the router": measure.timed(lambda: router(x)),
            "the router, monitored": measure.timed(lambda: monitored(x)),
            "the counting alone": measure.timed(lambda: counting(x)),
        }
        return measure.table(f"forward, {num_tokens} tokens", measure.interleaved(calls, 10 * rounds))
