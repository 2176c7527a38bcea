"""Tiny random models of the mixture-of-experts families of the installed transformers, and of dense ones.

No family has a builder. A family is a directory of `transformers.models` whose source has a class of
experts; its configuration is made small field by field, by the names of the fields, and the first of its
model classes that runs on a small batch, experts included, is the one. Only what this does not reach is
in `FIELDS`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

EXPERTS = 8
BATCH, LENGTH, VOCAB = 2, 12, 64
EXPERTS_CLASS = re.compile(r"^class \w*(Experts|MoE|Moe|MOE)\(nn\.", re.MULTILINE)

# What a field of a configuration is set to: the first pattern that its whole name matches.
SMALL: tuple[tuple[str, Any], ...] = (
    (r"(moe_|n_|num_)?(num_|n_)?(routed_|local_)?experts", EXPERTS),
    (r"(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts)", 2),
    (r"zero_expert_num", 3),
    (r"(n_|num_)?(expert_)?groups?", 2),
    (r"topk_group", 1),
    (r"(num_|n_|moe_num_)shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(decoder|encoder)_sparse_step", 1),
    (r"num_sparse_(decoder|encoder)_layers", 2),
    (r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_decoder_layers|depth)", 4),
    (r"(num_|n_|encoder_|decoder_|swa_num_|index_n_)?(attention_)?heads|n_head", 4),
    (r"mamba_(n|num)_heads", 4),
    (r"mamba_head_dim", 16),
    (r"mamba_d_state|ssm_state_size", 8),
    (r"linear_num_(value_|key_)?heads", 4),
    (r"(num_|swa_num_)(key_value|kv)_heads|kv_n_heads", 4),
    (r"((qk_nope|qk_rope|v|swa|index|linear(_key|_value)?)_)?head_dim|kv_channels|d_kv|rotary_dim", 8),
    (r"(q|kv|o)_lora_rank|gated_norm_rank|loop_gate_rank|hc_lowrank", 16),
    (r"hidden_size|d_model|n_embd|embed_dim|router_hidden_size|.*_hidden_size|embedding_size", 32),
    (r".*intermediate_(size|dim)(_mlp)?|.*ffn_dim|.*ffn_hidden_size|d_ff|n_inner|share_expert_dim", 32),
    (r"vocab_size(_per_layer_input)?", VOCAB),
    (r"(max_position_embeddings|max_seq_len|n_positions|n_ctx|max_source_positions)", 64),
    (r"sliding_window(_size)?|attention_chunk_size|keep_window_size", 8),
    (r"index_topk", 4),
    (r"use_cache", False),
    (r".*(pad|start|bos)_(token_)?id", 0),
    (r".*eos_(token_)?id", 1),
    (r".*_token_(id|index)", 2),
    (r".*(dropout|dropout_rate|layerdrop|drop_rate|dropout_prob|_pdrop|jitter_noise|jitter_eps)", 0.0),
)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What the names do not tell, by family: fields of the configuration or, under a name, of one inside it.
FIELDS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "diffusion_gemma": {"moe_intermediate_size": 32},
    "doge": {"is_moe": True, "num_experts": 16},
    "ernie4_5_vl_moe": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "gemma4": {"enable_moe_block": True, "moe_intermediate_size": 32},
    "glm4v_moe": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}},
    "glm5_next": {"index_kpool": 2, "qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hy_v4_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "qwen4_exp": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "step3p7": {"sliding_window": 8, "moe_layers_enum": "1,2,3"},
    "switch_transformers": {"expert_capacity": 2},  # of 12 tokens: some are dropped
    "vitpose_backbone": {"image_size": (32, 32), "patch_size": (8, 8), "part_features": 8},
    "zaya": {"num_experts_per_tok": 1},
}
# Families without experts; some choose, sort, bucket or look up by integer in other places.
# fmt: off
DENSE = (
    "albert", "apertus", "arcee", "bart", "bert", "big_bird", "bitnet", "blenderbot", "bloom", "cohere",
    "cohere2", "deberta_v2", "distilbert", "electra", "ernie4_5", "falcon", "fnet", "gemma", "gemma2",
    "gemma3", "glm", "glm4", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "helium", "llama",
    "mamba", "mamba2", "mbart", "mistral", "mpt", "olmo", "olmo2", "opt", "pegasus", "persimmon", "phi",
    "phi3", "qwen2", "qwen3", "roberta", "smollm3", "stablelm", "starcoder2", "t5", "vit", "xlnet",
)
# fmt: on


class Case(NamedTuple):
    """One model to test with."""

    family: str
    model: PreTrainedModel
    inputs: dict[str, Tensor]


class NotBuilt(Exception):
    """No model class of the family could be made small and run; says why, for each."""


def moe_families() -> tuple[str, ...]:
    """The families whose source has a class of experts."""
    return tuple(family for family in _directories() if EXPERTS_CLASS.search(_source(family)))


def moe_model(family: str) -> Case:
    """A tiny random model of the family, in eval mode, and inputs that reach its experts.

    Raises:
        NotBuilt: with the reason for each model class that was tried.
    """
    return _first(family, _must_run_experts)


def dense_model(family: str) -> Case:
    """A tiny random model of a family without experts, in eval mode, and inputs for it.

    Raises:
        NotBuilt: with the reason for each model class that was tried.
    """
    return _first(family, _run)


def _first(family: str, check: Callable[[Case], None]) -> Case:
    reasons = []
    for kind in _model_classes(family):
        try:
            case = _case(family, kind)
            check(case)
        except Exception as error:  # of any kind: it is reported, below
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        else:
            return case
    raise NotBuilt("; ".join(reasons) or "no model class")


def _must_run_experts(case: Case) -> None:
    ran = []
    hooks = [
        module.register_forward_hook(lambda module, *_: ran.append(module))
        for module in case.model.modules()
        if EXPERTS_CLASS.match(f"class {type(module).__name__}(nn.")
    ]
    try:
        _run(case)
    finally:
        for hook in hooks:
            hook.remove()
    if not ran:
        raise RuntimeError("no experts run on text")


def _run(case: Case) -> Any:
    with torch.no_grad():
        return case.model(**case.inputs)


def _case(family: str, kind: type[PreTrainedModel]) -> Case:
    torch.manual_seed(0)
    config = small_config(kind.config_class, FIELDS.get(family, {}))
    config._attn_implementation = "eager"
    model = kind(config).eval()
    randomize_(model)
    return Case(family, model, _inputs(model))


def small_config(kind: type[PreTrainedConfig], extra: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a tiny model, with `extra` fields on top."""
    fields: dict[str, Any] = {}
    for name, default in _fields(kind).items():
        value = next((value for pattern, value in SMALL if re.fullmatch(pattern, name)), None)
        if value is not None and value != default and _is_set(name, default):
            fields[name] = value
    for name, part in (kind.sub_configs or {}).items():
        if part is not AutoConfig:
            fields[name] = small_config(part, extra.get(name, {}))
    fields |= {name: value for name, value in extra.items() if name not in (kind.sub_configs or {})}
    return kind(**fields)


