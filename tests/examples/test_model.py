"""The example's model against slow, obvious loops."""

import math

import model as example
import pytest
import torch
import torch.nn.functional as F

CONFIG = example.Config(width=16, num_layers=2, num_heads=2, num_experts=4, top_k=2, expert_width=8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = example.LanguageModel(CONFIG)
    torch.nn.init.normal_(model.head.weight)
    return model


def random_tokens(num_rows, num_tokens):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (num_rows, num_tokens), generator=generator)  # [B, T]


def test_first_loss_is_that_of_a_uniform_guess():
    tokens = random_tokens(2, 12)
    logits = example.LanguageModel(CONFIG)(tokens, torch.zeros_like(tokens))
    assert logits.shape == (2, 12, 256)
    torch.testing.assert_close(F.cross_entropy(logits.mT, tokens), torch.tensor(math.log(256)))


def test_logits_do_not_depend_on_later_tokens(model):
    tokens = random_tokens(1, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    documents = torch.zeros_like(tokens)
    before, after = model(tokens, documents), model(changed, documents)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_packed_documents_get_the_logits_they_get_alone(model):
    """Rotary positions are relative, so where a document stands in its row makes no difference."""
    first, second = random_tokens(1, 5), random_tokens(1, 9).flip(1)
    packed = torch.cat([first, second], dim=1)
    documents = torch.tensor([[0] * 5 + [1] * 9])
    logits = model(packed, documents)
    for alone, piece in ((first, logits[:, :5]), (second, logits[:, 5:])):
        expected = model(alone, torch.zeros_like(alone))
        torch.testing.assert_close(piece, expected, rtol=1e-4, atol=1e-5)


def test_rotation_depends_on_the_distance_only():
    q, k = torch.randn(8), torch.randn(8)
    rotated_q = example.rotate(q.expand(1, 1, 10, 8))[0, 0]  # [T, D/H]
    rotated_k = example.rotate(k.expand(1, 1, 10, 8))[0, 0]
    scores = rotated_q @ rotated_k.T  # [T, T]
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(10))


def test_router_chooses_the_largest_biased_logits_and_weighs_by_the_unbiased_ones():
    torch.manual_seed(0)
    router = example.Router(CONFIG)
    router.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    logits, weights, ids = router(torch.randn(6, CONFIG.width))
    for row in range(6):
        scores = [logit + (9.0 if e == 1 else 0.0) for e, logit in enumerate(logits[row].tolist())]
        chosen = sorted(range(4), key=lambda e: -scores[e])[:2]
        assert ids[row].tolist() == chosen
        exp = [math.exp(logits[row, e].item()) for e in chosen]
        expected = torch.tensor([x / sum(exp) for x in exp])
        torch.testing.assert_close(weights[row], expected)


def test_experts_equal_a_loop_over_tokens_and_their_experts():
    torch.manual_seed(0)
    experts = example.Experts(CONFIG)
    x = torch.randn(5, CONFIG.width)
    ids = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [0, 3]])
    weights = torch.rand(5, 2)
    expected = torch.zeros_like(x)
    for token in range(5):
        for e, weight in zip(ids[token].tolist(), weights[token], strict=True):
            hidden = F.silu(x[token] @ experts.gate[e]) * (x[token] @ experts.up[e])
            expected[token] += weight * (hidden @ experts.down[e])
    torch.testing.assert_close(experts(x, ids, weights), expected)


def test_every_parameter_gets_a_gradient(model):
    tokens = random_tokens(1, 3)
    model(tokens, torch.zeros_like(tokens)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
