"""`linear_cross_entropy` against float64 and plain PyTorch, in every way that people differentiate."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import veofunc as vf
from tests import reference

D, V = 6, 23
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make(shape=(2, 7), dtype=torch.float32, bias=False, seed=0):
    """Leaves (hidden, weight and perhaps bias), and labels of which some do not count."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*sizes):
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(V, shape, generator=generator)
    labels.view(-1)[::4] = -100
    return [leaf(*shape, D), leaf(V, D), *([leaf(V)] if bias else [])], labels


def plain(leaves, labels, *, z_loss=0.0, softcap=None, reduction="mean"):
    """Loss and token losses with all logits at once."""
    logits = F.linear(*leaves)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    token_loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    counted = labels != -100
    total = token_loss.sum() + z_loss * (logits.logsumexp(-1).square() * counted).sum()
    return (total / counted.sum() if reduction == "mean" else total), token_loss


def ours(leaves, labels, **options):
    hidden, weight, *bias = leaves
    return vf.linear_cross_entropy(hidden, weight, labels, bias=bias[0] if bias else None, **options)


def copies(leaves, dtype=None):
    return [leaf.detach().to(dtype or leaf.dtype).clone().requires_grad_() for leaf in leaves]


def assert_close(actual, expected, tolerance):
    scale = max(expected.abs().max().item(), 1e-30)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_loss_and_gradients_are_those_of_float64(dtype, bias, z_loss, softcap):
    leaves, labels = make(dtype=dtype, bias=bias)
    exact = copies(leaves, torch.float64)
    for reduction in ("mean", "sum"):
        options = {"z_loss": z_loss, "softcap": softcap, "reduction": reduction}
        loss, token_loss = ours(leaves, labels, chunk=4, **options)
        right, token_right = plain(exact, labels, **options)
        grads = torch.autograd.grad(loss, leaves)
        assert_close(loss.detach(), right.detach(), TOLERANCE[dtype])
        assert_close(token_loss, token_right.detach(), TOLERANCE[dtype])
        for grad, leaf, expected in zip(grads, leaves, torch.autograd.grad(right, exact), strict=True):
            assert grad.dtype == leaf.dtype and grad.shape == leaf.shape and not grad.requires_grad
            assert_close(grad, expected, TOLERANCE[dtype])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert loss.dtype == token_loss.dtype == wide and not token_loss.requires_grad


