"""The four routes to token losses: the same sums by each, and the loss that one had without."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import veofunc as vf
from tests import reference
from tests.laws import subject
from tests.no_sync import NoSync

B, T, D, V, C = 3, 6, 4, 11, 3


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (B, T), generator=generator)
    labels[0, 2] = labels[1, -1] = -100
    return {
        "hidden": torch.randn(B, T, D, generator=generator),
        "labels": labels,
        "channel": torch.randint(-1, C + 1, (B, T), generator=generator),
    }


HEAD = torch.randn(V, D, generator=torch.Generator().manual_seed(9)).requires_grad_()


def logits_of(batch):
    return F.linear(batch["hidden"], HEAD)  # [B, T, V]


def expected_sums(batch, shift=0):
    """By loops, from logits at each position and the label `shift` positions later; -100 past the end."""
    rows = logits_of(batch).tolist()
    losses, labels, channel = [], [], []
    for b in range(B):
        for t in range(T):
            label = int(batch["labels"][b, t + shift]) if t + shift < T else -100
            labels.append(label)
            channel.append(int(batch["channel"][b, t]))
            losses.append(0.0 if label < 0 else reference.cross_entropy(rows[b][t], label))
    return reference.channel_sums(losses, labels, channel, C, -100)


def assert_sums(obs, expected):
    for name, value in expected.items():
        assert obs["channel", name].tolist() == pytest.approx(value, rel=1e-4), name


# Each loss function has its labels aligned with the logits unless its name says that it shifts.


def unreduced(batch):
    return F.cross_entropy(logits_of(batch).mT, batch["labels"], reduction="none")


def flat_unreduced(batch):
    return F.cross_entropy(logits_of(batch).flatten(0, 1), batch["labels"].flatten(), reduction="none")


def shifting_unreduced(batch):
    return F.cross_entropy(logits_of(batch)[:, :-1].mT, batch["labels"][:, 1:], reduction="none")


def flat_shifting_unreduced(batch):
    return shifting_unreduced(batch).flatten()


def with_reduction(batch, reduction="mean"):
    return F.cross_entropy(logits_of(batch).mT, batch["labels"], reduction=reduction)


def fused(batch, reduction="mean"):
    """As of a library whose kernel nobody sees into."""
    return F.nll_loss(logits_of(batch).log_softmax(-1).mT, batch["labels"], reduction=reduction)


def pair(batch):
    return vf.linear_cross_entropy(batch["hidden"], HEAD, batch["labels"])


def shifting_pair(batch):
    token_loss = shifting_unreduced(batch)
    return token_loss.sum() / 7, token_loss


def mean(batch):
    return F.cross_entropy(logits_of(batch).mT, batch["labels"])


def module(batch):
    return nn.CrossEntropyLoss()(logits_of(batch).flatten(0, 1), batch["labels"].flatten())


def shifting_as_hugging_face(batch, num_items=None):
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].flatten()
    reduction = "mean" if num_items is None else "sum"
    loss = F.cross_entropy(logits_of(batch).flatten(0, 1), labels, reduction=reduction)
    return {"loss": loss if num_items is None else loss / num_items, "logits": None}


def shifting_as_hugging_face_did(batch):
    return nn.CrossEntropyLoss()(logits_of(batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def with_another_loss(batch):
    return mean(batch) + 1e-3 * logits_of(batch).logsumexp(-1).square().mean()


ROUTES = {
    "output": (unreduced, flat_unreduced, shifting_unreduced, flat_shifting_unreduced),
    "reduction": (with_reduction, fused),
    "pair": (pair, shifting_pair),
    "intercept": (
        mean,
        module,
        shifting_as_hugging_face,
        functools.partial(shifting_as_hugging_face, num_items=7),
        shifting_as_hugging_face_did,
        with_another_loss,
    ),
}
LOSSES = [
    pytest.param(route, fn, id=f"{route}-{getattr(fn, '__name__', 'partial')}")
    for route, fns in ROUTES.items()
    for fn in fns
]


def scalar(out):
    if isinstance(out, dict):
        return out["loss"]
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("asked", ["named", "auto"])
@pytest.mark.parametrize(("route", "fn"), LOSSES)
def test_every_route_gives_the_sums_of_a_loop(route, fn, asked):
    batch = make()
    objective = vf.with_channel_loss(fn, C, per_token=route if asked == "named" else "auto")
    name = getattr(fn, "__name__", "shifting")
    for _ in range(2):  # the first call of "auto" looks closer
        _, obs = objective(batch)
        assert_sums(obs, expected_sums(batch, shift=int("shifting" in name)))


@pytest.mark.parametrize(  # of `fused` it is not seen how it makes its mean; see the next test
    ("route", "fn"), [p for p in LOSSES if p.values[0] != "output" and p.values[1] is not fused]
)
def test_the_loss_and_its_gradient_have_the_bits_of_the_plain_ones(route, fn):
    batch = make()
    objective = vf.with_channel_loss(fn, C)
    plain = scalar(fn(batch))
    (gradient,) = torch.autograd.grad(plain, HEAD)
    for _ in range(2):
        out, _ = objective(batch)
        loss = out["loss"] if isinstance(out, dict) else out
        assert loss.equal(plain)
        assert torch.autograd.grad(loss, HEAD)[0].equal(gradient)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("fn", [with_reduction, fused])
def test_a_reduction_is_what_the_caller_asks_for(fn, reduction):
    batch = make()
    for objective, options in (
        (vf.with_channel_loss(fn, C), {"reduction": reduction}),
        (vf.with_channel_loss(functools.partial(fn, reduction=reduction), C), {}),
        (vf.with_channel_loss(functools.partial(fn, reduction="none"), C, reduction=reduction), {}),
    ):
        loss, _ = objective(batch, **options)
        torch.testing.assert_close(loss, fn(batch, reduction=reduction))
    with pytest.raises(ValueError, match="reduction= of the call must be one of none, mean, sum, got 'max'"):
        vf.with_channel_loss(fn, C, per_token="reduction")(batch, reduction="max")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, torch.rand(V)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_torch_s_own_function_is_wrapped_as_it_is(reduction, weight, smoothing):
    batch = make()
    logits, labels = logits_of(batch).detach().flatten(0, 1).requires_grad_(), batch["labels"].flatten()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    plain = F.cross_entropy(logits, labels, weight, **options)
    objective = vf.with_channel_loss(F.cross_entropy, C)
    for _ in range(2):
        loss, obs = objective(logits, labels, weight, channel=batch["channel"].flatten(), **options)
        assert loss.equal(plain)
        assert torch.autograd.grad(loss, logits)[0].equal(
            torch.autograd.grad(plain, logits, retain_graph=True)[0]
        )
        assert_sums(obs, expected_sums(batch))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("route", "fn"), [p for p in LOSSES if p.values[1] not in (module, shifting_as_hugging_face_did)]
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # the compiler does so itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # which the compiler uses
def test_every_route_compiles_as_one_graph(route, fn, backend):
    torch.compiler.reset()  # all transforms share the code that is compiled
    batch = make()
    expected, expected_obs = vf.with_channel_loss(fn, C)(batch)
    compiled = torch.compile(vf.with_channel_loss(fn, C), fullgraph=True, backend=backend)
    out, obs = compiled(batch)
    torch.testing.assert_close(scalar(out), scalar(expected))
    torch.testing.assert_close(obs["channel"].to_dict(), expected_obs["channel"].to_dict())


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # so does the compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_loss_module_that_is_compiled_is_not_seen_and_that_is_an_error():
    torch.compiler.reset()
    compiled = torch.compile(vf.with_channel_loss(module, C), backend="aot_eager")
    with pytest.raises(Exception, match=r"have F\.cross_entropy called once inside"):
        compiled(make())


@pytest.mark.parametrize("fn", [mean, module, shifting_as_hugging_face_did])
def test_labels_need_not_be_found_where_they_are_seen(fn):
    batch = make()
    _, expected = vf.with_channel_loss(fn, C)(batch)
    without = {"labels": batch.pop("labels")}  # which the function has from elsewhere
    _, obs = vf.with_channel_loss(lambda batch: fn(batch | without), C)(batch)
    torch.testing.assert_close(obs["channel"].to_dict(), expected["channel"].to_dict())
    batch["channel"] = torch.tensor([2, 0, -1])  # which tokens are of which row cannot be known
    with pytest.raises(ValueError, match=r"the loss has 1[58] labels, got 3 channel ids.*one per row"):
        vf.with_channel_loss(lambda batch: fn(batch | without), C)(batch)


def chunked(batch):
    return mean(batch) + mean(batch)


def unseen(batch):
    return logits_of(batch).mean()


@pytest.mark.parametrize(
    ("fn", "options", "error", "message"),
    [
        (
            chunked,
            {},
            ValueError,
            r"chunked must call F.cross_entropy once.*it did 2 times.*per_token='pair'",
        ),
        (chunked, {"per_token": "intercept"}, ValueError, "it did 2 times.*per_token='pair'"),
        (
            unseen,
            {},
            ValueError,
            r"unseen must return one loss per label, shape \[3, 6\], got \[\].*Or return",
        ),
        (unseen, {"per_token": "intercept"}, ValueError, "it did 0 times.*per_token='pair'"),
        (mean, {"per_token": "output"}, ValueError, r"mean must return one loss per label.*got \[\]"),
        (mean, {"per_token": "pair"}, TypeError, r"says that mean returns \(loss, token_loss\), got Tensor"),
        (shifting_as_hugging_face, {"per_token": "output"}, TypeError, "one loss per token, got dict"),
        (lambda batch: (mean(batch), {}), {"per_token": "pair"}, TypeError, "one loss per token, got dict"),
        (pair, {"extras": ("correct",)}, ValueError, "extras need the logits.*it did 0 times"),
    ],
)
def test_a_route_that_leads_nowhere_is_refused_with_the_one_to_take(fn, options, error, message):
    with pytest.raises(error, match=message):
        vf.with_channel_loss(fn, C, **options)(make())


def test_a_reduction_that_does_not_exist_is_refused_when_the_transform_is_made():
    with pytest.raises(ValueError, match="per_token='reduction', but mean has no argument 'reduction'"):
        vf.with_channel_loss(mean, C, per_token="reduction")
    with pytest.raises(ValueError, match="per_token must be one of auto, output, reduction, pair, intercept"):
        vf.with_channel_loss(mean, C, per_token="outputs")


def test_ids_that_are_too_few_or_too_many_are_refused_with_both_numbers():
    batch = make() | {"channel": torch.zeros(B, T + 3, dtype=torch.int64)}
    labels = {"labels": batch.pop("labels")}
    with pytest.raises(ValueError, match="the loss has 18 labels, got 27 channel ids"):
        vf.with_channel_loss(lambda batch: mean(batch | labels), C)(batch)


@pytest.mark.parametrize("fn", [unreduced, with_reduction, mean, shifting_as_hugging_face])
def test_extras_are_sums_per_channel(fn):
    batch = make()
    _, obs = vf.with_channel_loss(fn, C, extras=("correct", "z_sum"))(batch)
    shift = int(fn is shifting_as_hugging_face)
    correct, z_sum = [0] * (C + 1), [0.0] * (C + 1)
    for b in range(B):
        for t in range(T - shift):
            label, logits = int(batch["labels"][b, t + shift]), logits_of(batch)[b, t].tolist()
            id_ = int(batch["channel"][b, t])
            if label >= 0:
                slot = id_ if 0 <= id_ < C else C
                correct[slot] += max(range(V), key=logits.__getitem__) == label
                z_sum[slot] += (reference.cross_entropy(logits, label) + logits[label]) ** 2
    assert obs["channel", "correct"].dtype == torch.int64
    assert [*obs["channel", "correct"].tolist(), obs["channel", "unattributed_correct"].item()] == correct
    sums = [*obs["channel", "z_sum"].tolist(), obs["channel", "unattributed_z_sum"].item()]
    assert sums == pytest.approx(z_sum, rel=1e-4)


@pytest.mark.parametrize("fn", [unreduced, pair, mean])
def test_bytes_are_those_of_the_labels_that_count(fn):
    batch, token_bytes = make(), torch.arange(V) * 3 + 1
    _, obs = vf.with_channel_loss(fn, C, token_bytes=token_bytes)(batch)
    expected = [0] * (C + 1)
    for label, id_ in zip(
        batch["labels"].flatten().tolist(), batch["channel"].flatten().tolist(), strict=True
    ):
        if label >= 0:
            expected[id_ if 0 <= id_ < C else C] += 3 * label + 1
    assert [*obs["channel", "bytes"].tolist(), obs["channel", "unattributed_bytes"].item()] == expected
    metrics = vf.channel_metrics(obs, ("a", "b", "c"))
    nats = obs["channel", "loss_sum"][0].item()
    assert metrics["channel_bits_per_byte/a"] == pytest.approx(nats / expected[0] / 0.6931472)


def test_weighted_token_losses_have_their_gradients():
    """The gradient of weighted token losses is that of eager PyTorch, weight by weight."""
    batch, weights = make(), torch.arange(B * T).view(B, T)
    plain = (unreduced(batch) * weights).sum()
    loss, _ = vf.with_channel_loss(lambda batch: unreduced(batch) * weights, C, reduction="sum")(batch)
    assert torch.autograd.grad(loss, HEAD)[0].equal(torch.autograd.grad(plain, HEAD)[0])


@pytest.mark.parametrize("order", [*itertools.permutations(("offload", "channel", "router"))], ids="-".join)
@pytest.mark.parametrize("route", ["intercept", "pair"])
def test_composes_with_the_other_transforms_in_every_order(route, order, tmp_path):
    model, batch = subject.make_model().eval(), subject.make_batch()

    def intercept(batch):
        return F.cross_entropy(model(batch["tokens"]).mT, batch["labels"])

    def pair(batch):
        token_loss = F.cross_entropy(model(batch["tokens"]).mT, batch["labels"], reduction="none")
        return intercept(batch), token_loss

    fn = intercept if route == "intercept" else pair
    wraps = {
        "offload": lambda fn: vf.offload(
            fn, vf.policies.everything, model=model, store=vf.DiskStore(tmp_path)
        ),
        "channel": lambda fn: vf.with_channel_loss(fn, subject.CHANNELS),
        "router": lambda fn: vf.monitor_router(fn, model=model),
    }
    loss = intercept(batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    _, expected = vf.with_channel_loss(fn, subject.CHANNELS)(batch)
    objective = fn
    for name in order:
        objective = wraps[name](objective)
    for _ in range(2):
        out, obs = objective(batch)
        assert set(obs.keys()) == {"channel", "router"}
        assert out.equal(loss)
        assert all(map(torch.equal, torch.autograd.grad(out, list(model.parameters())), gradients))
        torch.testing.assert_close(obs["channel"].to_dict(), expected["channel"].to_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("fn", [mean, shifting_as_hugging_face_did, with_reduction, pair])
def test_two_threads_see_their_own_losses(fn):
    batches = [make(seed) for seed in range(4)]
    objective = vf.with_channel_loss(fn, C)
    expected = [objective(batch)[1]["channel"].to_dict() for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for obs, right in zip(
            pool.map(lambda batch: objective(batch)[1], batches * 8), expected * 8, strict=True
        ):
            torch.testing.assert_close(obs["channel"].to_dict(), right, rtol=0, atol=0)


@pytest.mark.parametrize("fn", [mean, shifting_as_hugging_face_did, with_reduction, pair])
def test_works_under_vmap_of_grad(fn):
    batches = [make(seed) for seed in range(3)]
    stacked = {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}
    objective = vf.with_channel_loss(fn, C)

    def loss(hidden, batch):
        return objective(batch | {"hidden": hidden})

    grads, obs = torch.func.vmap(torch.func.grad(loss, has_aux=True))(stacked["hidden"], stacked)
    for m, batch in enumerate(batches):
        hidden = batch["hidden"].clone().requires_grad_()
        out, right = loss(hidden, batch)
        torch.testing.assert_close(grads[m], torch.autograd.grad(out, hidden)[0])
        torch.testing.assert_close({k: v[m] for k, v in obs["channel"].items()}, right["channel"].to_dict())


@pytest.mark.parametrize(  # `linear_cross_entropy` looks at its labels on a CPU, and asserts elsewhere
    ("route", "fn"), [p for p in LOSSES if p.values[1] is not pair]
)
def test_no_route_waits_for_the_device(route, fn):
    objective, batch = vf.with_channel_loss(fn, C), make()
    objective(batch)  # the first call looks closer
    with NoSync():
        objective(batch)


@pytest.mark.parametrize("fn", [mean, unreduced, pair])
def test_an_exception_inside_leaves_nothing_behind(fn):
    fails = True

    def sometimes(batch):
        out = fn(batch)
        if fails:
            raise RuntimeError("boom")
        return out

    objective, batch = vf.with_channel_loss(sometimes, C), make()
    with pytest.raises(RuntimeError, match="boom"):
        objective(batch)
    fails = False
    assert_sums(objective(batch)[1], expected_sums(batch))
    assert torch.overrides._get_current_function_mode_stack() == []


# Losses with an argument `reduction` that are not the mean or sum of what they are with "none".
WEIGHT = torch.rand(V) + 0.1


def scaled(batch, reduction="mean"):
    loss = F.cross_entropy(logits_of(batch).mT, batch["labels"], weight=WEIGHT, reduction=reduction)
    return 0.5 * loss


def with_more(batch, reduction="sum"):
    return with_reduction(batch, reduction) + 1e-3 * logits_of(batch).logsumexp(-1).square().mean()


def mean_of_rows(batch, reduction="mean"):
    token_loss = unreduced(batch)
    return token_loss.sum(1).mean() if reduction == "mean" else token_loss


@pytest.mark.parametrize("fn", [scaled, with_more, mean_of_rows])
def test_what_is_made_of_a_seen_loss_stays_as_it_is(fn):
    batch = make()
    objective = vf.with_channel_loss(fn, C)
    for _ in range(2):
        loss, obs = objective(batch)
        assert loss.equal(fn(batch))
        assert_sums(obs, expected_sums(batch))


def test_a_fused_loss_whose_mean_is_no_mean_of_its_token_losses_is_refused():
    def fn(batch, reduction="mean"):
        return fused(batch, reduction) * (0.5 if reduction == "mean" else 1)

    with pytest.raises(
        ValueError, match=r"with reduction='mean' returned .* but the mean of what.*per_token='pair'"
    ):
        vf.with_channel_loss(fn, C)(make())


def test_a_second_part_that_are_no_losses_is_not_taken_for_them():
    def with_predictions(batch):
        return mean(batch), logits_of(batch).argmax(-1)

    def with_scores(batch):
        return mean(batch), logits_of(batch).amax(-1)

    (loss, _), obs = vf.with_channel_loss(with_predictions, C)(make())
    assert loss.equal(mean(make()))
    assert_sums(obs, expected_sums(make()))
    with pytest.raises(ValueError, match="name per_token='pair'; if not, per_token='intercept'"):
        vf.with_channel_loss(with_scores, C)(make())
    _, obs = vf.with_channel_loss(with_scores, C, per_token="intercept")(make())
    assert_sums(obs, expected_sums(make()))
    with pytest.raises(ValueError, match=r"one loss per label.*of torch.bool"):
        vf.with_channel_loss(lambda batch: logits_of(batch).argmax(-1) == batch["labels"], C)(make())


def linear_inside(batch):
    return 2 * pair(batch)[0]


def test_linear_cross_entropy_is_seen_inside_of_a_loss():
    batch = make()
    loss, obs = vf.with_channel_loss(linear_inside, C)(batch)
    assert loss.equal(linear_inside(batch))
    assert_sums(obs, expected_sums(batch))
    with pytest.raises(ValueError, match=r"must call F\.cross_entropy once.*it did 2 times"):
        vf.with_channel_loss(lambda batch: linear_inside(batch) + mean(batch), C)(batch)


def test_extras_of_losses_in_another_order_are_refused():
    batch = make() | {"labels": torch.randint(V, (B, B)), "hidden": torch.randn(B, B, D)}
    batch["channel"] = torch.zeros(B, dtype=torch.int64)

    def time_first(batch):
        labels = batch["labels"].T
        return F.cross_entropy(logits_of(batch).transpose(0, 1).mT, labels, reduction="none").T

    with pytest.raises(ValueError, match="token losses are not as that call returned them"):
        vf.with_channel_loss(time_first, C, extras=("correct",))(batch)


def test_extras_of_reshaped_losses():
    def reshaped(batch):
        return flat_unreduced(batch).view(B, T)

    def shifted(batch):
        logits, labels = logits_of(batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits, labels, reduction="none").view(B, T - 1)

    for fn, plain in ((reshaped, unreduced), (shifted, shifting_unreduced)):
        sums = [vf.with_channel_loss(f, C, extras=("correct", "z_sum"))(make())[1] for f in (fn, plain)]
        torch.testing.assert_close(*(obs["channel"].to_dict() for obs in sums))


def test_z_is_exact_where_the_label_is_masked_out():
    logits = torch.tensor([[-1e8, 1.0, 2.0], [float("-inf"), 1.0, 2.0]])
    labels, ids = torch.tensor([0, 0]), torch.tensor([0, 1])
    objective = vf.with_channel_loss(F.cross_entropy, 2, extras=("z_sum",))
    _, obs = objective(logits, labels, channel=ids)
    expected = torch.tensor([1.0, 2.0]).logsumexp(0).square()
    torch.testing.assert_close(obs["channel", "z_sum"], expected.expand(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("fn", [unreduced, pair])
def test_labels_of_every_integer_dtype_mean_what_they_say(fn, dtype):
    batch = make()
    batch["labels"] = batch["labels"].clamp(min=0)
    _, expected = vf.with_channel_loss(fn, C, token_bytes=torch.arange(V))(batch)
    narrow = batch["labels"].to(dtype)

    def of_narrow(batch):
        return fn(batch | {"labels": batch["labels"].long()}) if fn is unreduced else fn(batch)

    _, obs = vf.with_channel_loss(of_narrow, C, token_bytes=torch.arange(V))(batch | {"labels": narrow})
    torch.testing.assert_close(obs["channel"].to_dict(), expected["channel"].to_dict())
    ones, nobody = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    assert vf.channel_sums(ones, torch.tensor([156, 1, 2], dtype=torch.uint8), nobody, 1)["token_count"] == 3


class Doubling(torch.Tensor):
    """A tensor that makes losses in its own way."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return 2 * out if func is F.cross_entropy else out


