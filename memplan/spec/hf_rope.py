"""Rotary embeddings as configurations say them, old keys and new ones, in the form that transformers 5 keeps."""

from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.spec.hf_family import Facts, Family

ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq", "rope_interleave",
    "original_max_position_embeddings",
)  # fmt: skip
LOCAL_THETA = 10000.0
"""Base of the sliding layers of Gemma 3, transformers 5.24."""
FACTORS: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}  # fmt: skip
"""Types that transformers 5.24 has code for, with what it cannot do without. Source: modeling_rope_utils.py."""
GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""What gpt-oss has where its configuration says nothing, transformers 5.24."""


def rope_parameters(kind: str, family: Family, said: Facts, values: Facts, prefix: str, where: str) -> Facts:
    """`rope_parameters` of the family `kind`, by layer type for Gemma 3: rescaling, base, part of a head."""
    given = _object(said, "rope_parameters", prefix, where)
    scaling = _object(said, "rope_scaling", prefix, where)
    theta = _number(said, "rope_theta", family.theta, prefix, where)
    if kind == "gemma3_text":
        nested = given if {"full_attention", "sliding_attention"} & given.keys() else {"full_attention": given}
        local = _number(said, "rope_local_base_freq", LOCAL_THETA, prefix, where)
        full = dict(nested.get("full_attention") or {}) | scaling
        for part in (_plain(full), _plain(dict(nested.get("sliding_attention") or {}))):
            _check_type(part, prefix, where)
        return {
            "full_attention": _plain(full) | {"rope_theta": full.get("rope_theta", theta)},
            "sliding_attention": {"rope_type": "default", "rope_theta": local}
            | dict(nested.get("sliding_attention") or {}),
        }
    found = _plain(scaling or given or (GPT_OSS if kind == "gpt_oss" else {}))
    found.setdefault("rope_theta", theta)
    part = found.get("partial_rotary_factor", _number(said, "partial_rotary_factor", family.rotary, prefix, where))
    if family.rotary is None:
        if part not in (None, 1.0):
            raise MemplanError(f"{prefix}partial_rotary_factor in {where} is {part!r}, which {kind} does not have.")
    else:
        found["partial_rotary_factor"] = part
        if type(part) not in (int, float) or not 0 < part <= 1:
            raise MemplanError(f"{prefix}partial_rotary_factor in {where} is {part!r}; it is above 0, 1 at most.")
    if kind == "phi3" and found["rope_type"] in ("su", "yarn"):
        found["rope_type"] = "longrope"
    _check_type(found, prefix, where)
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    turned = int(width * (part or 1.0))
    if turned % 2 or not turned:
        raise MemplanError(f"{where}: {turned} elements of each of {prefix}head_dim {width} turn; they turn in pairs.")
    for key in FACTORS["longrope"] if found["rope_type"] == "longrope" else ():
        if not isinstance(found[key], list) or len(found[key]) != turned // 2:
            raise MemplanError(f"{key} of {prefix}rope_scaling in {where} has not {turned // 2} numbers, one a pair.")
    return found


def _plain(parameters: Facts) -> Facts:
    """`parameters` with the type under its new name."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return {key: value for key, value in parameters.items() if key != "type"} | {"rope_type": kind}


def _check_type(parameters: Facts, prefix: str, where: str) -> None:
    """MemplanError for a rescaling that transformers has no code for, or that lacks what its code reads."""
    kind = parameters["rope_type"]
    if kind not in FACTORS:
        raise MemplanError(f"{prefix}rope_scaling in {where} is of the type {kind!r}.", near_names(str(kind), FACTORS))
    lacking = [key for key in FACTORS[kind] if parameters.get(key) is None]
    if lacking:
        raise MemplanError(f"{prefix}rope_scaling in {where}, of the type {kind}, has no {' and no '.join(lacking)}.")


def _object(said: Facts, key: str, prefix: str, where: str) -> Facts:
    value = said.get(key) or {}
    if not isinstance(value, dict):
        raise MemplanError(f"{prefix}{key} in {where} is {value!r}, not an object.")
    return value


def _number(said: Facts, key: str, default: float | None, prefix: str, where: str) -> Any:
    value = said.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise MemplanError(f"{prefix}{key} in {where} is {value!r}, not a number above 0.")
    return value
