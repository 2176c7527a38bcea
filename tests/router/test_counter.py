"""The sums of a call that a user asks for, against loops over tokens and slots."""

import itertools
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import veofunc as vf

B, T, D, E, K = 2, 5, 6, 4, 2
EXTRAS = ("probabilities", "entropy", "z", "coactivation", "batch_max_vio")


class Router(nn.Module):
    def __init__(self, num_experts=E):
        super().__init__()
        self.linear = nn.Linear(D, num_experts)

    def forward(self, x):
        logits = self.linear(x)
        weights, ids = logits.softmax(-1).topk(K)
        return logits, weights, ids


class Masking(Router):
    """Shows its first choice as a mask, in which expert 0 has room for one token only."""

    def forward(self, x):
        logits, _, ids = super().forward(x)
        mask = nn.functional.one_hot(ids[..., 0], logits.shape[-1])
        first = mask[..., 0].cumsum(0) * mask[..., 0]
        mask[..., 0] = (first == 1).long()
        return logits, mask


class Scoring(Router):
    """Shows its choice as scores."""

    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return torch.zeros_like(logits).scatter(-1, ids, weights), logits


class Model(nn.Module):
    def __init__(self, kinds=(Router, Router), num_experts=(E, E)):
        super().__init__()
        torch.manual_seed(0)
        self.routers = nn.ModuleList(kind(n) for kind, n in zip(kinds, num_experts, strict=True))

    def forward(self, x, attention_mask=None):
        for router in self.routers:
            router(x.flatten(0, -2))
        return x


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(B, T, D, generator=generator),
        "tokens": torch.zeros(B, T).long(),
        "mask": torch.rand(B, T, generator=generator) < 0.7,
        "channel": torch.randint(-1, 4, (B, T), generator=generator),
    }


def of_batch(model):
    return lambda batch: model(batch["x"])


def chosen_by(router, x):
    """The experts of each token, from what the router returns."""
    output = router(x.flatten(0, -2))
    if isinstance(router, Masking):
        return [[e for e, one in enumerate(row) if one] for row in output[1].tolist()]
    if isinstance(router, Scoring):
        return [[e for e, score in enumerate(row) if score] for row in output[0].tolist()]
    return output[2].tolist()


def loads(model, batch, counts):
    """[L][E] slots of the tokens for which `counts(token)`."""
    width = max(router.linear.out_features for router in model.routers)
    per_layer = []
    for router in model.routers:
        load = [0] * width
        for token, experts in enumerate(chosen_by(router, batch["x"])):
            for expert in experts:
                load[expert] += counts(token)
        per_layer.append(load)
    return per_layer


KINDS = [(Router, Router), (Masking, Masking), (Scoring, Scoring)]


@pytest.mark.parametrize("kinds", KINDS, ids=["ids", "mask", "scores"])
def test_tokens_that_are_masked_out_do_not_count(kinds):
    model, batch = Model(kinds, (E, 6)), make()
    kept = batch["mask"].flatten().tolist()
    monitored = vf.monitor_router(of_batch(model), model=model, mask="mask")
    for _ in range(2):
        obs = monitored(batch)[1]["router"]
        assert obs["tokens_per_expert"].tolist() == loads(model, batch, lambda token: kept[token])
        assert obs["tokens"].tolist() == [sum(kept)] * 2
        assert obs["unattributed_tokens"].tolist() == [0, 0]


def test_slots_without_room_at_their_expert_are_dropped():
    model, batch = Model((Masking, Masking)), make()
    obs = vf.monitor_router(of_batch(model), model=model)(batch)[1]["router"]
    slots = torch.tensor(loads(model, batch, lambda token: 1)).sum(-1)
    assert obs["dropped"].tolist() == (B * T - slots).tolist()
    assert (obs["dropped"] > 0).any()


