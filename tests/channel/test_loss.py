"""`with_channel_loss` and `channel_sums` against plain loops over tokens."""

import functools
import math
import threading

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from tensordict import TensorDict

import veofunc as vf
from tests import reference
from tests.no_sync import NoSync

NAMES = ("python", "legal", "manual")
V, D = 11, 5  # vocabulary, width
FEW = settings(max_examples=25, derandomize=True, database=None, deadline=None)


def make_batch(seed=0, shape=(3, 7)):
    """Inputs, labels of which about a quarter do not count, and ids of which some are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < 0.25
    return {
        "x": torch.randn(*shape, D, generator=generator),
        "labels": torch.where(ignored, -100, labels),
        "channel": torch.randint(-1, len(NAMES) + 1, shape, generator=generator),
    }


def make_params(seed=0):
    return {"w": torch.randn(D, V, generator=torch.Generator().manual_seed(seed))}


def token_loss(params, batch):
    logits = batch["x"] @ params["w"]  # [B, T, V]
    return F.cross_entropy(logits.mT, batch["labels"], reduction="none")  # [B, T]


def given_loss(batch, *others):
    """For batches that carry their token losses."""
    return batch["loss"]


def expected_sums(loss, labels, channel, num_channels, ignore_index=-100):
    flat = (tensor.detach().reshape(-1).tolist() for tensor in (loss, labels, channel))
    return reference.channel_sums(*flat, num_channels, ignore_index)


def assert_sums(sums, expected, **tolerance):
    assert set(sums.keys()) == set(expected)
    for name, value in expected.items():
        if name.endswith("count"):
            assert sums[name].dtype == torch.int64
            assert sums[name].tolist() == value, name
        else:
            right = torch.tensor(value, dtype=sums[name].dtype)
            torch.testing.assert_close(sums[name], right, **tolerance)


def assert_equal_obs(a, b):
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key in a.keys(True, True):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, equal_nan=True)


@st.composite
def packings(draw):
    shape = draw(st.tuples(st.integers(1, 3), st.integers(0, 6)))
    num_channels = draw(st.integers(1, 4))
    num_tokens = shape[0] * shape[1]

    def tokens(elements, dtype):
        values = draw(st.lists(elements, min_size=num_tokens, max_size=num_tokens))
        return torch.tensor(values, dtype=dtype).view(shape)

    loss = tokens(st.floats(-8, 8, width=32), torch.float32)
    labels = tokens(st.sampled_from([-100, 0, 1, 5]), torch.int64)
    channel = tokens(st.integers(-2, num_channels + 1), torch.int64)
    return loss, labels, channel, num_channels


@FEW
@given(packings())
def test_sums_equal_a_loop_over_tokens(packing):
    assert_sums(vf.channel_sums(*packing), expected_sums(*packing))


@FEW
@given(packings(), st.integers(0, 6))
def test_sums_of_two_parts_add_up_to_the_whole(packing, cut):
    loss, labels, channel, num_channels = packing
    parts = [
        vf.channel_sums(loss[:, part], labels[:, part], channel[:, part], num_channels)
        for part in (slice(None, cut), slice(cut, None))
    ]
    expected = expected_sums(*packing)
    for total in (parts[0] + parts[1], sum(parts)):
        assert_sums(total, expected)


@FEW
@given(packings())
def test_wrapped_loss_observes_the_same_sums(packing):
    loss, labels, channel, num_channels = packing
    batch = {"loss": loss, "labels": labels, "channel": channel}
    total, obs = vf.with_channel_loss(given_loss, num_channels, reduction="sum")(batch)
    expected = expected_sums(*packing)
    assert_sums(obs["channel"], expected)
    everything = sum(expected["loss_sum"]) + expected["unattributed_loss_sum"]
    torch.testing.assert_close(total, torch.tensor(everything))


def test_counts_stay_exact_beyond_what_float32_can_hold():
    one = vf.channel_sums(torch.ones(3), torch.ones(3).long(), torch.tensor([0, 0, -1]), 1)
    total = one
    for _ in range(30):
        total = total + total
    total = total + one
    assert total["token_count"].tolist() == [2**31 + 2]
    assert total["unattributed_token_count"].item() == 2**30 + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_or_wider_whatever_the_losses_are(dtype):
    num_tokens = 4096  # the sum of so many in bfloat16 would stop at 2048
    loss = torch.full((num_tokens,), 10.1).to(dtype)
    sums = vf.channel_sums(loss, torch.ones(num_tokens).long(), torch.arange(num_tokens) % 2, 2)
    assert sums["loss_sum"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = loss[0].double() * num_tokens / 2
    torch.testing.assert_close(sums["loss_sum"].double(), exact.expand(2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mean_of_half_precision_losses_does_not_overflow(dtype):
    num_tokens = 8192  # 8192 * 16 is more than float16 can hold
    batch = {"loss": torch.full((num_tokens,), 16.0, dtype=dtype), "labels": torch.ones(num_tokens).long()}
    loss, _ = vf.with_channel_loss(given_loss, 1)(batch, channel=torch.zeros(num_tokens).long())
    assert loss.item() == 16.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_channel_s_inf_or_nan_touches_no_other(bad):
    loss = torch.tensor([1.0, bad, 2.0, 4.0])
    sums = vf.channel_sums(loss, torch.ones(4).long(), torch.tensor([0, 1, 2, -1]), 3)
    assert_sums(
        sums,
        {
            "loss_sum": [1.0, bad, 2.0],
            "token_count": [1, 1, 1],
            "unattributed_loss_sum": 4.0,
            "unattributed_token_count": 1,
        },
        equal_nan=True,
    )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_an_ignored_label_has_as_loss_touches_nothing(bad, reduction):
    loss = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    batch = {"loss": loss, "labels": torch.tensor([4, -100, 4]), "channel": torch.tensor([0, 0, 1])}
    total, obs = vf.with_channel_loss(given_loss, 2, reduction=reduction)(batch)
    total.backward()
    assert total.item() == (2.0 if reduction == "mean" else 4.0)
    assert obs["channel", "loss_sum"].tolist() == [1.0, 3.0]
    assert loss.grad.tolist() == ([0.5, 0.0, 0.5] if reduction == "mean" else [1.0, 0.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_ids_outside_of_the_channels_are_unattributed_in_every_integer_dtype(dtype):
    ids = torch.tensor([0, 1, 2, 100, -1]).to(dtype)  # -1 is 255 in uint8
    loss = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    sums = vf.channel_sums(loss, torch.ones(5).long(), ids, 2)
    assert sums["loss_sum"].tolist() == [1.0, 2.0]
    assert sums["unattributed_loss_sum"].item() == 28.0
    assert sums["unattributed_token_count"].item() == 3


def test_one_id_per_row_counts_for_every_token_of_the_row():
    batch = make_batch() | {"channel": torch.tensor([2, -1, 0])}
    _, obs = vf.with_channel_loss(functools.partial(token_loss, make_params()), NAMES)(batch)
    channel = torch.tensor([[2], [-1], [0]]).expand(3, 7)
    loss = token_loss(make_params(), batch)
    assert_sums(obs["channel"], expected_sums(loss, batch["labels"], channel, 3))


def test_ids_as_a_keyword_take_precedence_over_the_batch_s():
    batch = make_batch()
    wrapped = vf.with_channel_loss(functools.partial(token_loss, make_params()), NAMES)
    other = batch["channel"].flip(0)
    expected = expected_sums(token_loss(make_params(), batch), batch["labels"], other, 3)
    assert_sums(wrapped(batch, channel=other)[1]["channel"], expected)
    del batch["channel"]
    assert_sums(wrapped(batch, channel=other)[1]["channel"], expected)


def test_keys_and_ignore_index_are_options():
    batch = {"loss": torch.tensor([1.0, 2.0]), "y": torch.tensor([7, 0]), "source": torch.tensor([0, 0])}
    wrapped = vf.with_channel_loss(given_loss, 1, label_key="y", channel_key="source", ignore_index=0)
    loss, obs = wrapped(batch)
    assert loss.item() == 1.0
    assert obs["channel", "token_count"].tolist() == [1]


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_finds_the_batch_beside_a_mapping_of_parameters(kind, keyword):
    params, batch = kind(make_params()), kind(make_batch())
    wrapped = vf.with_channel_loss(token_loss, NAMES)
    _, obs = wrapped(params, batch=batch) if keyword else wrapped(params, batch)
    loss = token_loss(make_params(), make_batch())
    assert_sums(obs["channel"], expected_sums(loss, batch["labels"], batch["channel"], 3))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(3, 7), (21,), (2, 3, 4)])
def test_loss_and_gradient_are_those_of_cross_entropy(reduction, shape):
    batch = make_batch(shape=shape)
    w = make_params()["w"].requires_grad_()
    logits = (batch["x"] @ w).view(-1, V)
    expected = F.cross_entropy(logits, batch["labels"].view(-1), reduction=reduction)
    (expected_grad,) = torch.autograd.grad(expected, w)

    def loss_fn(batch):
        logits = (batch["x"] @ w).view(-1, V)
        return F.cross_entropy(logits, batch["labels"].view(-1), reduction="none").view(shape)

    loss, _ = vf.with_channel_loss(loss_fn, NAMES, reduction=reduction)(batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, w)[0], expected_grad)


def test_sums_equal_a_softmax_in_plain_python():
    params, batch = make_params(), make_batch()
    _, obs = vf.with_channel_loss(token_loss, NAMES)(params, batch)
    logits = (batch["x"] @ params["w"]).view(-1, V).tolist()
    labels = batch["labels"].view(-1).tolist()
    loss = [0.0 if y < 0 else reference.cross_entropy(x, y) for x, y in zip(logits, labels, strict=True)]
    expected = reference.channel_sums(loss, labels, batch["channel"].view(-1).tolist(), 3)
    assert_sums(obs["channel"], expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_labels_ignored_gives_zero_sums_and_finite_zero_gradients(reduction):
    batch = make_batch() | {"labels": torch.full((3, 7), -100)}
    w = make_params()["w"].requires_grad_()
    loss, obs = vf.with_channel_loss(token_loss, NAMES, reduction=reduction)({"w": w}, batch)
    by_torch = F.cross_entropy((batch["x"] @ w).mT, batch["labels"], reduction=reduction)
    torch.testing.assert_close(loss, by_torch, equal_nan=True)
    assert loss.isnan() == (reduction == "mean")
    assert loss.requires_grad
    loss.backward()
    assert (w.grad == 0).all()
    assert all((leaf == 0).all() for leaf in obs["channel"].values())


def test_a_micro_batch_without_labels_changes_no_sum():
    wrapped = vf.with_channel_loss(functools.partial(token_loss, make_params()), NAMES)
    _, obs = wrapped(make_batch())
    _, nothing = wrapped(make_batch() | {"labels": torch.full((3, 7), -100)})
    assert_equal_obs(obs + nothing, obs)


def test_micro_batches_of_different_size_give_the_mean_over_tokens():
    batches = [
        {"loss": torch.full((n,), mean), "labels": torch.ones(n).long(), "channel": torch.zeros(n).long()}
        for n, mean in ((1, 2.0), (9, 10.0))
    ]
    wrapped = vf.with_channel_loss(given_loss, 1)
    sums = sum(wrapped(batch)[1] for batch in batches)["channel"]
    assert sums["loss_sum"].item() / sums["token_count"].item() == pytest.approx(9.2)


def test_leaves_share_no_storage_with_each_other_or_the_batch():
    batch = make_batch() | {"loss": torch.rand(3, 7)}
    _, obs = vf.with_channel_loss(given_loss, NAMES)(batch)
    tensors = [*obs["channel"].values(), *batch.values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_observations_are_detached_and_keep_no_graph():
    w = make_params()["w"].requires_grad_()
    _, obs = vf.with_channel_loss(token_loss, NAMES)({"w": w}, make_batch())
    assert not any(leaf.requires_grad for leaf in obs["channel"].values())


def test_arguments_stay_as_they_were():
    batch, ids = make_batch(), torch.zeros(3).int()
    before = {name: tensor.clone() for name, tensor in batch.items()}
    vf.with_channel_loss(functools.partial(token_loss, make_params()), NAMES)(batch, channel=ids)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[name], before[name]) for name in before)
    assert ids.tolist() == [0, 0, 0]


def functional_expectation(params, batch):
    """(gradient, loss, sums), without a transform."""
    w = params["w"].clone().requires_grad_()
    losses = token_loss({"w": w}, batch)
    loss = F.cross_entropy((batch["x"] @ w).mT, batch["labels"])
    loss.backward()
    return w.grad, loss.detach(), expected_sums(losses, batch["labels"], batch["channel"], 3)


@pytest.mark.parametrize("grad_and_value", [torch.func.grad_and_value, vf.grad_and_value])
def test_works_under_grad_and_value(grad_and_value):
    params, batch = make_params(), make_batch()
    wrapped = vf.with_channel_loss(token_loss, NAMES)
    grads, (loss, obs) = grad_and_value(wrapped, has_aux=True)(params, batch)
    expected_grad, expected_loss, expected = functional_expectation(params, batch)
    torch.testing.assert_close(grads["w"], expected_grad)
    torch.testing.assert_close(loss, expected_loss)
    assert_sums(obs["channel"], expected)
    assert not any(leaf.requires_grad for leaf in obs["channel"].values())
    assert all(torch._C._functorch.maybe_get_level(leaf) == -1 for leaf in obs["channel"].values())


@pytest.mark.parametrize("rows", [False, True])
def test_works_under_vmap_of_grad(rows):
    params = make_params()
    batches = [make_batch(seed) for seed in range(3)]
    stacked = {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}
    if rows:
        stacked["channel"] = stacked["channel"][:, :, 0]
        batches = [batch | {"channel": batch["channel"][:, :1].expand(3, 7)} for batch in batches]
    wrapped = vf.with_channel_loss(token_loss, NAMES)
    per_batch = torch.func.vmap(torch.func.grad(wrapped, has_aux=True), in_dims=(None, 0))
    grads, obs = per_batch(params, stacked)
    for m, batch in enumerate(batches):
        expected_grad, _, expected = functional_expectation(params, batch)
        torch.testing.assert_close(grads["w"][m], expected_grad)
        assert_sums({name: leaf[m] for name, leaf in obs["channel"].items()}, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiles_without_a_graph_break():
    wrapped = vf.with_channel_loss(token_loss, NAMES)
    compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
    w = make_params()["w"].requires_grad_()
    for seed in (0, 1):
        batch = make_batch(seed)
        loss, obs = compiled({"w": w}, batch)
        expected_grad, expected_loss, expected = functional_expectation({"w": w.detach()}, batch)
        torch.testing.assert_close(loss.detach(), expected_loss)
        torch.testing.assert_close(torch.autograd.grad(loss, w)[0], expected_grad)
        assert_sums(obs["channel"], expected)


@pytest.mark.parametrize("rows", [False, True])
def test_never_waits_for_the_device(rows):
    batch = make_batch()
    channel = batch.pop("channel")[:, 0] if rows else batch.pop("channel")
    w = make_params()["w"].requires_grad_()
    wrapped = vf.with_channel_loss(token_loss, NAMES)
    with NoSync():
        loss, obs = wrapped({"w": w}, batch, channel=channel)
        loss.backward()
        _ = obs + obs
        with pytest.raises(AssertionError, match="waits"):  # the check can fail
            loss.item()


def test_aux_of_the_user_comes_first_and_is_detached():
    def loss_fn(batch):
        losses = batch["loss"] * batch["loss"].new_ones((), requires_grad=True)
        return losses, {"z": losses.square().sum()}

    batch = make_batch() | {"loss": torch.rand(3, 7)}
    loss, obs = vf.with_channel_loss(loss_fn, NAMES, has_aux=True)(batch)
    assert list(obs.keys()) == ["z", "channel"]
    assert loss.requires_grad and not obs["z"].requires_grad
    torch.testing.assert_close(obs["z"], batch["loss"].square().sum())
    assert_sums(obs["channel"], expected_sums(batch["loss"], batch["labels"], batch["channel"], 3))


def test_a_name_in_obs_is_never_written_twice():
    wrapped = vf.with_channel_loss(given_loss, NAMES)
    with pytest.raises(ValueError, match=r"obs\['channel'\] is written twice.*once, or rename"):
        vf.with_channel_loss(wrapped, NAMES)

    def loss_fn(batch):
        return batch["loss"], {"channel": torch.ones(())}

    with pytest.raises(ValueError, match=r"obs\['channel'\] is written twice.*once, or rename"):
        vf.with_channel_loss(loss_fn, NAMES, has_aux=True)(make_batch() | {"loss": torch.rand(3, 7)})


@pytest.mark.parametrize(
    ("channels", "names"),
    [(3, ("0", "1", "2")), (NAMES, NAMES), (list(NAMES), NAMES), (("train/a", "train_a"),) * 2],
)
def test_channels_are_names_or_a_number(channels, names):
    assert vf.with_channel_loss(given_loss, channels).channels == names


def test_sixty_four_numbered_channels_unless_told_otherwise():
    assert vf.with_channel_loss(given_loss).channels == tuple(str(c) for c in range(64))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channels": 0}, ValueError, "channels must be a number from 1 to 1048576, got 0"),
        ({"channels": -3}, ValueError, "channels must be a number from 1 to 1048576, got -3"),
        ({"channels": True}, TypeError, "channels must be a tuple of non-empty names or a number, got True"),
        ({"channels": 2.0}, TypeError, "channels must be a tuple of non-empty names or a number, got 2.0"),
        ({"channels": None}, TypeError, "channels must be a tuple of non-empty names or a number, got None"),
        ({"channels": "python"}, TypeError, "channels must be a tuple of non-empty names.*got 'python'"),
        ({"channels": ("a", "")}, TypeError, r"non-empty names.*got \('a', ''\)"),
        ({"channels": ("a", 1)}, TypeError, r"non-empty names.*got \('a', 1\)"),
        ({"channels": ()}, ValueError, r"channels must be one or more different names, got \(\)"),
        ({"channels": ("a", "a")}, ValueError, r"one or more different names, got \('a', 'a'\)"),
        ({"reduction": "none"}, ValueError, "reduction must be one of mean, sum, got 'none'"),
    ],
)
def test_wrong_option_is_refused_when_the_transform_is_made(options, error, message):
    with pytest.raises(error, match=message):
        vf.with_channel_loss(given_loss, **options)


def test_what_is_wrapped_must_be_callable():
    with pytest.raises(TypeError, match=r"fn must be callable.*got Tensor"):
        vf.with_channel_loss(torch.ones(3))


GOOD = {"loss": torch.rand(2, 3), "labels": torch.ones(2, 3).long(), "channel": torch.zeros(2, 3).long()}


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((GOOD["loss"],), ValueError, r"exactly one argument must be .*'labels'.*found 0.*\['batch'"),
        (({"loss": 1},), ValueError, r"exactly one argument must be .*'labels'.*found 0.*\['loss'\]"),
        ((GOOD, GOOD), ValueError, "exactly one argument must be .*'labels'.*found 2"),
        (
            ({"loss": 1, "labels": GOOD["labels"]},),
            ValueError,
            r"the batch has no 'channel'.*one per token or row, or pass channel=.*\['labels', 'loss'\]",
        ),
        (
            (GOOD | {"channel": torch.zeros(2, 4).long()},),
            ValueError,
            r"channel must have shape \[2, 3\] or \[2\], got \[2, 4\]; ids are one per label or one per row",
        ),
        (
            (GOOD | {"channel": torch.zeros(3).long()},),
            ValueError,
            r"channel must have shape \[2, 3\] or \[2\], got \[3\]",
        ),
        (
            (GOOD | {"channel": torch.zeros(2, 3)},),
            TypeError,
            "channel must be an integer tensor, got .*float32",
        ),
        (
            (GOOD | {"channel": torch.ones(2) > 0},),
            TypeError,
            "channel must be an integer tensor, got .*bool",
        ),
        ((GOOD | {"channel": [0, 1]},), TypeError, "channel must be an integer tensor, got list"),
        (
            (GOOD | {"loss": torch.rand(2, 1)},),
            ValueError,
            r'given_loss must return one loss per label, shape \[2, 3\], got \[2, 1\].*reduction="none"',
        ),
        ((GOOD | {"loss": torch.rand(())},), ValueError, r"one loss per label.*got \[\]"),
        ((GOOD | {"loss": 3.0},), TypeError, "one loss per token, got float"),
        ((GOOD | {"loss": (GOOD["loss"], {})},), TypeError, "got tuple.*pass has_aux=True"),
    ],
)
def test_wrong_call_is_refused_with_what_to_do(args, error, message):
    with pytest.raises(error, match=message):
        vf.with_channel_loss(given_loss, 2)(*args)


def test_without_aux_has_aux_is_refused():
    with pytest.raises(
        TypeError, match=r"has_aux=True says that given_loss returns \(out, aux\), got Tensor"
    ):
        vf.with_channel_loss(given_loss, 2, has_aux=True)(GOOD)
    with pytest.raises(TypeError, match=r"aux of given_loss must be a TensorDict or a mapping.*got float"):
        vf.with_channel_loss(given_loss, 2, has_aux=True)(GOOD | {"loss": (GOOD["loss"], 1.0)})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_channels": 0}, ValueError, "num_channels must be at least 1, got 0"),
        ({"token_loss": torch.ones(4)}, ValueError, r"must have the labels' shape \[3\], got \[4\]"),
        ({"channel": torch.ones(3)}, TypeError, "channel must be an integer tensor, got torch.float32"),
        ({"channel": torch.ones(2).long()}, ValueError, r"channel must have shape \[3\].*got \[2\]"),
    ],
)
def test_wrong_argument_of_channel_sums_is_refused(changed, error, message):
    ones = torch.ones(3)
    right = {"token_loss": ones, "labels": ones.long(), "channel": ones.long(), "num_channels": 2}
    with pytest.raises(error, match=message):
        vf.channel_sums(**(right | changed))


def test_an_exception_leaves_the_next_call_as_if_nothing_had_happened():
    def loss_fn(batch):
        if batch.get("fail"):
            raise RuntimeError("out of memory")
        return batch["loss"]

    wrapped = vf.with_channel_loss(loss_fn, 2)
    _, before = wrapped(GOOD)
    with pytest.raises(RuntimeError, match="out of memory"):
        wrapped(GOOD | {"fail": True})
    assert_equal_obs(wrapped(GOOD)[1], before)


def test_two_threads_observe_their_own_batches():
    batches = [make_batch(seed) for seed in range(4)]
    wrapped = vf.with_channel_loss(token_loss, NAMES)
    params = make_params()
    expected = [wrapped(params, batch)[1] for batch in batches]
    results = {}

    def work(mine):
        results[mine] = [[wrapped(params, batches[i])[1] for i in mine] for _ in range(20)]

    threads = [threading.Thread(target=work, args=(mine,)) for mine in ((0, 1), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, rounds in results.items():
        for observed in rounds:
            for i, obs in zip(mine, observed, strict=True):
                assert_equal_obs(obs, expected[i])
    assert len(results) == 2


def test_the_batch_may_be_the_keyword_arguments():
    labels, channel = torch.tensor([[1, 2, -100]]), torch.tensor([[0, 1, 1]])
    losses = torch.tensor([[1.0, 2.0, 4.0]])

    def loss_fn(*, losses, labels):
        return losses * (labels > 0)

    _, obs = vf.with_channel_loss(loss_fn, 2)(losses=losses, labels=labels, channel=channel)
    assert obs["channel", "loss_sum"].tolist() == [1.0, 2.0]


def test_equal_losses_do_not_drift():
    num_tokens = 1 << 17
    losses, ones = torch.full((num_tokens,), 0.1), torch.ones(num_tokens).long()
    sums = vf.channel_sums(losses, ones, ones * 0, 1)
    assert sums["loss_sum"].dtype == torch.float32
    assert sums["loss_sum"].item() == pytest.approx(0.1 * num_tokens, rel=1e-6)


class ChannelLoss(torch.nn.Module):
    def forward(self, batch, channel):
        return channel.float()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: module,
        lambda module: module.forward,
        lambda module: functools.partial(module),
        lambda module: vf.offload(module, vf.policies.nothing),
        lambda module: vf.offload(functools.partial(module.forward), vf.policies.nothing),
        lambda module: torch.compile(module, backend="eager"),
        lambda module: torch.nn.DataParallel(module),
    ],
    ids=["module", "method", "partial", "transform", "transform of partial", "compiled", "parallel"],
)
def test_a_loss_with_a_channel_argument_of_its_own_gets_it(wrap):
    labels, ids = torch.ones(1, 3).long(), torch.tensor([[0, 1, 1]])
    loss, obs = vf.with_channel_loss(wrap(ChannelLoss()), 2)({"labels": labels}, channel=ids)
    assert loss == pytest.approx(2 / 3)
    assert obs["channel", "loss_sum"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("ignore_index", [None, 1.5, "x", True])
def test_ignore_index_must_be_an_int(ignore_index):
    with pytest.raises(TypeError, match="ignore_index must be an int"):
        vf.with_channel_loss(lambda batch: batch, 2, ignore_index=ignore_index)


def test_complex_ids_and_absurd_numbers_of_channels_are_refused():
    with pytest.raises(TypeError, match=r"channel must be an integer tensor, got torch\.complex64"):
        vf.channel_sums(torch.ones(2), torch.ones(2).long(), torch.ones(2, dtype=torch.complex64), 2)
    with pytest.raises(ValueError, match="channels must be a number from 1 to 1048576"):
        vf.with_channel_loss(lambda batch: batch, 10**12)


@pytest.mark.parametrize("option", ["channel_key", "label_key"])
def test_keys_must_be_names(option):
    with pytest.raises(TypeError, match=f"{option} must be a str"):
        vf.with_channel_loss(lambda batch: batch, 2, **{option: 3})


def test_labels_must_be_a_tensor():
    with pytest.raises(TypeError, match="the labels must be a tensor, got list"):
        vf.with_channel_loss(lambda batch: torch.ones(2), 2)(
            {"labels": [1, 2], "channel": torch.zeros(2).long()}
        )
