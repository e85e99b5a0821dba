"""The same model in transformers: its module from a spec, and its weights under memplan's names."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.models.batch import placeholder
from memplan.spec import DecoderSpec, ModelSpec

transformers = pytest.importorskip("transformers")

Weights = dict[str, Tensor]

KINDS = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "moe": "Qwen3Moe",
    "gemma2": "Gemma2", "gemma3": "Gemma3Text",
}  # fmt: skip
"""Family to the name that transformers' classes begin with."""


def hf_decoder(name: str, spec: DecoderSpec) -> nn.Module:
    """transformers' module of the same shape, every parameter random."""
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=spec.vocab, n_positions=spec.max_positions, n_embd=spec.hidden, n_layer=spec.num_layers,
            n_head=spec.num_heads, n_inner=spec.ffn, layer_norm_epsilon=spec.norm_eps,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
        )  # fmt: skip
        return randomised(transformers.GPT2LMHeadModel(config))
    kind = KINDS[name.split("-")[0]]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        scaling = dataclasses.asdict(spec.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
        rope = {"rope_type": "llama3", "rope_theta": spec.rope_theta, **scaling}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.ffn, num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions, rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied, attn_implementation="eager", **own_fields(kind, spec, rope),
    )  # fmt: skip
    return randomised(getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config))


def own_fields(kind: str, spec: DecoderSpec, rope: dict[str, Any]) -> dict[str, Any]:
    """Fields of the configuration that only some families have, `rope` for all layers alike among them."""
    if kind == "Qwen3Moe":
        return {
            "rope_parameters": rope, "num_experts": spec.experts, "num_experts_per_tok": spec.experts_per_token,
            "moe_intermediate_size": spec.expert_ffn, "norm_topk_prob": True, "experts_implementation": "eager",
        }  # fmt: skip
    if kind.startswith("Gemma"):
        layers = ["sliding_attention" if spec.slides(index) else "full_attention" for index in range(spec.num_layers)]
        each = dict.fromkeys(("sliding_attention", "full_attention"), rope)
        return {
            "rope_parameters": each if kind == "Gemma3Text" else rope, "sliding_window": spec.window,
            "layer_types": layers, "query_pre_attn_scalar": spec.head_dim, "attn_logit_softcapping": None,
            "final_logit_softcapping": spec.head_softcap, "pad_token_id": None,
        }  # fmt: skip
    return {"rope_parameters": rope, "sliding_window": None}


def hf_molmo2(spec: ModelSpec) -> nn.Module:
    text, vision, connector = spec.decoder, spec.vision, spec.connector
    assert vision is not None
    assert connector is not None
    config = transformers.Molmo2Config(
        text_config={
            "vocab_size": text.vocab, "additional_vocab_size": text.extra_vocab, "hidden_size": text.hidden,
            "num_hidden_layers": text.num_layers, "num_attention_heads": text.num_heads,
            "num_key_value_heads": text.num_kv_heads, "head_dim": text.head_dim, "intermediate_size": text.ffn,
            "max_position_embeddings": text.max_positions, "rms_norm_eps": text.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": text.rope_theta},
        },
        vision_config={
            "hidden_size": vision.hidden, "intermediate_size": vision.ffn, "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads, "num_key_value_heads": vision.num_heads,
            "head_dim": vision.head_dim, "layer_norm_eps": vision.norm_eps, "image_size": [15, 15], "patch_size": 3,
        },
        adapter_config={
            "vision_feature_layer": list(vision.layers_read), "hidden_size": connector.hidden,
            "num_attention_heads": connector.num_heads, "num_key_value_heads": connector.num_heads,
            "head_dim": connector.head_dim, "intermediate_size": connector.ffn, "text_hidden_size": text.hidden,
        },
        image_patch_id=placeholder(spec),
        attn_implementation="eager",
    )  # fmt: skip
    return randomised(transformers.Molmo2ForConditionalGeneration(config))