def test_tensors_that_make_losses_in_their_own_way_are_left_alone():
    logits, labels = torch.randn(4, V).as_subclass(Doubling), torch.randint(V, (4,))
    with pytest.raises(ValueError, match="once for its token losses to be seen, it did 0 times"):
        vf.with_channel_loss(F.cross_entropy, C, per_token="intercept")(
            logits, labels, channel=torch.zeros(4, dtype=torch.int64)
        )


def test_a_loss_of_picked_tokens_needs_ids_that_are_picked_as_they_are():
    batch = make()
    kept = torch.ones(B, T, dtype=torch.bool)
    kept[0, :B] = False  # as many as there are rows

    def picked(batch):
        return F.cross_entropy(logits_of(batch)[kept], batch["labels"][kept])

    for options in ({}, {"per_token": "intercept"}):
        with pytest.raises(ValueError, match="as many as if it left out the first of each row, but others"):
            vf.with_channel_loss(picked, C, **options)(batch)
    _, obs = vf.with_channel_loss(picked, C)(batch, channel=batch["channel"][kept])
    _, expected = vf.with_channel_loss(mean, C)(batch | {"labels": batch["labels"].masked_fill(~kept, -100)})
    torch.testing.assert_close(obs["channel"].to_dict(), expected["channel"].to_dict())