def _is_set(name: str, default: Any) -> bool:
    """Whether to set a field: not one that is absent by default, unless it says how many experts or heads."""
    return isinstance(default, int | float | tuple | list) or bool(re.search(r"expert|heads|head_dim", name))


def _fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Names and defaults of what a configuration is made of."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"vocab_size"}
    names = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: default for name, default in names.items() if name not in base}


@torch.no_grad()
def randomize_(model: nn.Module) -> None:
    """Weights that route tokens apart, and correction biases and tables that change the choice."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("bias", "biases")) and buffer.is_floating_point():
            buffer.normal_(0.0, 0.1)
        elif (
            buffer.dtype == torch.int64 and buffer.dim() == 2 and len(buffer) == VOCAB
        ):  # a table from tokens to experts
            buffer.copy_(torch.rand(buffer.shape[0], EXPERTS).argsort(-1)[:, : buffer.shape[1]])


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    accepted = inspect.signature(model.forward).parameters
    tokens = torch.randint(3, VOCAB, (BATCH, LENGTH))
    if "input_ids" not in accepted:
        size = model.config.image_size
        height, width = size if isinstance(size, tuple | list) else (size, size)
        images = {"pixel_values": torch.randn(BATCH, 3, height, width)}
        return images | ({"dataset_index": torch.arange(BATCH)} if "dataset_index" in accepted else {})
    both = "decoder_input_ids" in accepted
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens.flip(1)} if both else {})


def _model_classes(family: str) -> list[type[PreTrainedModel]]:
    """Model classes of the family: those for text first."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == module.__name__
        and kind.config_class is not None
        and not kind.__name__.endswith("PreTrainedModel")
    ]
    order = (r"ForCausalLM$", r"TextModel$", r"Model$", r"ForConditionalGeneration$", r"Backbone$")

    def rank(kind: type[PreTrainedModel]) -> tuple[int, int]:
        place = next((i for i, suffix in enumerate(order) if re.search(suffix, kind.__name__)), None)
        return (len(order) if place is None else place, "vocab_size" not in _fields(kind.config_class))

    return sorted((kind for kind in kinds if rank(kind)[0] < len(order)), key=rank)


def _directories() -> tuple[str, ...]:
    root = pathlib.Path(transformers.__file__).parent / "models"
    return tuple(
        sorted(
            path.parent.name
            for path in root.glob("*/modeling_*.py")
            if path.stem == f"modeling_{path.parent.name}"
        )
    )


def _source(family: str) -> str:
    root = pathlib.Path(transformers.__file__).parent / "models"
    return (root / family / f"modeling_{family}.py").read_text(encoding="utf-8")
