"""What one rank checks: `python ranks.py NAME RENDEZVOUS_FILE RANK WORLD_SIZE`; prints "NAME passed"."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict

import veofunc as vf
from tests.laws.subject import CHANNELS, make_batch, make_functional_loss, make_loss, make_model, sums
from tests.laws.table import TRANSFORMS


def check_sums(rank: int, world_size: int) -> None:
    model = make_model().eval()
    objective = make_loss(model)
    for row in TRANSFORMS:
        with tempfile.TemporaryDirectory() as directory:
            objective = row.wrap(objective, model, Path(directory))
    batches = [make_batch(seed) for seed in range(2)]
    window, whole = vf.Window(), vf.Window()
    for step, batch in enumerate(batches, start=1):
        window = window.add(objective(batch[rank::world_size])[1], step)
        whole = whole.add(objective(batch)[1], step)
    total = window.all_reduce()
    assert (total.first_step, total.last_step, total.num_steps) == (1, 2, 2)
    assert set(total.obs.keys()) == {row.observes for row in TRANSFORMS if row.observes}
    for key, leaf in sums(whole.obs).items():
        torch.testing.assert_close(sums(total.obs)[key], leaf)
        if not leaf.is_floating_point():
            assert torch.equal(sums(total.obs)[key], leaf), key
    _check_metrics(total, whole, objective)
    _check_group_of_one(window, rank, world_size)
    _check_a_rank_without_tokens(objective, batches[0], rank)
    _check_structures_that_differ(rank)


def _check_metrics(total, whole, objective) -> None:
    assert vf.router_metrics(total.obs, objective.routers) == vf.router_metrics(whole.obs, objective.routers)
    metrics = vf.channel_metrics(total.obs, objective.channels)
    assert metrics == pytest.approx(vf.channel_metrics(whole.obs, objective.channels), rel=1e-5)
    assert set(metrics) >= {f"channel_loss/{name}" for name in CHANNELS}


def _check_group_of_one(window, rank, world_size) -> None:
    groups = [dist.new_group([r]) for r in range(world_size)]
    alone = window.all_reduce(groups[rank])
    assert (alone.obs == window.obs).all()


def _check_a_rank_without_tokens(objective, batch, rank) -> None:
    batch = batch.clone()
    if rank == 1:
        batch["labels"].fill_(-100)
    obs = objective(batch)[1]["channel"]
    counts = [torch.empty_like(obs["token_count"]) for _ in range(2)]
    dist.all_gather(counts, obs["token_count"])
    assert counts[1].sum() == 0 and counts[0].sum() > 0
    assert torch.equal(vf.all_reduce(obs)["token_count"], counts[0])


def _check_structures_that_differ(rank) -> None:
    mine = TensorDict({"router": {"tokens": torch.ones(2 + rank)}})
    with pytest.raises(ValueError, match=r"(?s)rank 0: router > tokens \[2\].*rank 1: router > tokens \[3\]"):
        vf.all_reduce(mine)
    window = vf.Window().add(mine, 1) if rank == 0 else vf.Window()
    with pytest.raises(ValueError, match="rank 1: empty"):
        window.all_reduce()
    assert int(vf.all_reduce(TensorDict({"x": torch.tensor(1)}))["x"]) == 2  # the group still works


def check_channel(rank: int, world_size: int) -> None:
    """Packed rows, split by rows (data parallel) and by tokens (sequence parallel), by every kind of loss."""
    batch, weight = _packed_batch(), torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    count = (batch["labels"] != -100).sum()

    def pair(batch, weight):
        loss, token_loss = vf.linear_cross_entropy(batch["hidden"], weight, batch["labels"], divisor=count)
        return loss, token_loss

    def intercept(batch, weight):
        logits = (batch["hidden"] @ weight.T).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count

    parts = {
        "by rows": {name: x.chunk(world_size, 0) for name, x in batch.items()},
        "by tokens": {name: x.chunk(world_size, 1) for name, x in batch.items()},
        "all on the last": {name: [x[:0]] * (world_size - 1) + [x] for name, x in batch.items()},
    }
    for loss_fn in (pair, intercept):
        objective = vf.with_channel_loss(loss_fn, 4)
        whole = _losses_and_gradient(objective, batch, weight)
        for name, part in parts.items():
            loss, obs, grad = _losses_and_gradient(objective, {k: x[rank] for k, x in part.items()}, weight)
            total = vf.all_reduce(TensorDict({"loss": loss, "grad": grad, **obs}))
            torch.testing.assert_close(total["loss"], whole[0], msg=f"{loss_fn.__name__}, {name}")
            torch.testing.assert_close(total["grad"], whole[2])
            torch.testing.assert_close(total["channel"].to_dict(), whole[1]["channel"].to_dict())
            assert total["channel", "token_count"].equal(whole[1]["channel", "token_count"])
            names = ("a", "b", "c", "d")
            metrics, right = (vf.channel_metrics(x, names) for x in (total, whole[1]))
            assert metrics.keys() == right.keys() and metrics == pytest.approx(right, rel=1e-5)


def _packed_batch() -> dict[str, torch.Tensor]:
    """Four rows of eight tokens of documents that cross no row; channel 3 has none, some are nobody's."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor(
        [[0, 1, 2, 0, 1, 2, 3, 4]] * 2 + [[5, 6, 7, 8, 0, 1, 2, 3], [0, 1, 0, 1, 0, 1, 0, 1]]
    )
    documents = vf.packing.document_ids(positions)
    source = torch.tensor([0, 1, 2, 0, 1, -1, 2, 0, 1, 1])
    tokens = torch.randint(9, positions.shape, generator=generator)
    return {  # made before the tokens are split: the last of a part predicts the first of the next
        "hidden": torch.randn(*positions.shape, 6, generator=generator),
        "labels": vf.packing.next_token(tokens, documents),
        "channel": vf.packing.channel_ids(source, document_ids=documents),
    }


