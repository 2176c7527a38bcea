"""The cases of cases.json: batches that other implementations got right or wrong, with exact results."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn

import veofunc as vf
from tests import reference
from veofunc import packing

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())
CALLS = {case["id"]: case for case in CASES["calls"]}


def cases(group):
    return pytest.mark.parametrize("case", CASES[group], ids=lambda case: case["id"])


def tensor(values):
    return None if values is None else torch.tensor(values)


def by_source(sums, names):
    """The sums as the cases give them: source to its loss sum and token count."""
    losses, counts = sums["loss_sum"].tolist(), sums["token_count"].tolist()
    return {
        str(name): {"loss_sum": loss, "token_count": count}
        for name, loss, count in zip(names, losses, counts, strict=True)
    }


def assert_by_source(sums, names, expected):
    got = by_source(sums, names)
    assert got.keys() == expected.keys()
    for name, right in expected.items():
        assert got[name]["token_count"] == right["token_count"], name
        assert got[name]["loss_sum"] == pytest.approx(right["loss_sum"], rel=1e-5), name
    assert sums["unattributed_token_count"].item() == 0
    assert sums["unattributed_loss_sum"].item() == 0


def made_of(sources):
    """Names of the channels, and the channel of every document."""
    names = list(dict.fromkeys(sources))
    return names, torch.tensor([names.index(source) for source in sources])


def observed(loss, labels, channel, num_channels):
    """What the transform observes of these token losses."""
    batch = {"loss": loss.float(), "labels": labels, "channel": channel}
    return vf.with_channel_loss(lambda batch: batch["loss"], num_channels)(batch)[1]["channel"]


@cases("tokens")
def test_ids_per_token_give_the_sums(case):
    inputs = case["inputs"]
    names, _ = made_of(inputs["sources"])
    numbers = [[-1 if name is None else names.index(name) for name in row] for row in inputs["channel"]]
    sums = observed(tensor(inputs["loss"]), tensor(inputs["labels"]), tensor(numbers), len(names))
    assert_by_source(sums, names, case["expected"])


@cases("tokens")
def test_documents_and_their_sources_give_the_sums(case):
    inputs = case["inputs"]
    names, source = made_of(inputs["sources"])
    labels, mask = tensor(inputs["labels"]), tensor(inputs.get("mask"))
    if inputs["position_ids"] is None:
        channel = source.expand(len(labels))  # one document per row
    else:
        positions = tensor(inputs["position_ids"])
        channel = packing.channel_ids(source, position_ids=positions, mask=mask, labels=labels)
    sums = observed(tensor(inputs["loss"]), labels, channel, len(names))
    assert_by_source(sums, names, case["expected"])


@cases("tokens")
def test_rows_one_at_a_time_give_the_same_sums(case):
    """Micro-batches: the ids are made once and cut with the tokens."""
    inputs = case["inputs"]
    names, _ = made_of(inputs["sources"])
    total = 0
    for loss, labels, row in zip(inputs["loss"], inputs["labels"], inputs["channel"], strict=True):
        ids = tensor([-1 if name is None else names.index(name) for name in row])
        total = total + observed(tensor(loss), tensor(labels), ids, len(names))
    assert_by_source(total, names, case["expected"])


@cases("errors")
def test_sources_that_do_not_fit_are_refused_with_both_counts(case):
    inputs, expected = case["inputs"], case["expected"]
    _, source = made_of(inputs["sources"])
    message = f"found {expected['documents']} documents, got {expected['sources']} sources"
    for labels in (None, tensor(inputs["labels"])):
        with pytest.raises(ValueError, match=message):
            packing.channel_ids(source, position_ids=tensor(inputs["position_ids"]), labels=labels)


def formula(b, s, v):
    return ((5 * b + 7 * s + 3 * v) % 11) / 4 - 1


def logits_like(labels, vocabulary):
    rows, length = labels.shape
    values = [[[formula(b, s, v) for v in range(vocabulary)] for s in range(length)] for b in range(rows)]
    return torch.tensor(values, dtype=torch.float64)


def shifted_batch(inputs):
    """(labels, channel, number of channels) of labels that are not shifted yet, or are already."""
    names, source = made_of(inputs["sources"])
    positions = tensor(inputs["position_ids"])
    channel = packing.channel_ids(source, position_ids=positions, mask=tensor(inputs.get("mask")))
    labels = packing.next_token(tensor(inputs["labels"]), packing.document_ids(positions))
    return tensor(inputs.get("shifted_labels", labels.tolist())), channel, names


@cases("shifted")
def test_labels_shift_within_their_document_and_row(case):
    labels, channel, names = shifted_batch(case["inputs"])
    logits = logits_like(labels, case["inputs"]["vocabulary"])

    def loss_fn(batch):
        return F.cross_entropy(batch["logits"].mT, batch["labels"], reduction="none")

    batch = {"logits": logits, "labels": labels, "channel": channel}
    _, obs = vf.with_channel_loss(loss_fn, len(names))(batch)
    assert_by_source(obs["channel"], names, case["expected"])


@cases("shifted")
def test_the_expected_losses_are_those_of_a_softmax_in_plain_python(case):
    labels, channel, names = shifted_batch(case["inputs"])
    flat = logits_like(labels, case["inputs"]["vocabulary"]).flatten(0, 1).tolist()
    targets = labels.flatten().tolist()
    loss = [0.0 if y == -100 else reference.cross_entropy(x, y) for x, y in zip(flat, targets, strict=True)]
    sums = reference.channel_sums(loss, targets, channel.flatten().tolist(), len(names))
    for c, name in enumerate(names):
        assert sums["token_count"][c] == case["expected"][str(name)]["token_count"]
        assert sums["loss_sum"][c] == pytest.approx(case["expected"][str(name)]["loss_sum"], rel=1e-5)


@cases("shards")
def test_ids_cut_with_the_tokens_add_up_over_sequence_parallel_ranks(case):
    names, source = made_of(case["inputs"]["sources"])
    shards = []
    for shard in case["inputs"]["shards"]:
        rows = shard.get("rows", 1)
        shape = (rows, len(shard["loss"]) // rows)
        shards.append(
            {
                "loss": torch.tensor(shard["loss"], dtype=torch.float32).view(shape),
                "labels": torch.tensor(shard["targets"], dtype=torch.int64).view(shape),
                "positions": torch.tensor(shard["positions"], dtype=torch.int64).view(shape),
                "mask": torch.tensor(shard.get("mask", [1] * len(shard["loss"]))).view(shape),
            }
        )
    labels, positions, mask = (
        torch.cat([s[name] for s in shards], 1) for name in ("labels", "positions", "mask")
    )
    channel = packing.channel_ids(source, position_ids=positions, mask=mask, labels=labels)
    ids = channel.split([shard["loss"].shape[1] for shard in shards], dim=1)
    total = sum(
        observed(shard["loss"], shard["labels"], mine, len(names))
        for shard, mine in zip(shards, ids, strict=True)
    )
    assert_by_source(total, names, case["expected"])


@cases("per_token")
def test_ids_of_no_channel_are_unattributed(case):
    inputs = case["inputs"]
    sums = observed(*(tensor(inputs[name]) for name in ("loss", "labels", "channel")), inputs["num_channels"])
    assert {name: leaf.tolist() for name, leaf in sums.items()} == case["expected"]


def sums_of(parts, names):
    """The sums of tokens that have, per channel, a given (sum of losses, number of tokens)."""
    loss, channel = [], []
    for name, (total, count) in parts.items():
        loss += [total / count] * count if count else []
        channel += [names.index(name)] * count
    labels = torch.ones(len(loss)).long()
    return TensorDict({"channel": observed(torch.tensor(loss), labels, torch.tensor(channel), len(names))})


@cases("added")
def test_sums_of_parts_with_different_sources_add_up(case):
    """Parts are micro-batches or ranks: it is the same operation."""
    names = list(case["expected"])
    window = vf.Window()
    for part in case["inputs"]["parts"]:
        window = window.add(sums_of(part, names), step=1)
    total = window.all_reduce().obs
    assert_by_source(total["channel"], names, case["expected"])
    metrics = vf.channel_metrics(total, tuple(names))
    for name, right in case["expected"].items():
        assert metrics[f"channel_loss/{name}"] == right["loss_sum"] / right["token_count"]


@cases("metrics")
def test_metrics_divide_the_sums(case):
    sums = case["inputs"]["sums"]
    metrics = vf.channel_metrics(sums_of(sums, list(sums)), tuple(sums))
    expected = {
        f"channel_{metric}/{name}": value
        for metric, values in case["expected"].items()
        for name, value in values.items()
    }
    assert {name: value for name, value in metrics.items() if "perplexity" not in name} == expected


@cases("names")
def test_every_name_has_a_key_of_its_own(case):
    transformed = vf.with_channel_loss(lambda batch: batch["loss"], case["inputs"]["names"])
    parts = dict(zip(transformed.channels, case["inputs"]["sums"], strict=True))
    metrics = vf.channel_metrics(sums_of(parts, list(parts)), transformed.channels)
    losses = {name: value for name, value in metrics.items() if name.startswith("channel_loss/")}
    assert losses == case["expected"]


def model_loss(model):
    """The loss per token of a model that returns logits, of a batch with more in it than the model takes."""

    def loss_fn(batch):
        return F.cross_entropy(model(batch["x"]).mT, batch["labels"], reduction="none")

    return loss_fn


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(2, 4, 3, generator=generator),
        "labels": torch.randint(0, 5, (2, 4), generator=generator),
        "channel": torch.randint(0, 2, (2, 4), generator=generator),
    }


def test_missing_source_id():
    case = CALLS["missing_source_id"]
    batch = {key: torch.ones(2, 4).long() for key in case["inputs"]["keys"]}
    with pytest.raises(ValueError, match=case["expected"]["error"]):
        vf.with_channel_loss(lambda batch: torch.ones(2, 4))(batch)


@pytest.mark.parametrize("raw", CALLS["id_parsing"]["inputs"]["ids"], ids=repr)
def test_id_parsing(raw):
    ids = torch.tensor(raw) if isinstance(raw, bool | float) else raw
    with pytest.raises(TypeError, match=CALLS["id_parsing"]["expected"]["error"]):
        vf.with_channel_loss(lambda batch: torch.ones(2, 4))(
            {"labels": torch.ones(2, 4).long(), "channel": ids}
        )


def test_sampling_interval():
    case, loss_fn = CALLS["sampling_interval"], model_loss(nn.Linear(3, 5))
    wrapped = vf.with_channel_loss(loss_fn, 2)
    recorded, window = [], vf.Window()
    for step in case["inputs"]["steps"]:
        batch = make_batch(step)
        if step % case["inputs"]["interval"] == 0:
            loss, obs = wrapped(batch)
            window = window.add(obs, step)
        else:
            loss = loss_fn(batch).mean()
        recorded.append(step == window.last_step)
        torch.testing.assert_close(loss, loss_fn(batch).mean())
    assert recorded == case["expected"]["recorded"]


@pytest.mark.parametrize("keyword", [False, True])
def test_metadata_never_reaches_model(keyword):
    case, received = CALLS["metadata_never_reaches_model"], []

    class Model(nn.Linear):
        def forward(self, *args, **kwargs):
            received.append((len(args), kwargs))
            return super().forward(*args, **kwargs)

    batch = make_batch()
    batch |= {key: torch.ones(2, 4).long() for key in case["inputs"]["keys"] if key not in batch}
    ids = {"channel": batch.pop("channel")} if keyword else {}
    vf.with_channel_loss(model_loss(Model(3, 5)), 2)(batch, **ids)
    assert received == [(len(case["expected"]["model_receives"]), {})]


def test_reference_model_not_observed():
    case, batch = CALLS["reference_model_not_observed"], make_batch()
    models = {name: nn.Linear(3, 5) for name in case["inputs"]["models"]}
    losses = {name: model_loss(model) for name, model in models.items()}

    def preference_loss(batch):
        margin = losses["reference"](batch).detach()
        assert margin.shape == batch["labels"].shape
        return losses["policy"](batch)

    (name,) = case["expected"]["observed"]
    _, obs = vf.with_channel_loss(preference_loss, 2)(batch)
    _, alone = vf.with_channel_loss(losses[name], 2)(batch)
    assert (obs == alone).all()


def test_two_wrappers_do_not_mix():
    first_names, second_names = CALLS["two_wrappers_do_not_mix"]["inputs"]["channels"]
    loss_fn = model_loss(nn.Linear(3, 5))
    before = dict(vars(loss_fn))
    first = vf.with_channel_loss(loss_fn, tuple(first_names))
    second = vf.with_channel_loss(loss_fn, tuple(second_names))
    batch = make_batch()
    alone = first(batch)[1]
    other = second(batch)[1]
    assert (first(batch)[1] == alone).all()
    assert first.channels == tuple(first_names) and second.channels == tuple(second_names)
    assert other["channel", "token_count"].shape == (3,)
    assert vars(loss_fn) == before
    assert loss_fn(batch).shape == (2, 4)


def test_arguments_forwarded_unchanged():
    inputs, received = CALLS["arguments_forwarded_unchanged"]["inputs"], []

    def loss_fn(*args, **kwargs):
        received.append((args, kwargs))
        return torch.ones(2, 4), {"aux": torch.zeros(())}

    batch = make_batch()
    _, obs = vf.with_channel_loss(loss_fn, 2, has_aux=True)(batch, *inputs["args"], **inputs["kwargs"])
    ((args, kwargs),) = received
    assert args[0] is batch
    assert list(args[1:]) == inputs["args"] and kwargs == inputs["kwargs"]
    assert obs["aux"].item() == 0


def test_chunked_ce_equals_whole():
    inputs = CALLS["chunked_ce_equals_whole"]["inputs"]
    generator = torch.Generator().manual_seed(0)
    batch = {
        "logits": torch.randn(inputs["tokens"], inputs["vocabulary"], generator=generator),
        "labels": torch.randint(0, inputs["vocabulary"], (inputs["tokens"],), generator=generator),
        "channel": torch.arange(inputs["tokens"]) % 2,
    }

    def loss_fn(batch, chunk):
        pieces = zip(batch["logits"].split(chunk), batch["labels"].split(chunk), strict=True)
        return torch.cat([F.cross_entropy(x, y, reduction="none") for x, y in pieces])

    wrapped = vf.with_channel_loss(loss_fn, 2)
    whole, expected = wrapped(batch, inputs["tokens"])
    for chunk in (1, inputs["chunk"], 4096):
        loss, obs = wrapped(batch, chunk)
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(obs["channel", "loss_sum"], expected["channel", "loss_sum"])
        assert torch.equal(obs["channel", "token_count"], expected["channel", "token_count"])


def test_hidden_path_equals_logits_path():
    case = CALLS["hidden_path_equals_logits_path"]
    inputs, expected = case["inputs"], case["expected"]
    labels, channel, names = shifted_batch(inputs)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*labels.shape, inputs["width"], generator=generator)
    weight = torch.randn(inputs["vocabulary"], inputs["width"], generator=generator)

    def hidden_loss(batch):
        pieces = zip(batch["hidden"].unbind(1), batch["labels"].unbind(1), strict=True)
        return torch.stack([F.cross_entropy(h @ weight.T, y, reduction="none") for h, y in pieces], dim=1)

    def logits_loss(batch):
        return F.cross_entropy((batch["hidden"] @ weight.T).mT, batch["labels"], reduction="none")

    batch = {"hidden": hidden, "labels": labels, "channel": channel}
    sums = [vf.with_channel_loss(fn, len(names))(batch)[1]["channel"] for fn in (hidden_loss, logits_loss)]
    torch.testing.assert_close(sums[0]["loss_sum"], sums[1]["loss_sum"])
    for c, name in enumerate(names):
        assert sums[0]["token_count"][c] == sums[1]["token_count"][c] == expected[name]["token_count"]


def test_every_call_case_has_its_test():
    assert {f"test_{case_id}" for case_id in CALLS} <= set(globals())
