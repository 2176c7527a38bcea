"""What the laws are checked on: a tiny mixture-of-experts language model, its loss and its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, EXPERTS, TOP_K = 16, 8, 4, 2
CHANNELS = ("a", "b", "c")


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear(x)
        weights, ids = logits.softmax(-1).topk(TOP_K)
        return logits, weights, ids


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        logits, weights, ids = self.router(x)
        gate = torch.zeros_like(logits).scatter(-1, ids, weights)  # [B, T, E]
        hidden = torch.einsum("btd,edf->btef", x, self.up).relu()  # [B, T, E, 2 D]
        return x + self.dropout(torch.einsum("btef,efd,bte->btd", hidden, self.down, gate))


class Model(nn.Module):
    """`checkpointing` is None, "reentrant" or "non-reentrant"."""

    def __init__(self, checkpointing: str | None = None):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [B, T, D]
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)  # [B, T, V]


def make_model(checkpointing: str | None = None) -> Model:
    torch.manual_seed(0)
    return Model(checkpointing)


def make_loss(model: nn.Module):
    """The loss per token of a batch, in nats, [B, T]."""

    def loss_fn(batch: TensorDict) -> Tensor:
        logits = model(batch["tokens"])
        return F.cross_entropy(logits.mT, batch["labels"], reduction="none")

    return loss_fn


def make_functional_loss(model: nn.Module):
    """The same as a function of (params, batch)."""

    def loss_fn(params: dict[str, Tensor], batch: TensorDict) -> Tensor:
        logits = torch.func.functional_call(model, params, (batch["tokens"],))
        return F.cross_entropy(logits.mT, batch["labels"], reduction="none")

    return loss_fn


def make_batch(seed: int = 0, rows: int = 4) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, 7), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    labels[0, 2] = -100
    channel = torch.randint(-1, len(CHANNELS), (rows, 7), generator=generator)
    return TensorDict({"tokens": tokens, "labels": labels, "channel": channel}, batch_size=[rows])


def sums(obs: TensorDictBase) -> dict[str | tuple[str, ...], Tensor]:
    """All sums in `obs`, by name."""
    return dict(obs.items(include_nested=True, leaves_only=True))
