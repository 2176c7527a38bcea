"""Where a call has its labels and ids, however it is called."""

import functools
import inspect

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import veofunc as vf
from veofunc.channel.arguments import Caller, aligned, per_token

LABELS, IDS, LOSS = torch.ones(2, 3).long(), torch.tensor([[0, 1, 1], [0, 0, 2]]), torch.rand(2, 3)


def read(fn, *args, label_key="labels", channel_key="channel", **kwargs):
    kept, batch = Caller(fn, channel_key, label_key).read(args, kwargs)
    return kept, batch.labels, batch.channel


def of_batch(batch, scale=1.0):
    return batch["loss"]


def of_arguments(loss, labels):
    return loss


def with_ids(loss, labels, channel):
    return loss


def with_anything(loss, *, labels=None, **kwargs):
    return loss


class Model(nn.Module):
    def forward(self, input_ids, labels=None, **kwargs):
        return LOSS


BATCH = {"loss": LOSS, "labels": LABELS, "channel": IDS}
CALLS = {
    "a mapping": (of_batch, (BATCH,), {}),
    "a TensorDict": (of_batch, (TensorDict(BATCH),), {}),
    "a mapping by keyword": (of_batch, (), {"batch": BATCH}),
    "beside others": (of_batch, (BATCH, {"loss": 1}), {}),
    "ids by keyword": (of_batch, ({"loss": LOSS, "labels": LABELS},), {"channel": IDS}),
    "arguments by position": (of_arguments, (LOSS, LABELS), {"channel": IDS}),
    "arguments by keyword": (of_arguments, (), {"labels": LABELS, "loss": LOSS, "channel": IDS}),
    "ids by position": (with_ids, (LOSS, LABELS, IDS), {}),
    "any keywords": (with_anything, (LOSS,), {"labels": LABELS, "channel": IDS}),
    "partial": (functools.partial(of_arguments, LOSS), (LABELS,), {"channel": IDS}),
    "a module": (Model(), (LOSS, LABELS), {"channel": IDS}),
    "a method": (Model().forward, (LOSS, LABELS), {"channel": IDS}),
    "a module in a transform": (vf.offload(Model(), vf.policies.nothing), (LOSS, LABELS), {"channel": IDS}),
    "a compiled module": (torch.compile(Model(), backend="eager"), (LOSS, LABELS), {"channel": IDS}),
    "torch's word": (nn.functional.cross_entropy, (LOSS, LABELS), {"channel": IDS}),
    "a loss module": (nn.CrossEntropyLoss(), (LOSS, LABELS), {"channel": IDS}),
}


@pytest.mark.parametrize(("fn", "args", "kwargs"), CALLS.values(), ids=CALLS)
def test_finds_labels_and_ids(fn, args, kwargs):
    kept, labels, ids = read(fn, *args, **kwargs)
    assert labels is not None and labels.data_ptr() == LABELS.data_ptr()
    assert ids.data_ptr() == IDS.data_ptr()
    assert set(kept) == set(kwargs) - {"channel"}


def test_only_a_function_that_names_the_ids_is_given_them():
    assert "channel" in read(with_ids, LOSS, LABELS, channel=IDS)[0]
    for fn in (with_anything, Model()):
        assert "source" not in read(fn, LOSS, labels=LABELS, source=IDS, channel_key="source")[0]


def test_the_keyword_takes_precedence():
    assert read(of_batch, BATCH, channel=IDS + 1)[2].equal(IDS + 1)


def test_keys_may_have_other_names():
    batch = {"target_ids": LABELS, "source": IDS, "labels": None}
    _, labels, ids = read(of_batch, batch, label_key="target_ids", channel_key="source")
    assert labels is LABELS and ids is IDS


def test_there_may_be_no_labels_as_long_as_there_are_ids():
    assert read(of_batch, {"loss": LOSS, "channel": IDS})[1] is None
    assert read(Model(), LOSS, labels=None, channel=IDS)[1] is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: read(of_batch, {"loss": LOSS}), ValueError, r"found 0. Keys .*\['loss'\]; \['batch'\]"),
        (lambda: read(of_batch, BATCH, BATCH), ValueError, "exactly one argument.*found 2"),
        (lambda: read(of_arguments, LOSS, LABELS), ValueError, r"no 'channel'.*has \['labels', 'loss'\]"),
        (lambda: read(of_arguments, LOSS, [1], channel=IDS), TypeError, "labels must be a tensor, got list"),
        (
            lambda: read(of_arguments, LOSS, LABELS, channel=IDS * 1.0),
            TypeError,
            "integer tensor, got .*float32",
        ),
        (lambda: read(of_arguments, LOSS, LABELS, channel=[0, 1]), TypeError, "integer tensor, got list"),
    ],
)
def test_what_cannot_be_found_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_ids_are_one_per_label_or_one_per_row():
    assert per_token(IDS, LABELS) is IDS
    assert per_token(torch.tensor([4, 5]), LABELS).tolist() == [[4, 4, 4], [5, 5, 5]]
    assert per_token(torch.tensor([4, 5]), torch.ones(2, 1, 2)).tolist() == [[[4, 4]], [[5, 5]]]
    for wrong in (torch.tensor([1, 2, 3]), IDS.T, IDS[None], torch.tensor(1)):
        with pytest.raises(ValueError, match=r"must have shape \[2, 3\] or \[2\], got"):
            per_token(wrong, LABELS)


VALUES = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    ("shape", "here", "following"),
    [
        ((2, 3), [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]]),
        ((6,), [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ((2, 2), [[0, 1], [3, 4]], [[1, 2], [4, 5]]),
        ((4,), [0, 1, 3, 4], [1, 2, 4, 5]),
        ((3, 2), None, None),
        ((2,), None, None),
        ((), None, None),
        ((2, 4), None, None),
    ],
)
def test_values_are_aligned_with_token_losses(shape, here, following):
    for is_following, expected in ((False, here), (True, following)):
        values = aligned(VALUES, torch.Size(shape), following=is_following)
        assert (None if values is None else values.tolist()) == expected


def test_a_reduction_is_asked_for_where_the_caller_put_it():
    caller = Caller(nn.functional.cross_entropy, "channel", "labels")
    assert caller.reduction == "mean"
    for args, kwargs, asked in (
        ((LOSS, LABELS), {}, "mean"),
        ((LOSS, LABELS), {"reduction": "sum"}, "sum"),
        ((LOSS, LABELS, None, None, -100, None, "none"), {}, "none"),
    ):
        given, options, found = caller.unreduced(args, kwargs)
        assert found == asked
        bound = inspect.signature(nn.functional.cross_entropy).bind(*given, **options)
        assert bound.arguments["reduction"] == "none"
    assert Caller(of_batch, "channel", "labels").reduction is None
