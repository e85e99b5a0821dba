"""Sizes of torchtune's models."""

LLAMA_3_2 = {
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192},
}
"""torchtune/models/llama3_2/_model_builders.py"""
VOCAB = 128_256
MAX_POSITIONS = 131_072