class Plain(nn.Module):
    """As Hugging Face's models: takes no ids, and passes on what it does not know."""

    def __init__(self):
        super().__init__()
        self.model = subject.make_model().eval()

    def forward(self, input_ids, labels, **kwargs):
        assert not kwargs
        return F.cross_entropy(self.model(input_ids).mT, labels)


@pytest.mark.parametrize("inner", ["channel", "router"])
def test_ids_by_keyword_reach_every_transform_and_not_the_model(inner):
    batch, model = subject.make_batch(), Plain()
    wraps = {
        "channel": lambda fn: vf.with_channel_loss(fn, subject.CHANNELS, channel_key="source"),
        "router": lambda fn: vf.monitor_router(
            fn, model=model, by_channel="source", channels=subject.CHANNELS, mask="keep"
        ),
    }
    (outer,) = {*wraps} - {inner}
    keep = batch["labels"] != -100
    objective = wraps[outer](vf.offload(wraps[inner](model), vf.policies.nothing))
    for _ in range(2):
        _, obs = objective(
            input_ids=batch["tokens"], labels=batch["labels"], source=batch["channel"], keep=keep
        )
        assert obs["channel", "token_count"].sum() > 0
        assert obs["router", "tokens"].tolist() == [int(keep.sum())] * 2
