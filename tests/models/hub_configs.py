"""Configurations as they lie on the Hugging Face Hub, old keys and all, with the letters that they mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MemplanError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip

HUB: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 8960,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 12,
        "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "quantization_config": {"quant_method": "fp8"}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4,
        "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                          "patch_size": 14, "vision_use_head": False},
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "gpt_neox": {
        "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 8192,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8,
        "num_hidden_layers": 16, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "use_parallel_residual": True, "vocab_size": 50304,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True}}, "vocab_size": 50257,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"], "gradient_checkpointing": False, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2, "vocab_size": 30522,
    },
    "molmo2": {
        "architectures": ["Molmo2ForConditionalGeneration"], "model_type": "molmo2", "dtype": "float32",
        "tie_word_embeddings": False, "use_frame_special_tokens": True, "image_col_id": 151939,
        "text_config": {
            "model_type": "molmo2_text", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "additional_vocab_size": 128, "qkv_bias": False,
            "num_hidden_layers": 36, "intermediate_size": 9728, "hidden_act": "silu", "embedding_dropout": 0.0,
            "max_position_embeddings": 36864, "rope_theta": 5000000.0, "rope_scaling": None,
            "rope_scaling_layers": None, "use_qk_norm": True, "qk_norm_type": "qwen3", "layer_norm_eps": 1e-06,
            "norm_after": False,
        },
        "vit_config": {
            "model_type": "molmo2", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-06, "image_default_input_size": [378, 378], "image_patch_size": 14,
            "image_num_pos": 729, "residual_dropout": 0.0, "float32_attention": True,
        },
        "adapter_config": {
            "vit_layers": [-3, -9], "pooling_attention_mask": True, "hidden_size": 1152, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 72, "hidden_act": "silu", "intermediate_size": 9728,
            "text_hidden_size": 2560, "image_feature_dropout": 0.0, "float32_attention": True,
        },
    },
}  # fmt: skip
"""By model type, as downloaded. Source: Llama-3.1-8B, Mistral-7B-v0.1, Qwen2.5-Coder-1.5B, Qwen3-30B-A3B, DeepSeek-V3,
gemma-3-4b-it, Phi-3-mini-4k-instruct, pythia-1b, gpt2, bert-base-uncased, Molmo2-4B."""

LETTERS: dict[str, tuple[int, ...]] = {
    "llama": (32, 4096, 32, 8, 128, 14336, 128256, 131072, 0, 4096),
    "mistral": (32, 4096, 32, 8, 128, 14336, 32000, 32768, 4096, 4096),
    "qwen2": (28, 1536, 12, 2, 128, 8960, 151936, 32768, 0, 4096),
    "qwen3_moe": (48, 2048, 32, 4, 128, 6144, 151936, 40960, 0, 4096),
    "deepseek_v3": (61, 7168, 128, 128, 64, 18432, 129280, 163840, 0, 4096),
    "gemma3": (34, 2560, 8, 4, 256, 10240, 262208, 131072, 1024, 4096),
    "phi3": (32, 3072, 32, 32, 96, 8192, 32064, 4096, 2047, 4096),
    "gpt_neox": (16, 2048, 8, 8, 256, 8192, 50304, 2048, 0, 2048),
    "gpt2": (12, 768, 12, 12, 64, 3072, 50257, 1024, 0, 1024),
    "bert": (12, 768, 12, 12, 64, 3072, 30522, 512, 0, 512),
    "molmo2": (36, 2560, 32, 8, 128, 9728, 151936, 36864, 0, 4096),
}
"""Layers, hidden, heads, key/value heads, head size, feed-forward, vocabulary, positions, window and usual length."""


def written(folder: Path, config: Any, name: str = "config.json") -> str:
    """Path of a file of `config`, JSON or raw text, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder / name)


def refusal(call: Any, *words: Any, **options: Any) -> str:
    with pytest.raises(MemplanError) as caught:
        call(*words, **options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)
