"""`with_channel_loss` around models of Hugging Face transformers, as they are."""

import pytest
import torch

import veofunc as vf
from tests import reference

transformers = pytest.importorskip(
    "transformers", reason="needs Hugging Face transformers: pip install -c constraints.txt -e '.[interop]'"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

V, B, T = 50, 3, 9
SMALL = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
# class, configuration, how many positions later its labels are shifted inside
FAMILIES = {
    "llama": ("LlamaForCausalLM", {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2}, 1),
    "qwen3": (
        "Qwen3ForCausalLM",
        {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8},
        1,
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8},
        1,
    ),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2}, 1),
    "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16}, 1),
    "bert": ("BertForMaskedLM", {**SMALL, "intermediate_size": 32}, 0),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": V,
            "d_model": 16,
            "d_ff": 32,
            "d_kv": 8,
            "num_heads": 2,
            "num_layers": 2,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        0,
    ),
}


def make(family):
    torch.manual_seed(0)
    kind, options, shift = FAMILIES[family]
    kind = getattr(transformers, kind)
    tokens = torch.randint(3, V, (B, T))
    labels = tokens.clone()
    labels[0, :4] = labels[2] = -100
    batch = {"input_ids": tokens, "labels": labels, "channel": torch.tensor([1, 0, 2])}
    return kind(kind.config_class(**options)).eval(), batch, shift


@pytest.mark.parametrize("family", FAMILIES)
def test_its_output_is_returned_as_it_is_and_its_loss_split(family):
    model, batch, shift = make(family)
    plain = model(input_ids=batch["input_ids"], labels=batch["labels"])
    objective = vf.with_channel_loss(model, 3)
    for _ in range(2):
        out, obs = objective(**batch)
        assert type(out) is type(plain) and out.loss.equal(plain.loss)
    losses, labels, channel = [], [], []
    for b in range(B):
        for t in range(T - shift):
            label = int(batch["labels"][b, t + shift])
            labels.append(label)
            channel.append(int(batch["channel"][b]))
            logits = plain.logits[b, t].tolist()
            losses.append(0.0 if label < 0 else reference.cross_entropy(logits, label))
    expected = reference.channel_sums(losses, labels, channel, 3, -100)
    assert obs["channel", "token_count"].tolist() == expected["token_count"]
    assert obs["channel", "loss_sum"].tolist() == pytest.approx(expected["loss_sum"], rel=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_accumulation_and_gradient_checkpointing_change_nothing(reentrant):
    model, batch, _ = make("llama")
    _, expected = vf.with_channel_loss(model, 3)(**batch)
    plain = model(input_ids=batch["input_ids"], labels=batch["labels"], num_items_in_batch=torch.tensor(40))
    plain.loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    out, obs = vf.with_channel_loss(model, 3)(**batch, num_items_in_batch=torch.tensor(40))
    out.loss.backward()
    assert out.loss.equal(plain.loss)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
    torch.testing.assert_close(obs["channel"].to_dict(), expected["channel"].to_dict())


def test_labels_that_were_shifted_before_are_taken_as_they_are():
    """As sequence parallelism passes them: nothing counts where they are ignored, whatever `labels` says."""
    model, batch, _ = make("llama")
    shifted = torch.full((B, T), -100)
    shifted[1, 2] = 7
    _, obs = vf.with_channel_loss(model, 3)(**batch, shift_labels=shifted)
    assert obs["channel", "token_count"].tolist() == [1, 0, 0]


def test_its_loss_function_may_be_wrapped_alone():
    model, batch, _ = make("llama")
    plain = model(input_ids=batch["input_ids"], labels=batch["labels"])
    objective = vf.with_channel_loss(model.loss_function, 3)
    loss, obs = objective(plain.logits, batch["labels"], V, channel=batch["channel"])
    assert loss.equal(plain.loss)
    assert obs["channel", "token_count"].tolist() == [T - 1, T - 4, 0]
