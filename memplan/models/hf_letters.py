"""From transformers' keys to memplan's letters, as far as a family has them. No torch."""

import math
from typing import Any

from memplan.errors import MemplanError
from memplan.spec.hf_family import Facts, patches
from memplan.spec.model import ConnectorSpec, DecoderSpec, Mlp, RopeScaling, VisionSpec

GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh")
"""Names of transformers for GELU by tanh."""
FUSED = ("gpt2", "gpt_neox", "phi3")
"""Types whose q, k and v come of one product."""
LAYER_NORMS = ("gpt2", "gpt_neox", "bert", "vit", "siglip_vision_model")
"""Types with LayerNorm; the others have RMSNorm."""
HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_5_text", "gemma3_text", "olmo2", "molmo2_text")
"""Types that normalise queries and keys: each head, or in OLMo 2 all of them together."""
TEXT_KEYS = ("text_config", "thinker_config", "llm_config", "language_config")
"""Where configurations of several parts keep their language model."""


def text_part(config: Facts) -> Facts:
    """The part of `config` that the letters describe: the language model, or an image encoder's tower."""
    if config.get("model_type") == "siglip":
        return dict(config["vision_config"]) | {"num_labels": config["num_labels"]}
    for key in TEXT_KEYS:
        if isinstance(config.get(key), dict):
            return dict(config[key]) | {name: value for name, value in config.items() if name == "tie_word_embeddings"}
    return config


