"""What is written down of one family of transformers' models, and the defaults that depend on other keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]


def heads(facts: Facts) -> Any:
    """As many as query heads."""
    return facts["num_attention_heads"]


def head_width(facts: Facts) -> Any:
    """Hidden size over query heads."""
    return facts["hidden_size"] // facts["num_attention_heads"]


def rope_width(facts: Facts) -> Any:
    """The rotated part of a query head, which transformers takes for the head's width in latent attention."""
    return facts["qk_rope_head_dim"]


def by_mode(kinds: Callable[[Facts, int], str]) -> Callable[[Facts], list[str]]:
    """A default that lists the kind of every layer."""
    return lambda facts: [kinds(facts, index) for index in range(facts["num_hidden_layers"])]


def late_windows(facts: Facts, index: int) -> str:
    slides = facts["use_sliding_window"] and facts["sliding_window"] is not None and index >= facts["max_window_layers"]
    return "sliding_attention" if slides else "full_attention"


def unrotated_windows(facts: Facts, index: int) -> str:
    slides = facts["use_sliding_window"] and facts["sliding_window"] is not None and not facts["no_rope_layers"][index]
    return "sliding_attention" if slides else "full_attention"


def every_second(facts: Facts, index: int) -> str:
    return "full_attention" if index % 2 else "sliding_attention"


def by_pattern(facts: Facts, index: int) -> str:
    return "sliding_attention" if (index + 1) % facts["sliding_window_pattern"] else "full_attention"


def hybrid(facts: Facts, index: int) -> str:
    return "linear_attention" if (index + 1) % facts["full_attention_interval"] else "full_attention"


def rotated(facts: Facts) -> list[int]:
    interval = facts["no_rope_layer_interval"]
    return [int((index + 1) % interval != 0) for index in range(facts["num_hidden_layers"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is known of one `model_type`."""

    keys: Mapping[str, Any]
    """Keys with transformers' defaults; a function makes one of the facts that stand before it."""
    trains: tuple[str, ...] = ()
    """Architectures that train, the usual one first; empty where the type is a part of others only."""
    theta: float | None = None
    """Base of the rotary wavelengths; None where nothing is rotated."""
    rotary: float | None = None
    """Part of a head that is rotated, where a configuration does not say it; None: the whole head."""
    width: str = "hidden_size"
    """The key of the hidden size."""
    depth: str = "num_hidden_layers"
    """The key of the number of layers."""
    divides: bool = False
    """Whether transformers refuses a hidden size that is no multiple of the query heads."""
    needed: bool = True
    """Whether a configuration without width and depth is refused; SigLIP's small model is its class's defaults."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys of which transformers' modules know one value, that value; a function makes it of the facts."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Nested configurations and their model types."""


def patches(facts: Facts) -> int:
    """Patches of the square or oblong image that a tower takes."""
    sides = [facts[key] if isinstance(facts[key], list) else [facts[key]] * 2 for key in ("image_size", "patch_size")]
    return int((sides[0][0] // sides[1][0]) * (sides[0][1] // sides[1][1]))