def randomised(module: nn.Module) -> nn.Module:
    """`module` with norms and biases away from ones and zeros, so that each of them is seen."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        centre = 1.0 if "norm" in name or ".ln_" in name else 0.0
        centre = 0.0 if name.endswith("bias") else centre
        parameter.data = centre + 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.train()


# From transformers' names to memplan's: for weights, and by the same road for gradients


def renamed(weights: Weights, names: dict[str, str]) -> Weights:
    """`weights` under the names that `names` (ours -> theirs) gives them, biases along with their weights."""
    found = {}
    for ours, theirs in names.items():
        for end in ("", ".weight", ".bias"):
            if theirs + end in weights:
                found[ours + end] = weights[theirs + end]
    return found


def map_llama(weights: Weights, spec: DecoderSpec, prefix: str = "model.") -> Weights:
    """Llama, Qwen2, Qwen3 with experts and without, Mistral, Gemma and the text part of Molmo2."""
    names = {"norm": f"{prefix}norm", "embedding": f"{prefix}embed_tokens"}
    if not spec.tied:
        names["head"] = "lm_head"
    for layer in range(spec.num_layers):
        ours, theirs = f"blocks.{layer}.", f"{prefix}layers.{layer}."
        names |= {
            f"{ours}attn_norm": f"{theirs}input_layernorm", f"{ours}mlp_norm": f"{theirs}post_attention_layernorm",
            f"{ours}attn.q": f"{theirs}self_attn.q_proj", f"{ours}attn.k": f"{theirs}self_attn.k_proj",
            f"{ours}attn.v": f"{theirs}self_attn.v_proj", f"{ours}attn.out": f"{theirs}self_attn.o_proj",
            f"{ours}attn.q_norm": f"{theirs}self_attn.q_norm", f"{ours}attn.k_norm": f"{theirs}self_attn.k_norm",
            f"{ours}mlp.gate": f"{theirs}mlp.gate_proj", f"{ours}mlp.up": f"{theirs}mlp.up_proj",
            f"{ours}mlp.down": f"{theirs}mlp.down_proj",
        }  # fmt: skip
        if spec.experts:
            names |= {f"{ours}mlp.router": f"{theirs}mlp.gate", f"{ours}mlp.down": f"{theirs}mlp.experts.down_proj"}
            names |= {f"{ours}mlp.gate_up": f"{theirs}mlp.experts.gate_up_proj"}
        if spec.sandwich:
            names |= {
                f"{ours}attn_out_norm": f"{theirs}post_attention_layernorm",
                f"{ours}mlp_norm": f"{theirs}pre_feedforward_layernorm",
                f"{ours}mlp_out_norm": f"{theirs}post_feedforward_layernorm",
            }
    return under_decoder(renamed(weights, names), spec)


def map_gpt2(weights: Weights, spec: DecoderSpec) -> Weights:
    """GPT-2 stores its matrices as [in, out] and q, k, v side by side."""
    names = {"norm": "transformer.ln_f", "embedding": "transformer.wte", "positions": "transformer.wpe"}
    found = {}
    for layer in range(spec.num_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        names |= {f"{ours}attn_norm": f"{theirs}ln_1", f"{ours}mlp_norm": f"{theirs}ln_2"}
        for end in ("weight", "bias"):
            triple = weights[f"{theirs}attn.c_attn.{end}"].t().chunk(3)
            found |= {f"{ours}attn.{part}.{end}": one for part, one in zip("qkv", triple, strict=True)}
            for part, name in (("attn.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                found[f"{ours}{part}.{end}"] = weights[f"{theirs}{name}.{end}"].t()
    return under_decoder(found | renamed(weights, names), spec)


def under_decoder(found: Weights, spec: DecoderSpec) -> Weights:
    """`found` with the extra rows split off, fused where `spec` says so, its names under `decoder.`."""
    if spec.extra_vocab:
        found["embedding.weight"], found["embedding.extra"] = found["embedding.weight"].split(
            (spec.vocab, spec.extra_vocab)
        )
    groups = (("attn.qkv", ("attn.q", "attn.k", "attn.v")), ("mlp.gate_up", ("mlp.gate", "mlp.up")))
    for layer in range(spec.num_layers if spec.projections == "fused" else 0):
        for fused, parts in groups:
            for end in ("weight", "bias"):
                keys = [f"blocks.{layer}.{part}.{end}" for part in parts]
                if all(key in found for key in keys):
                    found[f"blocks.{layer}.{fused}.{end}"] = torch.cat([found.pop(key) for key in keys])
    return {f"decoder.{name}": one for name, one in found.items()}


def map_molmo2(weights: Weights, spec: ModelSpec) -> Weights:
    assert spec.vision is not None
    names = {"vision.patch": "model.vision_tower.patch_embedding"}
    names["vision.positions"] = "model.vision_tower.positional_embedding"
    attention = [("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj")]
    for layer in range(spec.vision.num_layers):
        ours, theirs = f"vision.blocks.{layer}.", f"model.vision_tower.layers.{layer}."
        names |= {f"{ours}attn_norm": f"{theirs}layer_norm1", f"{ours}mlp_norm": f"{theirs}layer_norm2"}
        names |= {f"{ours}mlp.up": f"{theirs}mlp.fc1", f"{ours}mlp.down": f"{theirs}mlp.fc2"}
        names |= {f"{ours}attn.{one}": f"{theirs}self_attn.{other}" for one, other in attention}
    theirs = "model.multi_modal_projector."
    names |= {f"connector.pooling.{one}": f"{theirs}image_pooling_2d.{other}" for one, other in attention}
    for part in ("gate", "up", "down"):
        names[f"connector.projector.{part}"] = f"{theirs}image_projector.{part}_proj"
    return renamed(weights, names) | map_llama(weights, spec.decoder, "model.language_model.")
