"""Two processes that train over gloo and offload; this file is also the script that each runs."""

import functools
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import veofunc as vf
from tests.distributed.pair import run_checks, run_on_two_ranks, what_failed
from veofunc import policies

WIDTH = 8
POLICIES = {
    "recompute": policies.recompute,
    "matmuls offloaded": policies.any_of(policies.matmuls, policies.not_(policies.matmuls)),
    "rest offloaded": policies.first_of(policies.recompute, policies.everything),
    "everything": policies.everything,
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):  # [B, T, D]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.25)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model(frozen=False):
    torch.manual_seed(0)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "bias" in name)
    return model


def steps(fn, model, rank):
    """Outputs and gradients of two steps."""
    found = []
    for i in range(2):
        model.zero_grad()
        torch.manual_seed(10 * rank + i)
        out = fn(torch.randn(2, 6, WIDTH))
        out.float().square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found += [out.detach(), *(getattr(gradient, "_local_tensor", gradient) for gradient in gradients)]
    return [tensor.clone() for tensor in found]


def assert_same_under_every_policy(rank, wrap, frozen=False):
    """`wrap` makes a model parallel."""
    plain_model = wrap(make_model(frozen))
    plain = steps(plain_model, plain_model, rank)
    for name, policy in POLICIES.items():
        for keep in (0, 2000) if name == "everything" else (0,):
            with tempfile.TemporaryDirectory() as directory:
                model, store = wrap(make_model(frozen)), vf.DiskStore(directory)
                fn = vf.offload(model, policy, store=store, blocks="layers.*", keep=keep)
                found = steps(fn, model, rank)
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), (name, keep)
            count = fn.stats()["count"]
            assert (count["recomputed"] > 0) == (name != "everything"), (name, keep)
            assert count["live"] == 0
            assert count["moved"] + count["deduplicated"] == count["restored"] + count["dropped"]


def sharder(parts=("layers",), **options):
    def wrap(model):
        for layer in model.layers:
            if "parts" in parts:
                fully_shard(layer.attention, **options)
                fully_shard(layer.mlp, **options)
            if "layers" in parts:
                fully_shard(layer, **options)
        return fully_shard(model, **options)

    return wrap


def check_sharded_blocks(rank):
    assert_same_under_every_policy(rank, sharder())


def check_sharded_blocks_with_frozen_weights(rank):
    """Weights that are gathered look like any tensor; their memory is freed after forward."""
    assert_same_under_every_policy(rank, sharder(), frozen=True)


def check_a_sharded_model(rank):
    assert_same_under_every_policy(rank, sharder(parts=()))


def check_sharded_blocks_in_half_precision_that_stay_gathered(rank):
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert_same_under_every_policy(rank, sharder(mp_policy=precision, reshard_after_forward=False))


def check_blocks_of_sharded_parts(rank):
    """In backward only one part of a block has its parameters at a time."""
    assert_same_under_every_policy(rank, sharder(parts=("parts",)))
    assert_same_under_every_policy(rank, sharder(parts=("parts", "layers")), frozen=True)


def check_replicated_model(rank):
    assert_same_under_every_policy(rank, DistributedDataParallel)


def check_sums_over_ranks_inside_a_block_are_not_computed_again(rank):
    """Operations on tensors of other ranks, in place and not, in and out of autograd's sight."""

    class Balanced(Block):
        def forward(self, x):
            weights, experts = torch.topk(self.mlp(x).softmax(-1), 2)
            counts = F.one_hot(experts, WIDTH).sum((0, 1, 2)).float()
            before = counts + 1
            dist.all_reduce(counts)
            gathered = [torch.zeros(WIDTH) for _ in range(2)]
            dist.all_gather(gathered, counts + rank)
            total = functional_collectives.all_reduce(x.detach().sin(), "sum", dist.group.WORLD)
            return (x * counts * before.sin()).sin() * weights.sum() + (x * total * sum(gathered)).cos()

    model = make_model()
    model.layers = nn.ModuleList(Balanced() for _ in range(2))
    plain = steps(model, model, rank)
    for policy in POLICIES.values():
        with tempfile.TemporaryDirectory() as directory:
            fn = vf.offload(model, policy, store=vf.DiskStore(directory), blocks="layers.*")
            found = steps(fn, model, rank)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


CHECKS = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    # The head returns a view; nobody writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    init_device_mesh("cpu", (2,))
    checks = {name: functools.partial(check, rank) for name, check in CHECKS.items()}
    run_checks(checks, rank, directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where two processes have run all checks."""
    directory = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks(__file__, directory)
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_on_two_ranks(name, rank, directory):
    failure = what_failed(name, rank, directory)
    assert not failure, failure


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
