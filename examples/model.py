"""A small byte-level mixture-of-experts language model in ordinary PyTorch.

Nothing in this file knows about veofunc. Shapes: B batch, T tokens, N = B * T, D width, H heads,
V vocabulary, E experts, K experts per token, F width of one expert.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocabulary: int = 256  # bytes
    width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    expert_width: int = 64


def rotate(x: Tensor) -> Tensor:  # [B, H, T, D/H]
    """Rotary position embedding: position t turns a pair of features by t times its frequency."""
    num_tokens, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(num_tokens, device=x.device)[:, None] * frequency  # [T, D/2H]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head self-attention under a given mask."""

    def __init__(self, config: Config):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [B, T, D], [B, 1, T, T]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask)  # [B, H, T, D/H]
        return self.out(x.transpose(1, 2).flatten(-2))  # [B, T, D]


class Router(nn.Module):
    """Chooses `top_k` experts for every token, with weights that add up to one.

    The bias takes part in the choice only. Training moves it against the load instead of adding a
    balancing loss ("Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
    https://arxiv.org/abs/2408.15664).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.top_k = config.top_k
        self.gate = nn.Linear(config.width, config.num_experts, bias=False)
        self.register_buffer("bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [N, D]
        logits = self.gate(x)  # [N, E]
        ids = (logits + self.bias).topk(self.top_k, dim=-1).indices  # [N, K]
        return logits, logits.gather(-1, ids).softmax(dim=-1), ids


class Experts(nn.Module):
    """`num_experts` gated MLPs held in three weights.

    All experts run on all tokens, and those that were not chosen count with weight zero: at this
    size three large products are faster than sorting tokens by expert, and every parameter always
    gets a gradient.
    """

    def __init__(self, config: Config):
        super().__init__()
        num_experts, width, expert_width = config.num_experts, config.width, config.expert_width
        self.gate = nn.Parameter(torch.randn(num_experts, width, expert_width) * width**-0.5)
        self.up = nn.Parameter(torch.randn(num_experts, width, expert_width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, expert_width, width) * expert_width**-0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:  # [N, D], [N, K], [N, K]
        share = x.new_zeros(x.shape[0], self.gate.shape[0]).scatter(-1, ids, weights)  # [N, E]
        gate = torch.einsum("nd,edf->nef", x, self.gate)
        up = torch.einsum("nd,edf->nef", x, self.up)
        return torch.einsum("nef,efd->nd", F.silu(gate) * up * share[..., None], self.down)  # [N, D]


class MoE(nn.Module):
    """A router and its experts."""

    def __init__(self, config: Config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        rows = x.flatten(0, 1)  # [N, D]
        _, weights, ids = self.router(rows)
        return self.experts(rows, ids, weights).view_as(x)


class Block(nn.Module):
    """Attention, then the mixture of experts, each normalised before and added to the stream."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width)
        self.moe = MoE(config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [B, T, D], [B, 1, T, T]
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out. A token sees itself and the past of its document."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)  # the first loss is that of a uniform guess: ln 256 = 5.55 nats

    def forward(self, tokens: Tensor, document_ids: Tensor) -> Tensor:  # [B, T], [B, T]
        same_document = document_ids[:, :, None] == document_ids[:, None, :]
        mask = same_document.tril()[:, None]  # [B, 1, T, T]
        x = self.embed(tokens)  # [B, T, D]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))  # [B, T, V]