def _losses_and_gradient(objective, batch, weight):
    weight = weight.clone().requires_grad_()
    loss, obs = objective(batch, weight)
    loss.backward()
    return loss.detach(), obs, weight.grad


def check_fsdp(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The head returns a view; nobody writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model = make_model().eval()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = make_batch()
    plain = make_loss(model)(batch).detach()
    expected, expected_obs = vf.with_channel_loss(make_loss(model), CHANNELS)(batch)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    sharded = next(p for p in model.parameters() if p.dim() == 2)
    with pytest.raises(TypeError, match=r"weight must be a whole tensor, got a DTensor.*full_tensor"):
        vf.linear_cross_entropy(torch.ones(1, sharded.shape[1]), sharded, torch.zeros(1).long())
    functional = make_functional_loss(model)

    def with_weight_decay(params, batch):  # uses every parameter, but the swap would be ignored
        return functional(params, batch).sum() + sum(p.square().sum() for p in params.values())

    for _ in range(2):  # before the module's first forward, and after
        for objective in (lambda params, batch: functional(params, batch).sum(), with_weight_decay):
            with pytest.raises(ValueError, match="FSDP2 module, which ignores swapped parameters"):
                vf.grad_and_value(objective)(params, batch)
        torch.testing.assert_close(make_loss(model)(batch).detach(), plain)  # no swap is left behind
    _check_the_sharded_model_works_inside(model, batch, expected, expected_obs)


def _check_the_sharded_model_works_inside(model, batch, expected, expected_obs) -> None:
    objective = vf.offload(make_loss(model), vf.policies.nothing, model=model)
    objective = vf.monitor_router(vf.with_channel_loss(objective, CHANNELS), model=model)
    loss, obs = objective(batch)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(obs["channel"].to_dict(), expected_obs["channel"].to_dict())
    assert all(p.grad is not None and p.grad.to_local().isfinite().all() for p in model.parameters())


def main() -> None:
    name, rendezvous, rank, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    {"sums": check_sums, "channel": check_channel, "fsdp": check_fsdp}[name](rank, world_size)
    dist.barrier()
    dist.destroy_process_group()
    print(f"{name} passed")


if __name__ == "__main__":
    main()
