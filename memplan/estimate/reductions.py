"""Sums over rows on CUDA: the memory in which thread blocks that share an output meet.

Source: setReduceConfig and ReduceConfig::global_memory_size, aten/src/ATen/native/cuda/Reduce.cuh, torch 2.13 (the same
in 2.4). Checked: the published norms of Liger-Kernel, ladders/published/LK-045.toml and those that follow.
"""

from typing import Any

from memplan.estimate.tape import Tensor

MOST_THREADS, WARP = 512, 32
"""Threads of a block, and those that run together."""
FEWEST_VALUES, MOST_VALUES = 16, 256
"""Values that a thread adds up: at least, and before the rows are spread over several blocks."""


def sum_over_rows(x: Tensor) -> Tensor:
    """Sums [O] of x [..., O] over all its rows, with what the kernel takes inside itself."""
    tape, width = x.tape, x.shape[-1]
    out: Tensor = tape.new("sum", (width,), x.dtype)
    if tape.rules == "cuda":
        tape.hidden("sum", *buffers(x.numel // width, width, tape.multiprocessors, tape.generation))
    return out


def buffers(rows: Any, width: Any, multiprocessors: int, generation: tuple[int, int]) -> tuple[Any, Any]:
    """Bytes of the partial sums and of the counters; either may be an array of sizes, as the results then are."""
    if isinstance(rows, int) and isinstance(width, int):
        return of_one(rows, width, multiprocessors, generation)
    import numpy as np

    found = np.vectorize(of_one, excluded=(2, 3), otypes=[np.int64, np.int64])(rows, width, multiprocessors, generation)
    return found[0], found[1]


def of_one(rows: int, width: int, multiprocessors: int, generation: tuple[int, int]) -> tuple[int, int]:
    """The same of one size: fp32 partial sums of every block, each as if it had all outputs of its threads' vectors."""
    vector = next(size for size in (4, 2, 1) if width % size == 0)
    most = MOST_THREADS // vector
    across, down = (min(most, last_power(size)) for size in (max(1, width // vector), rows))
    height = min(down, most // min(across, WARP))
    block_width = min(across, most // height)
    values = -(-rows // height)
    grid = -(-width // vector // block_width)
    target = multiprocessors * (threads_per_multiprocessor(generation) // (block_width * height))
    if rows < min(height * 16, MOST_VALUES) or values < MOST_VALUES or grid > target:
        return 0, 0
    blocks = max(min(-(-target // grid), -(-values // FEWEST_VALUES)), -(-values // MOST_VALUES))
    return (4 * width * blocks * block_width * vector, 4 * grid) if blocks > 1 else (0, 0)


def last_power(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def threads_per_multiprocessor(generation: tuple[int, int]) -> int:
    """Source: CUDA C++ Programming Guide 12, technical specifications by compute capability."""
    if generation[0] == 7:
        return 1024 if generation[1] == 5 else 2048
    return 1536 if generation in ((8, 6), (8, 7), (8, 9)) or generation[0] >= 12 else 2048
