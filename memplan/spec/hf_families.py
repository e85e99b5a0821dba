"""Families of transformers' models: the keys of their configurations that decide shapes, ops or numbers, each with what
transformers takes where a configuration does not say it.

Source: `configuration_*.py` and `modeling_*.py` of transformers 5.24; a test holds every default against the classes.
"""

from typing import Any

from memplan.spec.hf_family import (
    Facts,
    Family,
    by_mode,
    by_pattern,
    every_second,
    head_width,
    heads,
    hybrid,
    late_windows,
    patches,
    rope_width,
    rotated,
    unrotated_windows,
)  # fmt: skip


def _llama(ffn: int, heads_kv: Any, positions: int, vocab: int = 32000, eps: float = 1e-6, **own: Any) -> Facts:
    """The keys that Llama and most later decoders share."""
    shared = {
        "vocab_size": vocab, "hidden_size": 4096, "intermediate_size": ffn, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": heads_kv, "head_dim": head_width, "hidden_act": "silu",
        "max_position_embeddings": positions, "rms_norm_eps": eps, "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }  # fmt: skip
    return shared | own


_QWEN_WINDOW: Facts = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": by_mode(late_windows),
}  # fmt: skip
_ENCODER = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
}  # fmt: skip
_GEMMA = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "head_dim": rope_width,
}  # fmt: skip
_LATENT_ONLY = {
    "moe_layer_freq": 1, "ep_size": 1, "head_dim": rope_width,
    "qk_head_dim": lambda facts: facts["qk_nope_head_dim"] + facts["qk_rope_head_dim"], "output_router_logits": False,
}  # fmt: skip
_LOGITS_ONLY = {"output_router_logits": False}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        keys=_llama(11008, heads, 2048, attention_bias=False, mlp_bias=False),
        trains=("LlamaForCausalLM",), theta=10000.0, divides=True,
    ),
    "mistral": Family(
        keys=_llama(14336, 8, 131072, sliding_window=4096), trains=("MistralForCausalLM",), theta=10000.0,
    ),
    "qwen2": Family(
        keys=_llama(22016, 32, 32768, 151936, **_QWEN_WINDOW), trains=("Qwen2ForCausalLM",), theta=10000.0,
        only={"use_mrope": False},
    ),
    "qwen3": Family(
        keys=_llama(22016, 32, 32768, 151936, head_dim=128, attention_bias=False, **_QWEN_WINDOW),
        trains=("Qwen3ForCausalLM",), theta=10000.0,
    ),
    "smollm3": Family(
        keys=_llama(
            11008, 4, 32768, 128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16,
            tie_word_embeddings=True, attention_bias=False, mlp_bias=False, use_sliding_window=False,
            sliding_window=None, no_rope_layer_interval=4, no_rope_layers=rotated,
            layer_types=by_mode(unrotated_windows),
        ),
        trains=("SmolLM3ForCausalLM",), theta=2000000.0,
    ),
    "olmo2": Family(
        keys=_llama(11008, heads, 2048, 50304, 1e-5, attention_bias=False), trains=("Olmo2ForCausalLM",), theta=10000.0,
    ),
    "phi3": Family(
        keys=_llama(
            8192, heads, 4096, 32064, 1e-5, hidden_size=3072, original_max_position_embeddings=4096,
            sliding_window=None, resid_pdrop=0.0, embd_pdrop=0.0,
        ),
        trains=("Phi3ForCausalLM",), theta=10000.0, rotary=1.0,
        only={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
    ),
    "gpt_neox": Family(
        keys={
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
            "intermediate_size": 24576, "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0,
            "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
            "use_parallel_residual": True, "attention_bias": True,
        },
        trains=("GPTNeoXForCausalLM",), theta=10000.0, rotary=0.25, divides=True,
        aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        only={"is_decoder": False, "num_key_value_heads": heads, "head_dim": head_width},
    ),
    "gpt2": Family(
        keys={
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_inner": lambda facts: 4 * facts["n_embd"], "activation_function": "gelu_new", "resid_pdrop": 0.1,
            "embd_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "tie_word_embeddings": True,
        },
        trains=("GPT2LMHeadModel",), width="n_embd", depth="n_layer", divides=True,
        aliases={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        only={"add_cross_attention": False, "n_ctx": lambda facts: facts["n_positions"]},
    ),
    "bert": Family(
        keys=_ENCODER | {
            "vocab_size": 30522, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
            "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "tie_word_embeddings": True,
        },
        trains=("BertForMaskedLM",), divides=True,
        only={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute",
              "chunk_size_feed_forward": 0},
    ),
    "vit": Family(
        keys=_ENCODER | {
            "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True,
            "pooler_output_size": lambda facts: facts["hidden_size"], "pooler_act": "tanh", "num_labels": 2,
        },
        trains=("ViTForImageClassification",), divides=True,
    ),
    "siglip_vision_model": Family(
        keys=_ENCODER | {
            "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6, "attention_dropout": 0.0, "vision_use_head": True, "num_labels": 2,
        },
        trains=("SiglipForImageClassification",), divides=True, needed=False,
    ),
    "siglip_text_model": Family(
        keys=_ENCODER | {
            "vocab_size": 32000, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6, "attention_dropout": 0.0, "projection_size": lambda facts: facts["hidden_size"],
        },
        divides=True, needed=False,
    ),
    "siglip": Family(
        keys={"num_labels": 2}, trains=("SiglipForImageClassification",),
        parts={"text_config": "siglip_text_model", "vision_config": "siglip_vision_model"},
    ),
    "gemma2": Family(
        keys=_GEMMA | {
            "vocab_size": 256000, "max_position_embeddings": 8192, "layer_types": by_mode(every_second),
            "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        },
        trains=("Gemma2ForCausalLM",), theta=10000.0, divides=True, only={"use_bidirectional_attention": None},
    ),
    "gemma3_text": Family(
        keys=_GEMMA | {
            "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6,
            "layer_types": by_mode(by_pattern), "final_logit_softcapping": None, "attn_logit_softcapping": None,
        },
        trains=("Gemma3ForCausalLM",), theta=1000000.0, divides=True, only={"use_bidirectional_attention": False},
    ),
    "gemma3": Family(
        keys={"mm_tokens_per_image": 256, "image_token_index": 262144, "tie_word_embeddings": True},
        trains=("Gemma3ForConditionalGeneration",), aliases={"image_token_id": "image_token_index"},
        parts={"text_config": "gemma3_text", "vision_config": "siglip_vision_model"},
    ),
    "mixtral": Family(
        keys=_llama(
            14336, 8, 131072, eps=1e-5, sliding_window=None, num_experts_per_tok=2, num_local_experts=8,
            router_jitter_noise=0.0,
        ),
        trains=("MixtralForCausalLM",), theta=1000000.0, aliases={"num_experts": "num_local_experts"},
        only=_LOGITS_ONLY,
    ),
    "qwen3_moe": Family(
        keys=_llama(
            6144, 4, 32768, 151936, hidden_size=2048, num_hidden_layers=24, attention_bias=False,
            use_sliding_window=False, sliding_window=4096, decoder_sparse_step=1, moe_intermediate_size=768,
            num_experts_per_tok=8, num_experts=128, norm_topk_prob=False, mlp_only_layers=lambda facts: [],
        ),
        trains=("Qwen3MoeForCausalLM",), theta=10000.0, aliases={"num_local_experts": "num_experts"},
        only=_LOGITS_ONLY,
    ),
    "deepseek_v2": Family(
        keys=_llama(11008, heads, 2048, 102400, attention_bias=False, mlp_bias=False) | _LATENT | {
            "first_k_dense_replace": 0, "n_group": None, "n_routed_experts": 64, "n_shared_experts": 2,
            "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False,
            "num_experts_per_tok": None, "moe_intermediate_size": 1407,
        },
        trains=("DeepseekV2ForCausalLM",), theta=10000.0, divides=True, aliases={"num_experts": "n_routed_experts"},
        only=_LATENT_ONLY | {"scoring_func": "softmax"},
    ),
    "deepseek_v3": Family(
        keys=_llama(18432, 128, 4096, 129280, attention_bias=False) | _LATENT | {
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "moe_intermediate_size": 2048,
            "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8,
            "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
            "rope_interleave": True,
        },
        trains=("DeepseekV3ForCausalLM",), theta=10000.0, aliases={"num_local_experts": "n_routed_experts"},
        only=_LATENT_ONLY | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "gpt_oss": Family(
        keys=_llama(
            2880, 8, 131072, 201088, 1e-5, num_hidden_layers=36, hidden_size=2880, num_attention_heads=64, head_dim=64,
            sliding_window=128, layer_types=by_mode(every_second), attention_bias=True, num_local_experts=128,
            num_experts_per_tok=4, swiglu_alpha=1.702, swiglu_limit=7.0,
        ),
        trains=("GptOssForCausalLM",), theta=150000.0, aliases={"num_experts": "num_local_experts"},
        only=_LOGITS_ONLY | {"experts_per_token": lambda facts: facts["num_experts_per_tok"]},
    ),
    "qwen3_5_text": Family(
        keys=_llama(
            12288, 4, 32768, 248320, num_attention_heads=16, head_dim=256, attention_bias=False,
            linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
            linear_num_value_heads=32, full_attention_interval=4, layer_types=by_mode(hybrid),
        ),
        trains=("Qwen3_5ForCausalLM",), theta=10000.0, rotary=0.25,
        only={"attn_output_gate": True, "mlp_only_layers": []},
    ),
    "qwen3_5_vision": Family(
        keys={
            "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304,
            "num_heads": 16, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": 3584, "num_position_embeddings": 2304,
        },
        depth="depth", aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
        only={"deepstack_visual_indexes": []},
    ),
    "qwen3_5": Family(
        keys={"image_token_id": 248056, "tie_word_embeddings": False}, trains=("Qwen3_5ForConditionalGeneration",),
        parts={"text_config": "qwen3_5_text", "vision_config": "qwen3_5_vision"},
    ),
    "molmo2_text": Family(
        keys=_llama(
            12288, 8, 36864, 151936, num_hidden_layers=36, head_dim=128, additional_vocab_size=128,
            attention_bias=False, qk_norm_type="qwen3", norm_after=False,
            rope_scaling_layers=lambda facts: list(range(facts["num_hidden_layers"])),
        ),
        theta=10000.0, aliases={"qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"},
        only={"use_qk_norm": True},
    ),
    "molmo2_vision": Family(
        keys={
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 25, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 72, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
            "image_size": lambda facts: [378, 378], "patch_size": 14, "num_channels": 3, "attention_dropout": 0.0,
            "attention_bias": True, "num_position_embeddings": patches,
        },
        aliases={
            "image_default_input_size": "image_size", "image_patch_size": "patch_size",
            "image_num_pos": "num_position_embeddings",
        },
        only={"float32_attention": True},
    ),
    "molmo2_adapter": Family(
        keys={
            "hidden_size": 1152, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
            "attention_dropout": 0.0, "attention_bias": True, "hidden_act": "silu", "intermediate_size": 18944,
            "text_hidden_size": 3584, "mlp_bias": False, "vision_feature_layer": lambda facts: [24, 18],
        },
        depth="", aliases={"vit_layers": "vision_feature_layer"},
        only={"float32_attention": True, "pooling_attention_mask": True},
    ),
    "molmo2": Family(
        keys={"image_patch_id": 151938, "tie_word_embeddings": False}, trains=("Molmo2ForConditionalGeneration",),
        aliases={"vit_config": "vision_config", "image_token_id": "image_patch_id"},
        parts={"text_config": "molmo2_text", "vision_config": "molmo2_vision", "adapter_config": "molmo2_adapter"},
    ),
}  # fmt: skip
"""Model type to what is known of it."""