def test_token_losses_are_those_of_a_loop_in_plain_python():
    (hidden, weight), labels = make()
    _, token_loss = vf.linear_cross_entropy(hidden, weight, labels)
    rows = (hidden @ weight.T).flatten(0, 1).tolist()
    expected = [
        0.0 if label < 0 else reference.cross_entropy(row, label)
        for row, label in zip(rows, labels.flatten().tolist(), strict=True)
    ]
    assert token_loss.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_the_chunk_changes_nothing():
    """1, sizes that divide and that do not, the whole, and more."""
    leaves, labels = make(dtype=torch.float64)
    losses, grads = [], []
    for chunk in (1, 2, 3, 7, 14, 1000):
        loss, token_loss = ours(leaves, labels, chunk=chunk)
        losses.append((loss.detach(), token_loss))
        grads.append(torch.autograd.grad(loss, leaves))
    for other, grad in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(other, losses[0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(grad, grads[0], rtol=1e-12, atol=1e-13)


def test_many_chunks_of_half_precision_are_summed_in_float32():
    """The gradient of a weight over 64 chunks is as exact as over one (a sum in bfloat16 would not be)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 16, generator=generator).bfloat16()
    weight = torch.randn(50, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(50, (1024,), generator=generator)
    exact = weight.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(F.cross_entropy(hidden.double() @ exact.T, labels), exact)
    errors = {}
    for chunk in (16, 1024):
        (grad,) = torch.autograd.grad(vf.linear_cross_entropy(hidden, weight, labels, chunk=chunk)[0], weight)
        errors[chunk] = ((grad.double() - right).norm() / right.norm()).item()
    assert errors[16] < 1.5 * errors[1024] < 1e-2


def test_float16_gradients_of_a_mean_over_many_tokens_neither_vanish_nor_overflow():
    num_tokens = 1 << 15
    hidden = torch.full((num_tokens, 4), 8.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    loss, _ = vf.linear_cross_entropy(hidden, weight, labels)
    _, grad = torch.autograd.grad(loss, (hidden, weight))
    # Unscaled, the sum for label 0 is 2**15 * 8 * 7/8 = 229376, which float16 cannot hold.
    torch.testing.assert_close(grad[0], torch.full((4,), -7.0, dtype=torch.float16))
    torch.testing.assert_close(grad[1:], torch.full((7, 4), 1.0, dtype=torch.float16))


@pytest.mark.parametrize("needed", [n for n in itertools.product([False, True], repeat=3) if any(n)])
def test_only_the_gradients_that_are_asked_for_are_made(needed):
    leaves, labels = make(bias=True)
    for leaf, need in zip(leaves, needed, strict=True):
        leaf.requires_grad_(need)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    held = []

    def pack(tensor):
        held.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = ours(leaves, labels, reduction="sum")
    assert sorted(held) == sorted(leaf.numel() if leaf.requires_grad else 0 for leaf in leaves)
    right = torch.autograd.grad(plain(leaves, labels, reduction="sum")[0], asked)
    torch.testing.assert_close(torch.autograd.grad(loss, asked), right)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_losses(grad):
    leaves, labels = make()
    with grad():
        loss, token_loss = ours(leaves, labels)
    assert not loss.requires_grad
    torch.testing.assert_close((loss, token_loss), tuple(x.detach() for x in plain(leaves, labels)))


def test_a_weight_tied_to_the_embedding_gets_both_gradients():
    tokens, labels = torch.randint(V, (9,)), torch.randint(V, (9,))
    embedding = nn.Embedding(V, D)
    for loss in (
        lambda: F.cross_entropy(F.linear(embedding(tokens), embedding.weight), labels),
        lambda: vf.linear_cross_entropy(embedding(tokens), embedding.weight, labels)[0],
    ):
        loss().backward()
    twice = embedding.weight.grad
    embedding.weight.grad = None
    loss().backward()
    torch.testing.assert_close(2 * embedding.weight.grad, twice)


@pytest.mark.parametrize(("reduction", "value"), [("mean", math.nan), ("sum", 0.0)])
def test_no_label_that_counts_gives_the_loss_of_torch_and_gradients_of_zero(reduction, value):
    leaves, labels = make(bias=True)
    loss, token_loss = ours(leaves, torch.full_like(labels, -100), reduction=reduction, z_loss=0.1)
    assert loss.requires_grad and not token_loss.any()
    torch.testing.assert_close(loss.detach(), torch.tensor(value), equal_nan=True)
    for grad in torch.autograd.grad(loss, leaves):
        assert not grad.any() and grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_there_may_be_no_tokens(shape):
    leaves, _ = make(shape)
    loss, token_loss = ours(leaves, torch.zeros(shape, dtype=torch.int64))
    assert loss.isnan() and token_loss.shape == shape
    assert not any(grad.any() for grad in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_stands_where_the_label_is_ignored_touches_nothing(bad):
    (hidden, weight), labels = make(shape=(7,))
    spoilt = hidden.detach().clone()
    spoilt[labels == -100] = bad
    spoilt.requires_grad_()
    loss, token_loss = vf.linear_cross_entropy(spoilt, weight, labels, z_loss=0.1)
    right, _ = vf.linear_cross_entropy(hidden, weight, labels, z_loss=0.1)
    assert loss.equal(right) and token_loss.isfinite().all()
    grads, rights = torch.autograd.grad(loss, (spoilt, weight)), torch.autograd.grad(right, (hidden, weight))
    assert all(map(torch.equal, grads, rights))


@pytest.mark.parametrize("divisor", [3, 2.5, torch.tensor(7), torch.tensor(0.5)])
def test_the_divisor_is_instead_of_the_number_of_tokens(divisor):
    leaves, labels = make(dtype=torch.float64)
    loss, _ = ours(leaves, labels, divisor=divisor)
    right = plain(leaves, labels, reduction="sum")[0] / divisor
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(right, leaves))


def test_micro_batches_with_one_divisor_add_up_to_the_whole():
    leaves, labels = make((10,), torch.float64)
    count = (labels != -100).sum()
    whole = torch.autograd.grad(ours(leaves, labels)[0], leaves)
    for part in (slice(None, 1), slice(1, None)):
        parts = [leaves[0][part], leaves[1]]
        ours(parts, labels[part], divisor=count)[0].backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(whole))


def test_token_losses_are_pure_whatever_the_loss_adds():
    leaves, labels = make()
    assert ours(leaves, labels)[1].equal(ours(leaves, labels, z_loss=1.0)[1])


def test_works_under_torch_func():
    leaves, labels = make()
    leaves = [leaf.detach() for leaf in leaves]
    arguments = tuple(range(len(leaves)))
    grads, (loss, token_loss) = torch.func.grad_and_value(
        lambda *leaves: ours(leaves, labels), arguments, has_aux=True
    )(*leaves)
    right = torch.func.grad_and_value(lambda *leaves: plain(leaves, labels), arguments, has_aux=True)(*leaves)
    torch.testing.assert_close((grads, (loss, token_loss)), right)
    torch.testing.assert_close(
        vf.grad_and_value(lambda *leaves: ours(leaves, labels), arguments, has_aux=True)(*leaves), right
    )


@pytest.mark.parametrize("over", ["hidden", "weight", "labels", "all"])
def test_works_under_vmap_of_grad_and_grad_of_vmap(over):
    sets = [make(seed=seed) for seed in range(3)]
    hidden, weight = (torch.stack([leaves[i].detach() for leaves, _ in sets]) for i in range(2))
    labels = torch.stack([labels for _, labels in sets])
    batched = {"hidden": hidden, "weight": weight, "labels": labels}
    dims = tuple(0 if over in (name, "all") else None for name in batched)
    arguments = [x if dim == 0 else x[0] for x, dim in zip(batched.values(), dims, strict=True)]
    if over == "all":  # the samples need not be the first dimension
        dims, arguments = (2, 1, 0), [hidden.movedim(0, 2), weight.movedim(0, 1), labels]

    def by(loss):
        def of(hidden, weight, labels):
            return loss([hidden, weight], labels)[0]

        def total(*arguments):
            return torch.func.vmap(of, dims)(*arguments).sum()

        each = torch.func.vmap(torch.func.grad(of, (0, 1)), dims)(*arguments)
        return each, torch.func.grad(total, (0, 1))(*arguments)

    torch.testing.assert_close(by(ours), by(plain))


def test_several_losses_under_one_vmapped_backward():
    leaves, labels = make()
    loss, right = ours(leaves, labels)[0], plain(leaves, labels)[0]
    weights = torch.tensor([1.0, 2.0])
    got, expected = (
        torch.autograd.grad(x, leaves, weights, is_grads_batched=True, retain_graph=True)
        for x in (loss, right)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # the compiler does so itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # which the compiler uses
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(backend):
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for seed in (0, 1):
        leaves, labels = make(seed=seed, bias=True)
        loss, token_loss = compiled(leaves, labels, chunk=4, z_loss=0.1)
        right, token_right = ours(leaves, labels, chunk=4, z_loss=0.1)
        torch.testing.assert_close((loss, token_loss), (right, token_right))
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(right, leaves))


def test_is_a_well_made_operation():
    (hidden, weight), labels = make(shape=(7,))
    operation = torch.ops.veofunc.linear_cross_entropy.default
    for dtype, needed in itertools.product((torch.float32, torch.bfloat16), ([True] * 2, [False] * 2)):
        arguments = (hidden.detach(), weight.detach(), None, labels, dtype, -100, 4, 0.1, 3.0, *needed, False)
        torch.library.opcheck(operation, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_of_its_dtype_and_weights_keep_their_gradients(dtype):
    leaves, labels = make()
    half = copies([leaf.to(dtype) for leaf in leaves])
    with torch.autocast("cpu", dtype):
        loss, _ = ours(leaves, labels)
    right, _ = ours(half, labels)
    assert loss.equal(right)
    for grad, expected in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(right, half), strict=True
    ):
        assert grad.dtype == torch.float32
        assert_close(grad, expected, TOLERANCE[dtype])


def test_a_second_backward_is_refused():
    leaves, labels = make()
    loss, _ = ours(leaves, labels)
    loss.backward(retain_graph=True)
    before = [leaf.grad.clone() for leaf in leaves]
    with pytest.raises(RuntimeError, match="one backward per call"):
        loss.backward()
    assert all(map(torch.equal, before, [leaf.grad for leaf in leaves]))


def test_a_second_derivative_is_refused_wherever_it_is_asked_for():
    leaves, labels = make()
    grads = torch.autograd.grad(ours(leaves, labels)[0], leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grads[0].sum().backward()

    def loss(hidden):
        return ours([hidden, leaves[1].detach()], labels)[0]

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda hidden: torch.func.grad(loss)(hidden).sum())(leaves[0].detach())


def test_a_checkpoint_around_it_computes_it_again():
    leaves, labels = make()
    right = torch.autograd.grad(ours(leaves, labels)[0], leaves)
    for reentrant in (False, True):
        loss = torch.utils.checkpoint.checkpoint(
            lambda *leaves: ours(leaves, labels)[0], *leaves, use_reentrant=reentrant
        )
        loss.backward()
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, right, strict=True))
        for leaf in leaves:
            leaf.grad = None


def test_its_gradients_may_be_offloaded(tmp_path):
    leaves, labels = make()

    def loss():
        return ours(leaves, labels, reduction="sum")[0]

    fn = vf.offload(loss, vf.policies.everything, store=vf.DiskStore(tmp_path))
    right = torch.autograd.grad(loss(), leaves)
    assert all(map(torch.equal, torch.autograd.grad(fn(), leaves), right))
    assert fn.stats()["count", "moved"] == 2


(HIDDEN, WEIGHT), LABELS = make()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((HIDDEN, WEIGHT, LABELS[0]), {}, ValueError, r"labels must have shape \[2, 7\].*got \[7\]"),
        ((HIDDEN, WEIGHT.mT, LABELS), {}, ValueError, r"\[\.\.\., D\] and weight \[V, D\], got .*\[6, 23\]"),
        ((HIDDEN, WEIGHT[0], LABELS), {}, ValueError, r"weight \[V, D\], got"),
        ((HIDDEN, WEIGHT, LABELS.float()), {}, TypeError, "labels must be integers, got torch.float32"),
        ((HIDDEN, WEIGHT, [1]), {}, TypeError, "labels must be a tensor, got list"),
        ((HIDDEN, WEIGHT.double(), LABELS), {}, TypeError, "one floating dtype, or be under autocast"),
        ((HIDDEN.long(), WEIGHT.long(), LABELS), {}, TypeError, "one floating dtype"),
        (
            (HIDDEN, WEIGHT, LABELS),
            {"bias": torch.ones(3)},
            ValueError,
            r"bias must have shape \[23\], got \[3\]",
        ),
        ((HIDDEN, WEIGHT, LABELS), {"chunk": 0}, ValueError, "chunk must be at least 1 token, got 0"),
        ((HIDDEN, WEIGHT, LABELS), {"chunk": 2.0}, TypeError, "chunk must be an int, got 2.0"),
        ((HIDDEN, WEIGHT, LABELS), {"reduction": "none"}, ValueError, "mean, sum, got 'none'.*every token"),
        ((HIDDEN, WEIGHT, LABELS), {"divisor": 0}, ValueError, "divisor must be positive and finite"),
        ((HIDDEN, WEIGHT, LABELS), {"divisor": math.nan}, ValueError, "divisor must be positive and finite"),
        ((HIDDEN, WEIGHT, LABELS), {"divisor": torch.ones(2)}, ValueError, r"one number, got shape \[2\]"),
        ((HIDDEN, WEIGHT, LABELS), {"divisor": 2, "reduction": "sum"}, ValueError, "divisor is for .*'sum'"),
        (
            (HIDDEN, WEIGHT, LABELS),
            {"softcap": 0},
            ValueError,
            "softcap must be positive and finite, or None",
        ),
        ((HIDDEN, WEIGHT, LABELS), {"z_loss": -1e-4}, ValueError, "z_loss must be finite and at least 0"),
        ((HIDDEN, WEIGHT, LABELS), {"z_loss": math.inf}, ValueError, "z_loss must be finite"),
        ((HIDDEN, WEIGHT, LABELS), {"ignore_index": None}, TypeError, "ignore_index must be an int"),
        ((HIDDEN, WEIGHT, LABELS + V), {}, ValueError, r"labels must be in \[0, V\) = \[0, 23\).*got"),
        ((HIDDEN, WEIGHT, LABELS.clamp(min=-1)), {}, ValueError, r"or ignore_index -100, got -1"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_accepted(arguments, options, error, message):
    with pytest.raises(error, match=message):
        vf.linear_cross_entropy(*arguments, **options)


def test_a_label_that_is_ignored_may_be_in_the_vocabulary():
    leaves, labels = make()
    labels = labels.clamp(min=0)
    loss, _ = ours(leaves, labels, ignore_index=0)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(*leaves).mT, labels, ignore_index=0))
