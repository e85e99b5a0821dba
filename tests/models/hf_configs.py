"""Small configurations of transformers' families, in which sizes that could be taken for one another differ."""

import copy
from typing import Any

from memplan.models.hf_config import spec_of, trained
from memplan.spec import DeviceSpec, ModelSpec, RunSpec, StepSpec
from memplan.spec.device import CPU
from memplan.spec.hf_facts import complete

ROPE = {"rope_type": "default", "rope_theta": 10000.0}

DECODER: dict[str, Any] = {
    "hidden_size": 160, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "vocab_size": 1000, "max_position_embeddings": 512,
    "rope_parameters": ROPE, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
"""Fields that most decoders share; attention is 192 wide, keys and values 96."""

GEMMA = {
    "sliding_window": 24, "query_pre_attn_scalar": 48, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
}
MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 40, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4,
    "rope_interleave": True,
}  # fmt: skip
"""Latent attention, one dense layer before those with experts."""


def decoder(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    """The shared fields with a family's own."""
    return DECODER | {"model_type": model_type, "architectures": [architecture]} | own


def vision(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    """An image encoder over 5 x 5 patches of 8 pixels."""
    shared = {
        "hidden_size": 144, "intermediate_size": 304, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 40, "patch_size": 8, "num_channels": 3,
    }  # fmt: skip
    return shared | {"model_type": model_type, "architectures": [architecture]} | own


def labels(count: int) -> dict[str, Any]:
    """`count` classes, as configurations name them."""
    return {
        "id2label": {str(index): f"LABEL_{index}" for index in range(count)},
        "label2id": {f"LABEL_{index}": index for index in range(count)},
    }


SMALL: dict[str, dict[str, Any]] = {
    "llama": decoder("LlamaForCausalLM", "llama"),
    "mistral": decoder("MistralForCausalLM", "mistral", sliding_window=None),
    "qwen2": decoder("Qwen2ForCausalLM", "qwen2", head_dim=40, num_key_value_heads=2, use_sliding_window=False),
    "qwen3": decoder("Qwen3ForCausalLM", "qwen3", tie_word_embeddings=True, use_sliding_window=False),
    "olmo2": decoder("Olmo2ForCausalLM", "olmo2", head_dim=40),
    "phi3": decoder("Phi3ForCausalLM", "phi3", head_dim=40, sliding_window=None, original_max_position_embeddings=512),
    "gpt_neox": decoder(
        "GPTNeoXForCausalLM", "gpt_neox", head_dim=40, num_key_value_heads=4, use_parallel_residual=True,
        attention_bias=True, hidden_act="gelu", rope_parameters=ROPE | {"partial_rotary_factor": 0.4},
    ),
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 160, "n_inner": 352, "n_layer": 3,
        "n_head": 4, "vocab_size": 1000, "n_positions": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": None, "eos_token_id": None,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 160, "intermediate_size": 352,
        "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512,
        "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "vit": vision("ViTForImageClassification", "vit", **labels(96)),
    "siglip_vision": vision("SiglipVisionModel", "siglip_vision_model"),
    "siglip": {
        "model_type": "siglip", "architectures": ["SiglipForImageClassification"], **labels(96),
        "text_config": {"hidden_size": 144, "intermediate_size": 304, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "vocab_size": 1000, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": vision("SiglipVisionModel", "siglip_vision_model"),
    },
    "gemma2": decoder(
        "Gemma2ForCausalLM", "gemma2", num_hidden_layers=4, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        **GEMMA,
    ),
    "gemma3_text": decoder("Gemma3ForCausalLM", "gemma3_text", **GEMMA | GEMMA3_LAYERS),
    "gemma3": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 4,
        "image_token_index": 992, "boi_token_index": 993, "eoi_token_index": 994, "tie_word_embeddings": True,
        "text_config": decoder("Gemma3ForCausalLM", "gemma3_text", **GEMMA | GEMMA3_LAYERS),
        "vision_config": vision(
            "SiglipVisionModel", "siglip_vision_model", image_size=32, vision_use_head=False,
        ),
    },
    "mixtral": decoder(
        "MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=3, sliding_window=None,
        intermediate_size=224,
    ),
    "qwen3_moe": decoder(
        "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=80,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False,
    ),
    "deepseek_v2": decoder("DeepseekV2ForCausalLM", "deepseek_v2", **MLA | {"q_lora_rank": 88}),
    "deepseek_v3": decoder("DeepseekV3ForCausalLM", "deepseek_v3", **MLA),
    "gpt_oss": decoder(
        "GptOssForCausalLM", "gpt_oss", num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=3,
        intermediate_size=224, sliding_window=24, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3_5_text": decoder(
        "Qwen3_5ForCausalLM", "qwen3_5_text", num_hidden_layers=4, full_attention_interval=4, tie_word_embeddings=True,
        linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=24, linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.5, "mrope_interleaved": True, "mrope_section": [4, 4, 4]},
    ),
    "molmo2": {
        "model_type": "molmo2", "architectures": ["Molmo2ForConditionalGeneration"], "tie_word_embeddings": False,
        "image_patch_id": 1002,
        "text_config": decoder(
            "Molmo2ForCausalLM", "molmo2_text", additional_vocab_size=8, use_qk_norm=True,
        ),
        "vision_config": {
            "model_type": "molmo2_vision", "hidden_size": 144, "intermediate_size": 304, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 36, "image_size": [40, 40],
            "patch_size": 8,
        },
        "adapter_config": {
            "model_type": "molmo2_adapter", "vision_feature_layer": [0, 2], "hidden_size": 144,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 36, "intermediate_size": 288,
            "text_hidden_size": 160,
        },
    },
}  # fmt: skip
"""A configuration by family, as `config.json` would have it; heads of another size than hidden / heads where it allows
them."""


def small_spec(family: str, *, layers: int = 0, tower: int = 0) -> ModelSpec:
    """The model of a small configuration; with as many blocks as asked for, their kinds going on as they began."""
    facts = copy.deepcopy(SMALL[family])
    text = facts.get("text_config", facts)
    if layers:
        if family == "siglip":
            text = facts["vision_config"]
        text["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
        if "layer_types" in text:
            kinds = text["layer_types"][:3] if family.startswith("gemma3") else text["layer_types"]
            text["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    if tower:
        facts["vision_config"]["num_hidden_layers"] = tower
        if "adapter_config" in facts:
            facts["adapter_config"]["vision_feature_layer"] = [tower - 2, tower - 1]
    return spec_of(trained(complete(facts).config, []), name=family, source="tests")


def small_run(family: str, *, device: DeviceSpec = CPU, layers: int = 0, tower: int = 0, **step: Any) -> RunSpec:
    """A small step of a small model, with an image a sample where it reads images."""
    spec = small_spec(family, layers=layers, tower=tower)
    images = int(spec.vision is not None)
    values = {"batch": 2, "seq": min(spec.seq, 32), "images": images, "workload": spec.usual_workload(images)}
    return RunSpec(model=spec, step=StepSpec(**values | {"attention": spec.usual_attention} | step), device=device)
