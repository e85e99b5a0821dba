"""Names of keys of transformers' configurations: which could change shapes, and which are known to change none."""

import re

SHAPE_NAMES = re.compile(
    r"(_size|_dim|_dims|_rank|_heads|_layers|_layer|_interval|_width|_experts|_config)$|^(num|n|use|has|add)_|bias|expert"
    r"|moe|attn|attention|rope|rotary|partial|hidden|ffn|mlp|norm|embed|window|conv|mamba|ssm|mtp"
)
"""Names of keys that could change shapes or add modules."""
HARMLESS = re.compile(
    r"^_|_token_ids?$|_token_index$|_tokens$|_token$|dropout|pdrop|droppath|drop_path|dtype|initializer|^summary_"
    r"|aux_loss|seq_aux|^pooler_|^transformers|^output_|router_.*_coef|^attn_implementation$|^attn_config$"
)
"""Names of keys that change no shape: token ids, probabilities of dropping what the family does not drop, initial
values, what is returned beside."""
GENERATION = frozenset((
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "remove_invalid_values", "exponential_decay_length_penalty", "cache_implementation",
))  # fmt: skip
MULTI_TOKEN = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Numbers of layers that transformers builds for no training step."""
NOTHING = frozenset((
    "architectures", "model_type", "auto_map", "transformers_version", "use_cache", "return_dict",
    "return_dict_in_generate", "torchscript", "use_bfloat16", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "is_encoder_decoder", "is_decoder",
    "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder", "chunk_size_feed_forward",
    "gradient_checkpointing", "pretraining_tp", "use_flash_attn", "use_cpu_initialization", "n_special",
    "predict_special_tokens", "encoder_stride", "classifier_dropout", "quantization_config", "initial_context_length",
    "name_or_path", "unsloth_version", "unsloth_fixed", "hidden_act", "max_window_layers", "full_attn_mod",
    "interpolate_factor", "mtp_use_dedicated_embeddings", *MULTI_TOKEN,
))  # fmt: skip
"""Keys that are known to change nothing in a step, or that are read elsewhere."""
FOREIGN = frozenset((
    "is_llama_config", "rope_interleaved", "use_resampler", "qk_layer_norms",
    "dual_chunk_attention_config", "sparse_attention_config",
    "use_unsloth_gradient_checkpointing", "use_reentrant_checkpointing",
))  # fmt: skip
"""Keys of other libraries' code in configurations of these families, of which transformers reads nothing: nanotron's
(SmolLM, SmolLM2), vLLM's (Qwen2.5-1M, Qwen3-2507), trainers'. Source: they stand in no `configuration_*.py` and no
`modeling_*.py` of the families of transformers 5.24, as a test holds."""
RETURNED = ("output_hidden_states", "output_attentions")
"""What a model would return beside its last hidden states, of which a step reads nothing."""
EXPERTS = ("experts_implementation", "_experts_implementation")
"""Which code of transformers runs experts."""
EXPERTS_CODE = "grouped_mm"
"""The one that transformers takes where nobody asks for another, and that the formulas know."""
QUIET = frozenset((
    "pooler_output_size", "query_pre_attn_scalar", "no_rope_layer_interval", "sliding_window_pattern",
    "full_attention_interval", "max_window_layers", "image_token_index", "image_token_id", "image_patch_id",
    "decoder_sparse_step", "num_channels", "num_labels", "original_max_position_embeddings", "mm_tokens_per_image",
))  # fmt: skip
"""Keys whose defaults are not worth a word."""
NULLABLE = frozenset(("sliding_window", "q_lora_rank", "n_group", "topk_group"))
"""Whole numbers that may be null; soft caps may be too."""
