"""Sizes of LitGPT's models and of what it trains in them. Letters: `H` hidden, `A` heads, `V` vocabulary."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of lit_gpt/config.py."""

    layers: int
    """Blocks."""
    hidden: int
    """H."""
    heads: int
    """A, all with keys and values of their own."""
    ffn: int
    """Width of the feed-forward layer."""
    vocab: int
    """V, padded."""
    rotary: int
    """Elements of a head that are rotated."""
    llama: bool = False
    """RMSNorm, gated SiLU, one branch after the other and no biases; else LayerNorm, GELU, both branches at once."""
    one_norm: bool = False
    """Whether both branches read the same norm."""
    head_bias: bool = False
    """Bias on the head."""
    gelu: str = "none"
    """GELU's approximation."""


SHAPES = {
    "phi-1.5": Shape(layers=24, hidden=2048, heads=32, ffn=8192, vocab=51200, rotary=32, one_norm=True,
                     head_bias=True, gelu="tanh"),
    "stablelm-base-alpha-3b": Shape(layers=16, hidden=4096, heads=32, ffn=16384, vocab=50688, rotary=32),
    "llama-2-7b": Shape(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, rotary=128, llama=True),
    "llama-2-13b": Shape(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000, rotary=128, llama=True),
}  # fmt: skip
TRAINED = {"lora": ("lora_",), "adapter": ("adapter_",), "adapter-v2": ("adapter_", "norm")}
"""Parts of the names of parameters that train."""
NF4_BLOCK = 64
"""Elements of a matrix in nf4 that share a scale. Source: quantize_4bit, bitsandbytes 0.41.1."""
NESTED_BLOCK = 256
"""Scales that share one of their own where they are quantised too."""
RANK = 8
DROPOUT = 0.05
HEAD_ROWS = 128
PROMPT_ROWS = 10
FIRST_PROMPTED = 2
