"""Sizes of Llama 3.2 1B, and of Liger's kernels for it."""

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 16, 2048, 32, 8, 8192, 128_256
SIZE = HIDDEN // HEADS
ROW_BLOCKS = 132
"""Partial sums of the norm's weight gradient, one a multiprocessor of an H100."""
