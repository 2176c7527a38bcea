"""What is seen of `F.cross_entropy` equals what it returns to those who are not watched, bit for bit."""

import contextlib
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import reference
from veofunc.channel.intercept import seeing_cross_entropies

V = 13
SHAPES = {
    "[V]": (V,),
    "[N, V]": (30, V),
    "[B, V, T]": (4, V, 9),
    "[B, V, H, W]": (2, V, 3, 5),
    "[0, V]": (0, V),
}


def make(shape, dtype=torch.float32, seed=0):
    """Logits [N, V, ...], labels [N, ...] of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    labels = torch.randint(V, shape[:1] * (len(shape) > 1) + shape[2:], generator=generator)
    if labels.dim():
        labels.view(-1)[::4] = -100
    return logits, labels


def loss_and_gradient(logits, loss_fn):
    leaf = logits.clone().requires_grad_()
    loss = loss_fn(leaf)
    return loss.detach(), *torch.autograd.grad(loss, leaf, torch.ones_like(loss))


def assert_same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_loss_and_gradient_have_the_bits_of_an_unwatched_call(shape, dtype, autocast):
    logits, labels = make(shape, dtype)
    weights = (None, torch.rand(V, generator=torch.Generator().manual_seed(1)).to(dtype))
    for reduction, weight, smoothing in itertools.product(("mean", "sum", "none"), weights, (0.0, 0.1)):
        if autocast and weight is not None and dtype != torch.float32:
            continue  # PyTorch itself refuses a weight of another dtype than what it casts to

        def loss_fn(logits, reduction=reduction, weight=weight, smoothing=smoothing):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                return F.cross_entropy(logits, labels, weight, reduction=reduction, label_smoothing=smoothing)

        expected = loss_and_gradient(logits, loss_fn)
        with seeing_cross_entropies() as calls:
            actual = loss_and_gradient(logits, loss_fn)
        assert len(calls) == 1
        assert_same_bits(actual, expected)
        assert actual[0].dtype == expected[0].dtype
        for other in ("mean", "sum", "none"):
            right = F.cross_entropy(
                calls[0].logits, labels, calls[0].weight, reduction=other, label_smoothing=smoothing
            )
            assert_same_bits([calls[0].reduced(other)], [right])


@pytest.mark.parametrize("arguments", [(None, None, -1), (None, False, -1, None), (None, None, -1, False)])
def test_all_arguments_mean_what_they_mean_to_pytorch(arguments):
    """`ignore_index` by position, and the old ways to ask for a sum and for no reduction."""
    logits, _ = make((30, V))
    labels = torch.arange(30) % V - 1
    with pytest.warns() if False in arguments else contextlib.nullcontext():
        expected = loss_and_gradient(logits, lambda x: F.cross_entropy(x, labels, *arguments))
        with seeing_cross_entropies() as calls:
            actual = loss_and_gradient(logits, lambda x: F.cross_entropy(x, labels, *arguments))
    assert_same_bits(actual, expected)
    assert calls[0].counted.equal(labels != -1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_losses_are_pure_cross_entropy_whatever_weights_and_smoothing_do(reduction):
    logits, labels = make((30, V))
    with seeing_cross_entropies() as calls:
        F.cross_entropy(logits, labels, torch.rand(V), reduction=reduction, label_smoothing=0.3)
    rows, flat = logits.tolist(), labels.tolist()
    losses = [
        0.0 if label < 0 else reference.cross_entropy(row, label)
        for row, label in zip(rows, flat, strict=True)
    ]
    assert calls[0].token_loss.tolist() == pytest.approx(losses, rel=1e-5, abs=1e-6)
    best = [max(range(V), key=row.__getitem__) == label for row, label in zip(rows, flat, strict=True)]
    assert calls[0].correct.tolist() == best
    # the loss of a label is the log-partition minus its logit
    partitions = [
        loss + row[label] for loss, row, label in zip(losses, rows, flat, strict=True) if label >= 0
    ]
    assert calls[0].log_partition[labels >= 0].tolist() == pytest.approx(partitions, rel=1e-5)


def test_sees_losses_of_modules_and_inside_of_functions():
    logits, labels = make((30, V))
    with seeing_cross_entropies() as calls:
        losses = (
            nn.CrossEntropyLoss(ignore_index=-100)(logits, labels),
            nn.functional.cross_entropy(logits, labels),
        )
    assert len(calls) == 2
    assert all(call.loss is loss for call, loss in zip(calls, losses, strict=True))


def test_sees_only_its_own_thread_and_only_while_it_lasts():
    logits, labels = make((30, V))
    with seeing_cross_entropies() as calls:
        thread = threading.Thread(target=F.cross_entropy, args=(logits, labels))
        thread.start()
        thread.join()
    F.cross_entropy(logits, labels)
    assert calls == []


def test_an_exception_ends_it():
    logits, labels = make((30, V))
    with pytest.raises(RuntimeError, match="boom"), seeing_cross_entropies() as calls:
        raise RuntimeError("boom")
    F.cross_entropy(logits, labels)
    assert calls == []


def test_each_of_two_at_once_sees_what_happens_inside_of_it():
    logits, labels = make((30, V))
    with seeing_cross_entropies() as outer:
        F.cross_entropy(logits, labels)
        with seeing_cross_entropies() as inner:
            F.cross_entropy(logits, labels)
    assert (len(outer), len(inner)) == (1, 1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_a_checkpointed_loss_is_seen_once_and_computed_again_as_before(reentrant, smoothing, backward_inside):
    logits, labels = make((30, V))

    def loss_fn(logits):
        return F.cross_entropy(logits * 2, labels, label_smoothing=smoothing)

    expected = loss_and_gradient(logits, loss_fn)
    leaf = logits.clone().requires_grad_()
    with seeing_cross_entropies() as calls:
        loss = torch.utils.checkpoint.checkpoint(loss_fn, leaf, use_reentrant=reentrant)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    assert len(calls) == 1
    assert_same_bits((loss.detach(), leaf.grad), expected)


def test_nothing_that_is_seen_has_gradients():
    logits, labels = make((30, V))
    with seeing_cross_entropies() as calls:
        F.cross_entropy(logits.requires_grad_(), labels)
    for name in ("token_loss", "log_partition", "correct"):
        assert not getattr(calls[0], name).requires_grad, name


def test_probabilities_of_classes_have_no_token_loss():
    logits, _ = make((30, V))
    message = r"probabilities of classes, got a target of torch.float32.*'pair'"
    with pytest.raises(ValueError, match=message), seeing_cross_entropies():
        F.cross_entropy(logits, logits.softmax(1))


def test_works_under_vmap_and_grad():
    logits, labels = make((30, V))
    seen = []

    def loss_fn(logits, labels):
        with seeing_cross_entropies() as calls:
            loss = F.cross_entropy(logits, labels)
        seen.extend(calls)
        return loss, calls[0].token_loss

    grad = torch.func.grad(loss_fn, has_aux=True)
    grads, token_losses = torch.func.vmap(grad)(logits.view(3, 10, V), labels.view(3, 10))
    for m, (part, of_part) in enumerate(zip(logits.view(3, 10, V), labels.view(3, 10), strict=True)):
        _, expected = loss_and_gradient(part, lambda x, of_part=of_part: F.cross_entropy(x, of_part))
        torch.testing.assert_close(grads[m], expected)
        torch.testing.assert_close(token_losses[m], F.cross_entropy(part, of_part, reduction="none"))
