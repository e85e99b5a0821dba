"""The same model in memplan's own modules and in transformers': from letters to a configuration, and back where
memplan's decoder can be just what the configuration says. No torch."""

import dataclasses
from typing import Any

from memplan.errors import MemplanError
from memplan.models.hf_config import canonical
from memplan.models.hf_letters import GELU_TANH, decoder_letters, text_part
from memplan.spec.hf_facts import complete
from memplan.spec.hf_family import Facts
from memplan.spec.model import DecoderSpec, ModelSpec

REFERENCE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gpt2", "mixtral", "qwen3_moe", "gemma2",
             "gemma3_text", "molmo2")  # fmt: skip
"""Types that memplan's decoder can be, where nothing in the configuration speaks against it."""
ROTATIONS = ("default", "llama3")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
"""Families of built-in models whose letters say all that transformers' configuration of the same type asks."""


def as_reference(spec: ModelSpec, config: Facts) -> ModelSpec:
    """`spec`, whose completed configuration is `config`, in memplan's own modules; MemplanError where they cannot be
    just that."""
    reason = _against(config)
    if reason:
        raise MemplanError(f"memplan's own modules cannot be {spec.name}: {reason}.", "Leave --impl out.")
    decoder = decoder_letters(config)
    if config["model_type"] in ("phi3", "mistral", "mixtral") and decoder.window >= decoder.max_positions:
        decoder = dataclasses.replace(decoder, window=0, full_every=1)
    return dataclasses.replace(spec, decoder=decoder, impl="memplan", config="")


def as_hf(spec: ModelSpec) -> ModelSpec:
    """A built-in model of memplan's own as transformers builds it; MemplanError where its letters say more than
    transformers has."""
    facts = _molmo2(spec) if spec.family == "molmo2" else _decoder(spec)
    config = complete(facts, spec.name).config
    back = decoder_letters(config)
    kept = {name: getattr(spec.decoder, name) for name in ("mask", "projections")}
    if dataclasses.replace(back, **kept) != spec.decoder:
        changed = next(
            field.name
            for field in dataclasses.fields(DecoderSpec)
            if field.name not in kept and getattr(back, field.name) != getattr(spec.decoder, field.name)
        )
        raise MemplanError(
            f"transformers' {facts['model_type']} cannot be {spec.name}: {changed} is "
            f"{getattr(spec.decoder, changed)!r}.",
            "Leave --impl out.",
        )
    return dataclasses.replace(spec, decoder=back, impl="hf", config=canonical(config))


def _against(config: Facts) -> str:
    """What in `config` memplan's modules do not have, in words."""
    kind, facts = config["model_type"], text_part(config)
    if kind not in REFERENCE:
        return f"they have no {kind}"
    rotation = facts.get("rope_parameters", {})
    each = [rotation] if "rope_type" in rotation else [*rotation.values()]
    wanted: dict[str, Any] = {
        "attn_logit_softcapping": None, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "router_jitter_noise": 0.0, "qk_norm_type": "qwen3", "norm_after": False, "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
        "rope_scaling_layers": list(range(facts.get("num_hidden_layers", 0))),
        "no_rope_layers": [1] * facts.get("num_hidden_layers", 0),
        "query_pre_attn_scalar": facts.get("head_dim"),
    }  # fmt: skip
    for key, value in wanted.items():
        if key in facts and facts[key] != value:
            return f"{key} is {facts[key]!r}"
    act = facts.get("hidden_act") or facts.get("hidden_activation") or facts.get("activation_function")
    known = ("gelu", *GELU_TANH) if kind == "gpt2" else GELU_TANH if kind.startswith("gemma") else ("silu", "swish")
    if act not in known:
        return f"the activation is {act!r}"
    if any(part["rope_type"] not in ROTATIONS or part.get("partial_rotary_factor", 1.0) != 1.0 for part in each):
        return f"rope_parameters are {rotation}"
    if any(part != each[0] for part in each):
        return "its sliding layers rotate by another base"
    slides = {"sliding_attention"} & set(facts.get("layer_types", ()))
    if slides and not decoder_letters(config).window:
        return "its sliding layers follow no period"
    return ""


