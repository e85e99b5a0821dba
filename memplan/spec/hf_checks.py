"""What a completed configuration must agree on: kinds of values, heads that divide, as many kinds as layers."""

from typing import Any

from memplan.errors import MemplanError
from memplan.spec.hf_family import Facts, Family

ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "laplace",
    "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
"""Names that transformers 5.24 has a function for, those without parameters of their own."""
LISTS = (
    "layer_types", "no_rope_layers", "rope_scaling_layers", "mlp_only_layers", "vision_feature_layer", "vit_layers",
)  # fmt: skip
SIDES = ("image_size", "patch_size")
"""One number, or height and width."""
FROM_ZERO = (
    "first_k_dense_replace", "additional_vocab_size", "max_window_layers", "image_token_index", "image_token_id",
    "image_patch_id",
)  # fmt: skip
"""Whole numbers that may be 0."""
LARGEST = 2**31 - 1
MOST_LAYERS = 10_000
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")


def check_value(key: str, value: Any, default: Any, where: str) -> None:
    """MemplanError when `value` is of another kind than `default`; null is judged by the caller."""
    name = key.rpartition(".")[2]
    if value is None:
        return
    if name in LISTS:
        if not isinstance(value, list):
            raise MemplanError(f"{key} in {where} is {value!r}, not a list.")
        if any(type(item) not in ((str,) if name == "layer_types" else (int,)) for item in value):
            raise MemplanError(f"{key} in {where} has {value!r}, which names no layers.")
    elif name in SIDES and isinstance(value, list):
        if len(value) != 2:
            raise MemplanError(f"{key} in {where} is {value!r}, neither one number nor two.")
        for side in value:
            _check_whole(key, side, 1, where)
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise MemplanError(f"{key} in {where} is {value!r}, neither true nor false.")
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise MemplanError(f"{key} in {where} is {value!r}, not text.")
        if name in ("hidden_act", "hidden_activation", "activation_function") and value not in ACTIVATIONS:
            raise MemplanError(f"{key} in {where} is {value!r}, an activation that is not known.")
    elif isinstance(default, float) or name.endswith("softcapping"):
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise MemplanError(f"{key} in {where} is {value!r}, not a number.")
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and not 0 <= value < 1:
            raise MemplanError(f"{key} in {where} is {value!r}; a probability of dropping is from 0 to below 1.")
    else:
        _check_whole(key, value, 0 if name in FROM_ZERO else 1, where)


def _check_whole(key: str, value: Any, least: int, where: str) -> None:
    name = key.rpartition(".")[2]
    most = MOST_LAYERS if name in ("num_hidden_layers", "n_layer", "depth") else LARGEST
    if type(value) is not int:
        raise MemplanError(f"{key} in {where} is {value!r}, not a whole number.")
    if not least <= value <= most:
        raise MemplanError(f"{key} in {where} is {value}; it must be from {least} to {most:,}.")


def check_heads(kind: str, family: Family, values: Facts, prefix: str, where: str) -> None:
    """MemplanError for the first two keys of `values` that do not go together."""
    heads_key = next((key for key in ("num_attention_heads", "n_head", "num_heads") if key in values), None)
    if heads_key is not None:
        heads, width = values[heads_key], values[family.width]
        derived = "head_dim" not in values or values["head_dim"] == width // heads
        if width % heads and (family.divides or derived):
            raise MemplanError(
                f"{where}: {prefix}{family.width} {width} does not divide into {heads} heads.",
                f"Change {family.width} or {heads_key}.",
            )
        _divides(values, heads_key, "num_key_value_heads", prefix, where)
    _divides(values, "linear_num_value_heads", "linear_num_key_heads", prefix, where)
    _divides(values, "n_routed_experts", "n_group", prefix, where)
    experts = next(
        (values[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in values), 0
    )
    if experts:
        chosen = values["num_experts_per_tok"]
        if chosen is None:
            raise MemplanError(f"{where} does not say {prefix}num_experts_per_tok, which has no default.")
        if chosen > experts:
            raise MemplanError(f"{where}: {prefix}num_experts_per_tok is {chosen}, of {experts} experts.")
        if (values.get("topk_group") or 1) > (values.get("n_group") or values.get("topk_group") or 1):
            raise MemplanError(f"{where}: {prefix}topk_group {values['topk_group']} of {values['n_group']} groups.")
    layers = values.get(family.depth, 0)
    for key in ("layer_types", "no_rope_layers"):
        if key in values and len(values[key]) < layers:
            raise MemplanError(f"{where}: {prefix}{key} names {len(values[key])} layers of {layers}.")
    for name in values.get("layer_types", ()):
        if name not in LAYER_TYPES:
            raise MemplanError(f"{where}: {prefix}layer_types has {name!r}, which is not known.")
    if "image_size" in values:
        sides = [value if isinstance(value, list) else [value] * 2 for value in (values[key] for key in SIDES)]
        if any(image < patch for image, patch in zip(*sides, strict=True)):
            raise MemplanError(f"{where}: {prefix}patch_size {values['patch_size']} is larger than the image.")


def _divides(values: Facts, many: str, few: str, prefix: str, where: str) -> None:
    if many in values and values.get(few) and values[many] % values[few]:
        raise MemplanError(
            f"{where}: {prefix}{many} {values[many]} is no multiple of {few} {values[few]}.", f"Change {few}."
        )
