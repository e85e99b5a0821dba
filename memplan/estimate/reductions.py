"""Sums over rows on CUDA: the memory in which thread blocks that share an output meet.

Source: setReduceConfig and ReduceConfig::global_memory_size, aten/src/ATen/native/cuda/Reduce.cuh, torch 2.13 (the same
in 2.4). Checked: the published norms of Liger-Kernel, ladders/published/LK-045.toml and the two behind it, and the
trace's own account, tests/estimate/test_reductions.py.
"""

import math
from functools import lru_cache
from typing import Any

from memplan.estimate.tape import Shape, Tensor

MOST_THREADS, WARP = 512, 32
"""Threads of a block, and those that run together."""
FEWEST_VALUES, MOST_VALUES = 16, 256
"""Values that a thread adds up: at least, and before the rows are spread over several blocks."""


def summed(x: Tensor, shape: Shape) -> Tensor:
    """`x` summed over the dimensions that `shape` broadcast, and what the sum takes inside itself, where these are its
    first."""
    out = x.tape.new("sum", shape, x.dtype)
    first = next((i for i, size in enumerate(shape) if not is_one(size)), len(shape))
    kept = shape[first:]
    if x.tape.rules == "cuda" and kept and not any(map(is_one, kept)):
        width = math.prod(kept)
        x.tape.hidden("sum", *buffers(x.numel // width, width, x.tape.multiprocessors, x.tape.generation))
    return out


def is_one(size: Any) -> bool:
    """Whether a dimension is 1; arrays of sizes are not."""
    return isinstance(size, int) and size == 1


def buffers(rows: Any, width: Any, multiprocessors: int, generation: tuple[int, int]) -> tuple[Any, Any]:
    """Bytes of the partial sums and of the counters; `rows` and `width` may be arrays of sizes, as the results are."""
    if isinstance(rows, int) and isinstance(width, int):
        return of_one(rows, width, multiprocessors, generation)
    import numpy as np

    sizes = zip(*(found.ravel().tolist() for found in np.broadcast_arrays(rows, width)), strict=True)
    found = np.array([of_one(*one, multiprocessors, generation) for one in sizes])
    return found[:, 0].reshape(np.shape(rows * width)), found[:, 1].reshape(np.shape(rows * width))


@lru_cache(1 << 16)
def of_one(rows: int, width: int, multiprocessors: int, generation: tuple[int, int]) -> tuple[int, int]:
    """The same of one size, in fp32: as many sums a block as if all outputs were those of its threads; nothing where
    one block has all rows."""
    vector = next(size for size in (4, 2, 1) if width % size == 0)
    most = MOST_THREADS // vector
    across, down = (min(most, 1 << max(1, size).bit_length() - 1) for size in (width // vector, rows))
    height = min(down, most // min(across, WARP))
    across = min(across, most // height)
    values, grid = -(-rows // height), -(-width // vector // across)
    target = multiprocessors * (threads_per_multiprocessor(generation) // (across * height))
    blocks = max(min(-(-target // grid), -(-values // FEWEST_VALUES)), -(-values // MOST_VALUES))
    if values < MOST_VALUES or grid > target or blocks == 1:
        return 0, 0
    return 4 * width * blocks * across * vector, 4 * grid


def threads_per_multiprocessor(generation: tuple[int, int]) -> int:
    """Source: CUDA C++ Programming Guide 12, technical specifications by compute capability."""
    return 1536 if generation in ((8, 6), (8, 9), (12, 0)) else 2048
