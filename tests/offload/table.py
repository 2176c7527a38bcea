"""Small models with every kind of saved tensor, and policies with every fate: each with each is a test."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import veofunc as vf
from veofunc import policies as p

WIDTH = 8


class CloneStore:
    """A user's own store: it keeps clones, and can say what it gave back that is still alive."""

    def accepts(self, tensor):
        return True

    def put(self, tensor):
        return CloneSlot(tensor.clone())


@dataclass(eq=False)
class CloneSlot:
    content: Tensor

    def get(self):
        return self.content.clone()


class Layers(nn.Module):
    """A model whose blocks are `layers.*`."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mlp():
    return Layers(
        *(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in "123")
    )


class Block(nn.Module):
    """Norms, attention over three chunks of one tensor, dropout, names."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):  # [B, T, D]
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        probabilities = (q @ k.mT).softmax(-1)
        mixed = vf.checkpoint_name(self.dropout(probabilities) @ v, "mixed")
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.dropout(vf.checkpoint_name(self.mlp(self.norm2(x)), "mlp"))


class Attention(nn.Module):
    """The fused kind, with results besides the output that are saved."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):  # [B, T, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Tied(nn.Module):
    """An embedding that is the head as well; buffers, and weights that are not trained."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        x = self.embed((x.abs() * 7).long().sum(-1) % 20) * self.scale
        for layer in self.layers:
            x = layer(x).tanh() * layer.weight[0].expand_as(x)
        return (x @ self.embed.weight.t()).log_softmax(-1)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2)),
            nn.MaxPool1d(2),
        )

    def forward(self, x):
        return self.layers(x)


class InPlace(nn.Module):
    """Changes tensors in place, before and after they are saved in another version."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x).add_(x).mul_(2).relu_()
        z = torch.zeros_like(y)
        z[..., :2] = y[..., 2:4].exp()
        return z.mul_(y).add_(1).sigmoid_()


class Experts(nn.Module):
    """Mixture of experts over tokens with static shapes: sorted by expert, weighted, scattered back."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3)

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).topk(2)  # [B, T, 2]
        y = torch.einsum("btd,edf->btef", x, self.up).relu()
        chosen = y.gather(2, expert[..., None].expand(*expert.shape, WIDTH))  # [B, T, 2, D]
        return x + (chosen * weight[..., None]).sum(2)


class Strange(nn.Module):
    """Complex and repeated tensors, overlapping windows, 0-dim results, one saved twice, empty ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        z = torch.complex(x * self.weight, x.sin())
        y = (z.conj() * z.exp()).real + z.conj().imag
        w = y.unfold(-1, 3, 1)  # shows elements three times
        y = y * (w * w).sum((-1, -2), keepdim=True).squeeze(-1).sigmoid()
        y = torch.cat((y * y, y[:0])) / y.norm()
        return y.sin() * self.weight.expand_as(y) * y.mean()


class Dropped(nn.Module):
    """Parts that nobody will differentiate: their graphs die within the call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            target = self.linear(x).exp()
        for _ in range(2):
            target = target + self.linear(x).exp().detach()
        return (self.linear(x).tanh() - target) ** 2


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.linear, self.use_reentrant = nn.Linear(WIDTH, WIDTH), use_reentrant

    def forward(self, x):
        return x + checkpoint(lambda x: self.linear(x).tanh().exp(), x, use_reentrant=self.use_reentrant)


MODELS = {
    "mlp": mlp,
    "blocks": lambda: Layers(Block(), Block()),
    "attention": lambda: Layers(Attention(), Attention()),
    "tied": Tied,
    "convolution": Convolution,
    "in place": lambda: Layers(InPlace(), InPlace()),
    "experts": lambda: Layers(Experts(), Experts()),
    "strange": lambda: Layers(Strange(), Strange()),
    "dropped": lambda: Layers(Dropped(), Dropped()),
    "checkpointed": lambda: Layers(Checkpointed(False), Checkpointed(True)),
}


def every_third(saved):
    return vf.Fate.OFFLOAD if saved.index % 3 == 0 else vf.Fate.KEEP


def by_turns(saved):
    fate = list(vf.Fate)[saved.index % 3]
    return vf.Fate.KEEP if fate is vf.Fate.RECOMPUTE and not saved.recomputable else fate


@dataclass(frozen=True)
class Case:
    policy: object
    options: dict = field(default_factory=dict)


BLOCKS = {"blocks": "layers.*"}

CASES = {
    "nothing": Case(p.nothing),
    "everything": Case(p.everything),
    "in_modules": Case(p.in_modules("layers.1")),
    "names": Case(p.names(offload=("mixed",))),
    "every_third": Case(every_third),
    "keep": Case(p.everything, {"keep": 1500}),
    "everything in blocks": Case(p.everything, BLOCKS),
    "matmuls": Case(p.matmuls, BLOCKS),
    "recompute, offload the rest": Case(p.first_of(p.recompute, p.everything), BLOCKS),
    "names in blocks": Case(p.names(save=("mlp",), offload=("mixed",)), BLOCKS),
    "recompute names": Case(p.names(recompute=("mixed", "mlp")), BLOCKS),
    "by_turns, keep": Case(by_turns, {**BLOCKS, "keep": 1000}),
}


def batch():
    torch.manual_seed(1)
    return torch.randn(3, 6, WIDTH)


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()