@pytest.mark.parametrize("kinds", KINDS, ids=["ids", "mask", "scores"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_load_is_split_by_channel(kinds, masked, rows):
    model, batch = Model(kinds, (E, 6)), make()
    if rows:
        batch["channel"] = torch.tensor([2, 0])
    ids = batch["channel"].view(B, -1).expand(B, T).flatten().tolist()
    kept = batch["mask"].flatten().tolist() if masked else [True] * (B * T)
    options = {"by_channel": "channel", "channels": 3, "mask": "mask" if masked else None}
    monitored = vf.monitor_router(of_batch(model), model=model, **options)
    for _ in range(2):
        by_channel = monitored(batch)[1]["router", "tokens_per_expert_by_channel"]
        assert by_channel.shape == (3, 2, 6)
        for c in range(3):
            expected = loads(model, batch, lambda token, c=c: kept[token] and ids[token] == c)
            assert by_channel[c].tolist() == expected


WAYS = {
    "argument": (lambda model: model, lambda b: ((b["x"],), {"attention_mask": b["mask"]}), "attention_mask"),
    "entry": (of_batch, lambda b: ((b,), {}), "mask"),
    "TensorDict": (of_batch, lambda b: ((TensorDict(b),), {}), "mask"),
    "function": (of_batch, lambda b: ((b,), {}), lambda batch: batch["mask"]),
    "ints": (of_batch, lambda b: ((b,), {}), lambda batch: batch["mask"].int()),
    "foreign keyword": (of_batch, lambda b: ((b | {"mask": 0},), {"keep": b["mask"]}), "keep"),
}


@pytest.mark.parametrize(("wrap", "call", "mask"), WAYS.values(), ids=WAYS)
def test_a_mask_may_be_given_in_every_way(wrap, call, mask):
    model, batch = Model(), make()
    args, kwargs = call(batch)
    kept = batch["mask"].flatten().tolist()
    obs = vf.monitor_router(wrap(model), model=model, mask=mask)(*args, **kwargs)[1]["router"]
    assert obs["tokens_per_expert"].tolist() == loads(model, batch, lambda token: kept[token])


@pytest.mark.parametrize("option", [{"mask": "few"}, {"by_channel": "few", "channels": 2}])
def test_routers_that_see_another_number_of_tokens_are_not_guessed(option):
    model, batch = Model(), make()
    monitored = vf.monitor_router(of_batch(model), model=model, **option)
    with pytest.raises(ValueError, match=r"must have one value for each token.* 8 values.*routers\.0 10"):
        monitored(batch | {"few": torch.ones(B, T - 1).long()})
    monitored(batch | {"few": torch.ones(B, T).long()})
    obs = monitored(batch | {"few": torch.ones(B, T - 1).long()})[1]["router"]
    assert obs["unattributed_tokens"].tolist() == [B * T, B * T]
    assert obs["tokens"].tolist() == [0, 0] and not obs["tokens_per_expert"].any()


def test_one_channel_per_row_is_spread_over_tokens_not_over_features():
    model = Model()
    monitored = vf.monitor_router(model, by_channel="source", channels=2)
    x = torch.randn(7, D)
    obs = monitored(x, source=torch.tensor([0, 1, 1, 0, 1, 0, 0]))[1]["router"]
    assert obs["tokens_per_expert_by_channel"].sum((1, 2)).tolist() == [2 * 4 * K, 2 * 3 * K]


def test_extras_equal_loops_over_tokens():
    model, batches = Model(num_experts=(E, 6)), [make(seed) for seed in range(3)]
    monitored = vf.monitor_router(of_batch(model), model=model, mask="mask", extras=EXTRAS)
    total = sum(monitored(batch)[1]["router"] for batch in batches)
    for layer, router in enumerate(model.routers):
        width = router.linear.out_features
        mass, entropy, z, vio = [0.0] * 6, 0.0, 0.0, 0.0
        pairs = [[0] * 6 for _ in range(6)]
        for batch in batches:
            load = [0] * width
            logits = router.linear(batch["x"].flatten(0, 1)).tolist()
            for token, kept in enumerate(batch["mask"].flatten().tolist()):
                if not kept:
                    continue
                partition = math.log(sum(math.exp(x) for x in logits[token]))
                p = [math.exp(x - partition) for x in logits[token]]
                mass = [m + (p[e] if e < width else 0) for e, m in enumerate(mass)]
                entropy -= sum(x * math.log(x) for x in p)
                z += partition**2
                experts = chosen_by(router, batch["x"])[token]
                for i, j in itertools.product(experts, experts):
                    pairs[i][j] += 1
                for e in experts:
                    load[e] += 1
            vio += max(load) / (sum(load) / width) - 1
        assert total["probability_sum"][layer].tolist() == pytest.approx(mass, rel=1e-4)
        assert total["entropy_sum"][layer].item() == pytest.approx(entropy, rel=1e-4)
        assert total["z_sum"][layer].item() == pytest.approx(z, rel=1e-4)
        assert total["coactivation"][layer].tolist() == pairs
        assert total["batch_max_vio_sum"][layer].item() == pytest.approx(vio, rel=1e-5)
        assert total["batches"][layer].item() == 3


@pytest.mark.parametrize("kinds", KINDS, ids=["ids", "mask", "scores"])
def test_the_diagonal_of_coactivation_is_the_load(kinds):
    model, batch = Model(kinds), make()
    obs = vf.monitor_router(of_batch(model), model=model, extras=("coactivation",))(batch)[1]["router"]
    assert obs["coactivation"].diagonal(dim1=1, dim2=2).equal(obs["tokens_per_expert"])
    assert obs["coactivation"].equal(obs["coactivation"].mT)


def test_a_layer_without_tokens_has_no_violation_of_its_own():
    model = Model()
    model.forward = lambda x, both: [router(x) for router in (model.routers if both else model.routers[:1])]
    monitored = vf.monitor_router(model, extras=("batch_max_vio",))
    x = torch.randn(7, D)
    total = monitored(x, True)[1] + monitored(x, False)[1]
    assert total["router", "batches"].tolist() == [2, 1]


class Probabilities(Router):
    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits.softmax(-1), weights, ids


def test_probabilities_are_taken_as_they_are_and_have_no_z():
    model, batch = Model((Probabilities, Probabilities)), make()
    logits = Model()
    obs = vf.monitor_router(of_batch(model), model=model, extras=("probabilities", "entropy"))(batch)[1]
    expected = vf.monitor_router(of_batch(logits), model=logits, extras=("probabilities", "entropy"))(batch)[
        1
    ]
    torch.testing.assert_close(obs["router"].to_dict(), expected["router"].to_dict())
    with pytest.raises(ValueError, match=r"'z' needs logits, router routers.0 returns probabilities"):
        vf.monitor_router(of_batch(model), model=model, extras=("z",))(batch)


def test_a_router_without_logits_has_none_of_their_sums():
    model = Model()
    for router in model.routers:
        router.num_experts = E
    model.forward = lambda x: [router(x) for router in model.routers]
    monitored = vf.monitor_router(
        model, routers="routers.*", indices=lambda output: output[2], extras=("entropy",)
    )
    plain = monitored(torch.randn(7, D))[1]
    assert plain["router", "entropy_sum"].shape == (2,)
    hidden = nn.Sequential(Hidden())
    with pytest.raises(ValueError, match="extras entropy need logits, router 0 returns none"):
        vf.monitor_router(hidden, extras=("entropy",))(torch.randn(7, D))


class Hidden(Router):
    def forward(self, x):
        return super().forward(x)[1:]

    num_experts = E


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"extras": ("loss",)}, ValueError, "extras must be some of"),
        ({"extras": "z"}, ValueError, "extras must be some of"),
        ({"mask": 3}, TypeError, "mask must be a name or a function of the arguments, got 3"),
        ({"by_channel": 3}, TypeError, "by_channel must be a name or a function"),
        ({"by_channel": "channel", "channels": 0}, ValueError, "channels must be names or a number"),
        ({"by_channel": "channel", "channels": ""}, ValueError, "channels must be names or a number"),
    ],
)
def test_wrong_options_are_refused_when_the_transform_is_made(options, error, message):
    with pytest.raises(error, match=message):
        vf.monitor_router(Model(), **options)


def test_what_a_call_does_not_give_is_refused_at_once():
    model, batch = Model(), make()
    with pytest.raises(ValueError, match=r"mask='nothing' must name an argument, or an entry.*found 0"):
        vf.monitor_router(of_batch(model), model=model, mask="nothing")(batch)
    with pytest.raises(TypeError, match=r"by_channel must give an integer tensor, got torch\.float32"):
        vf.monitor_router(of_batch(model), model=model, by_channel="x")(batch)
    with pytest.raises(
        TypeError, match=r"mask must give a bool or integer tensor, got torch\.float32.*where it is 0"
    ):
        vf.monitor_router(of_batch(model), model=model, mask=lambda batch: batch["mask"].float().log())(batch)
    with pytest.raises(TypeError, match="mask must give a tensor, got list"):
        vf.monitor_router(of_batch(model), model=model, mask=lambda batch: [1])(batch)