def decoder_letters(config: Facts) -> DecoderSpec:
    """The letters of a completed configuration."""
    facts: Facts = text_part(config)
    kind = facts["model_type"]
    if kind == "gpt2":
        facts = facts | {
            "hidden_size": facts["n_embd"], "num_hidden_layers": facts["n_layer"],
            "num_attention_heads": facts["n_head"], "intermediate_size": facts["n_inner"],
            "max_position_embeddings": facts["n_positions"], "hidden_act": facts["activation_function"],
        }  # fmt: skip
    heads, width = facts["num_attention_heads"], facts["hidden_size"]
    heads_kv = int(facts.get("num_key_value_heads") or heads)
    biases = kind in ("gpt2", "bert", "vit", "siglip_vision_model")
    biased = biases or bool(facts.get("attention_bias"))
    layer = kind in LAYER_NORMS
    scale = kind.startswith("gemma")
    pixels = "image_size" in facts
    return DecoderSpec(
        num_layers=facts["num_hidden_layers"],
        hidden=width,
        num_heads=heads,
        num_kv_heads=heads_kv,
        head_dim=facts.get("head_dim", width // heads),
        ffn=facts["intermediate_size"],
        vocab=facts["num_labels"] if pixels else facts["vocab_size"],
        extra_vocab=facts.get("additional_vocab_size", 0),
        max_positions=patches(facts) + (kind == "vit") if pixels else facts["max_position_embeddings"],
        norm="layer" if layer else "rms",
        norm_bias=layer,
        norm_eps=next(facts[key] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if key in facts),
        positions="learned" if layer and kind != "gpt_neox" else "rope",
        **_rope(facts),
        mlp=_mlp(facts),
        qkv_bias=kind == "qwen2" or biased if kind != "vit" else facts["qkv_bias"],
        out_bias=biased,
        mlp_bias=biases or kind == "gpt_neox" or bool(facts.get("mlp_bias")),
        qk_norm=kind in HEAD_NORMS,
        tied=bool(facts.get("tie_word_embeddings")) and not pixels,
        projections="fused" if kind in FUSED else "separate",
        mask="dense" if kind == "molmo2_text" else "causal",
        **_experts(facts),
        norm_offset=scale or kind == "qwen3_5_text",
        sandwich=scale,
        scale_embedding=scale,
        head_softcap=facts.get("final_logit_softcapping"),
        **_windows(facts),
    )


def tower_letters(config: Facts) -> tuple[VisionSpec | None, ConnectorSpec | None, int]:
    """Tower and connector of a model that reads images beside text, and the crops of a usual sample."""
    kind = config["model_type"]
    if kind == "molmo2":
        vision, adapter = config["vision_config"], config["adapter_config"]
        layers = vision["num_hidden_layers"]
        connector = ConnectorSpec(
            hidden=adapter["hidden_size"],
            num_heads=adapter["num_attention_heads"],
            head_dim=adapter["head_dim"],
            ffn=adapter["intermediate_size"],
            pool=4,
        )
        read = tuple(layer % layers for layer in adapter["vision_feature_layer"])
        return _tower(vision, vision["head_dim"], read), connector, 4
    if kind == "gemma3":
        vision = config["vision_config"]
        side, tokens = math.isqrt(patches(vision)), math.isqrt(config["mm_tokens_per_image"])
        if side * side != patches(vision) or tokens * tokens != config["mm_tokens_per_image"] or side % tokens:
            raise MemplanError(
                f"{patches(vision)} patches do not pool into mm_tokens_per_image {config['mm_tokens_per_image']}.",
                "Both are squares, the first side a multiple of the second.",
            )
        width = vision["hidden_size"]
        pooled = ConnectorSpec(hidden=width, num_heads=0, head_dim=0, ffn=0, pool=(side // tokens) ** 2)
        read = (vision["num_hidden_layers"] - 1,)
        return _tower(vision, width // vision["num_attention_heads"], read), pooled, 1
    return None, None, 0


def plain_letters(config: Facts) -> DecoderSpec:
    """The letters of a configuration of whatever kind, by the names that most give them; 0 for what is not there."""
    facts = text_part(config)

    def number(*keys: str) -> int:
        found = (facts.get(key) for key in keys)
        return next((value for value in found if type(value) is int), 0)

    heads, hidden = number("num_attention_heads", "n_head", "num_heads"), number("hidden_size", "n_embd", "d_model")
    return DecoderSpec(
        num_layers=number("num_hidden_layers", "n_layer", "num_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim", "d_kv") or hidden // max(heads, 1),
        ffn=number("intermediate_size", "n_inner", "d_ff"),
        vocab=number("vocab_size"),
        max_positions=number("max_position_embeddings", "n_positions", "max_seq_len"),
        tied=bool(facts.get("tie_word_embeddings")),
    )


def _rope(facts: Facts) -> dict[str, Any]:
    parameters: Facts = facts.get("rope_parameters") or {}
    parameters = dict(parameters.get("full_attention", parameters))
    found: dict[str, Any] = {"rope_theta": float(parameters.get("rope_theta", 10000.0))}
    if parameters.get("rope_type") == "llama3":
        original = int(parameters.get("original_max_position_embeddings") or facts["max_position_embeddings"])
        factors = {name: float(parameters[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        found["rope_scaling"] = RopeScaling(**factors, original_max_positions=original)
    return found


def _mlp(facts: Facts) -> Mlp:
    """Gated by SiLU, or by GELU in Gemma; between two matrices elsewhere."""
    act = facts.get("hidden_activation") or facts["hidden_act"]
    if facts["model_type"].startswith("gemma"):
        return "geglu"
    if facts["model_type"] not in LAYER_NORMS:
        return "swiglu"
    return "gelu-tanh" if act in GELU_TANH else "gelu"


def _experts(facts: Facts) -> dict[str, Any]:
    count = next((facts[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in facts), 0)
    if not count:
        return {}
    width = facts.get("moe_intermediate_size", facts["intermediate_size"])
    return {"experts": count, "experts_per_token": facts["num_experts_per_tok"], "expert_ffn": width}


def _windows(facts: Facts) -> dict[str, Any]:
    """Window and period, where every so manieth layer sees all; nothing for another pattern."""
    window, layers = facts.get("sliding_window"), facts["num_hidden_layers"]
    if not window:
        return {}
    kinds = facts.get("layer_types") or ["sliding_attention"] * layers
    first = next((index for index, kind in enumerate(kinds) if kind == "full_attention"), layers)
    regular = [("full" if (index + 1) % (first + 1) == 0 else "sliding") + "_attention" for index in range(layers)]
    return {"window": window, "full_every": first + 1} if first and regular == kinds[:layers] else {}


def _tower(vision: Facts, head_dim: int, read: tuple[int, ...]) -> VisionSpec:
    return VisionSpec(
        num_layers=vision["num_hidden_layers"],
        hidden=vision["hidden_size"],
        num_heads=vision["num_attention_heads"],
        head_dim=head_dim,
        ffn=vision["intermediate_size"],
        num_patches=vision.get("num_position_embeddings") or patches(vision),
        patch_dim=vision["patch_size"] ** 2 * vision["num_channels"],
        norm_eps=vision["layer_norm_eps"],
        layers_read=read,
    )
