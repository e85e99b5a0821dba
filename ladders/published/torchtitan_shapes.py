"""Sizes of torchtitan's models."""

LLAMA_2 = {
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11_008},
}
"""torchtrain/models/llama/__init__.py"""
VOCAB = 32_000
POSITIONS = 2 * 32_768
"""Of the rotary table: twice the longest sequence of ModelArgs."""