def _decoder(spec: ModelSpec) -> Facts:
    """Keys of a decoder's configuration."""
    decoder = spec.decoder
    if spec.family == "gpt2":
        return {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": decoder.vocab,
            "n_positions": decoder.max_positions, "n_embd": decoder.hidden, "n_layer": decoder.num_layers,
            "n_head": decoder.num_heads, "n_inner": decoder.ffn, "layer_norm_epsilon": decoder.norm_eps,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": decoder.tied,
        }  # fmt: skip
    if spec.family not in ARCHITECTURES:
        raise MemplanError(f"transformers has nothing that is just {spec.name}.", "Leave --impl out.")
    facts = _text(decoder) | {"model_type": spec.family, "architectures": [ARCHITECTURES[spec.family]]}
    if spec.family in ("llama", "qwen3"):
        facts |= {"attention_bias": decoder.qkv_bias}
    if spec.family == "llama":
        facts |= {"mlp_bias": decoder.mlp_bias}
    if spec.family == "mistral":
        facts |= {"sliding_window": decoder.window or None}
    if spec.family == "qwen3_moe":
        facts |= {
            "num_experts": decoder.experts, "num_experts_per_tok": decoder.experts_per_token,
            "moe_intermediate_size": decoder.expert_ffn, "norm_topk_prob": True,
        }  # fmt: skip
    return facts


def _text(decoder: DecoderSpec) -> Facts:
    rope: Facts = {"rope_type": "default", "rope_theta": decoder.rope_theta}
    if decoder.rope_scaling is not None:
        scaling = dataclasses.asdict(decoder.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
        rope |= {"rope_type": "llama3"} | scaling
    return {
        "vocab_size": decoder.vocab, "hidden_size": decoder.hidden, "intermediate_size": decoder.ffn,
        "num_hidden_layers": decoder.num_layers, "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads, "head_dim": decoder.head_dim, "rms_norm_eps": decoder.norm_eps,
        "max_position_embeddings": decoder.max_positions, "rope_parameters": rope, "tie_word_embeddings": decoder.tied,
    }  # fmt: skip


def _molmo2(spec: ModelSpec) -> Facts:
    """Keys of Molmo2's configuration; MemplanError for the trainer's form, whose head is tied."""
    vision, connector, decoder = spec.vision, spec.connector, spec.decoder
    assert vision is not None
    assert connector is not None
    if decoder.tied:
        raise MemplanError(
            f"{spec.name} ties its head to its embedding, which transformers' Molmo2 does not.",
            "Type --model molmo2-4b-hf --impl hf." if spec.name.startswith("molmo2") else "Leave --impl out.",
        )
    side, patch = int(vision.num_patches**0.5), int((vision.patch_dim // 3) ** 0.5)
    return {
        "model_type": "molmo2", "architectures": ["Molmo2ForConditionalGeneration"], "tie_word_embeddings": False,
        "image_patch_id": decoder.vocab + min(2, decoder.extra_vocab - 1),
        "text_config": _text(decoder) | {"additional_vocab_size": decoder.extra_vocab},
        "vision_config": {
            "hidden_size": vision.hidden, "intermediate_size": vision.ffn, "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads, "num_key_value_heads": vision.num_heads,
            "head_dim": vision.head_dim, "layer_norm_eps": vision.norm_eps, "patch_size": patch,
            "image_size": [side * patch, side * patch],
        },
        "adapter_config": {
            "vision_feature_layer": list(vision.layers_read), "hidden_size": connector.hidden,
            "num_attention_heads": connector.num_heads, "num_key_value_heads": connector.num_heads,
            "head_dim": connector.head_dim, "intermediate_size": connector.ffn, "text_hidden_size": decoder.hidden,
        },
    }  # fmt: skip
