"""How many bytes CUDA ops take inside themselves, one function an op. No torch.

A function takes (generation, *arguments of the op) and gives the blocks that stand at the op's own peak beside its
inputs and outputs. Tensors are read by shape, layout and element size only.

Letters: `B` batch, `S` sequence, `A` query heads, `K` key/value heads, `D` head size, `N` indices. Sources: the entries
in hidden.py. Checked: tests/trace/test_hidden.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from memplan.trace.cuda_rules.generation import Generation
from memplan.units import KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor as far as hidden memory depends on it."""

    shape: tuple[int, ...]
    """Sizes, outermost first."""
    itemsize: int
    """Bytes of one element."""
    strides: tuple[int, ...] | None = None
    """Steps in elements; None for a dense layout."""

    def stride(self) -> tuple[int, ...]:
        """Steps in elements."""
        return dense(self.shape) if self.strides is None else self.strides

    def is_contiguous(self) -> bool:
        """Whether the layout is dense, the last dimension fastest."""
        return self.stride() == dense(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation inside an op."""

    name: str
    """Its name in torch's source."""
    num_bytes: int
    """Bytes asked of the allocator, before rounding."""


Blocks = tuple[Block, ...]


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Steps of a dense layout of `shape`, the last dimension fastest."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _copied(name: str, tensor: Any, order: tuple[int, ...] | None = None) -> Blocks:
    """The copy that `.contiguous()` makes of `tensor` with its dimensions in `order`, if it makes one."""
    order = tuple(range(len(tensor.shape))) if order is None else order
    shape = [tensor.shape[i] for i in order]
    steps = [tensor.stride()[i] for i in order]
    kept = all(size == 1 or step == want for size, step, want in zip(shape, steps, dense(shape), strict=True))
    return () if kept else (Block(name, prod(shape) * tensor.itemsize),)


def _round(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple


def flash_forward(
    generation: Generation, query: Any, key: Any, value: Any, dropout_p: float = 0.0, *_: Any, **__: Any
) -> Blocks:
    """Partial outputs where too few blocks would leave multiprocessors idle, and keys are split between them."""
    B, A, S, D = query.shape
    per_block = 256 if D <= 64 else 128 if D <= 128 else 64
    num_splits = _num_splits(B * A * ceil(S / 64), generation.num_sms * 2, ceil(key.shape[2] / per_block))
    if dropout_p or num_splits <= 1:
        return ()
    return (
        Block("softmax_lse_accum", num_splits * B * A * S * 4),
        Block("out_accum", num_splits * B * A * S * _head_rounded(D) * 4),
    )


def _num_splits(num_blocks: int, num_sms: int, num_key_blocks: int, most: int = 128) -> int:
    """num_splits_heuristic: the fewest splits within 85 % of the best use of the card."""
    if num_blocks >= 0.8 * num_sms:
        return 1
    most = min(most, num_sms, num_key_blocks)

    def eligible(splits: int) -> bool:
        return splits == 1 or ceil(num_key_blocks / splits) != ceil(num_key_blocks / (splits - 1))

    def efficiency(splits: int) -> float:
        waves = num_blocks * splits / num_sms
        return waves / ceil(waves)

    choices = [splits for splits in range(1, most + 1) if eligible(splits)]
    best = max(map(efficiency, choices), default=0.0)
    return next((splits for splits in choices if efficiency(splits) >= 0.85 * best), 1)


def _head_rounded(head: int) -> int:
    return _round(head, 32) if head <= 192 else 256


def flash_backward(
    generation: Generation, grad_out: Any, query: Any, key: Any, value: Any, out: Any, *_: Any, **__: Any
) -> Blocks:
    """Query gradients in fp32, row sums, and for grouped heads key and value gradients of every query head."""
    B, A, S, D = query.shape
    rows = _round(S, 128)
    seen = (0, 2, 1, 3)  # the kernel sees [B, S, A, D]
    blocks = (
        *_copied("contiguous_grad_out", grad_out, seen),
        *_copied("contiguous_out", out, seen),
        Block("softmax_d", B * A * rows * 4),
        Block("dq_accum", B * rows * A * _head_rounded(D) * 4),
    )
    if key.shape[1] == A:
        return blocks
    expanded = B * key.shape[2] * A * D * query.itemsize
    return (*blocks, Block("dk_expanded", expanded), Block("dv_expanded", expanded))


def efficient_backward(
    generation: Generation, grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> Blocks:
    """Row sums and the tiles in which query gradients are added up; key and value tiles where registers are short."""
    B, A, S, D = query.shape
    half = query.itemsize == 2
    largest = max(D, value.shape[3])
    tall = largest > 64 and generation.shared_memory_bytes >= 160 * KIB
    rows = 128 if tall else 64
    in_registers = half and largest <= rows
    columns = 128 if in_registers and largest > 64 else 64
    tiles = ceil(S / rows) * ceil(D / columns) * (4 + rows * columns)
    if half and not in_registers:
        tiles += columns * (_round(D, rows) + _round(value.shape[3], rows))
    return Block("delta", B * A * S * 4), Block("workspace", B * A * _round(tiles, 4) * 4)


def safe_softmax(generation: Generation, scores: Any, *_: Any, **__: Any) -> Blocks:
    """The plain softmax, and which scores are minus infinity, before the rows without any key are set to 0."""
    count = prod(scores.shape)
    return (
        Block("out", count * scores.itemsize),
        Block("masked", count),
        Block("masked_rows", prod(scores.shape[:-1])),
        Block("zero", scores.itemsize),
    )


def embedding_backward(
    generation: Generation,
    grad: Any,
    indices: Any,
    num_weights: int,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> Blocks:
    """Nothing up to 3,072 indices; above, the sorted indices and the sums [N / 10 + rows, H] in fp32 of their runs."""
    N, width = prod(indices.shape), grad.shape[-1]
    if N <= 3072 and not scale_grad_by_freq:
        return _copied("grad", grad)
    item = indices.itemsize
    segments = min(N, num_weights)
    partials = N // 10 + segments
    return (
        *_copied("grad", grad),
        Block("sorted_indices", N * item),
        Block("orig_indices", N * item),
        *((Block("count", N * item),) if scale_grad_by_freq else ()),
        Block("segment_offsets", N * item),
        Block("num_of_segments", 8),
        Block("partials_per_segment", segments * item),
        Block("partials_per_segment_offset", segments * item),
        Block("num_of_partial_segments", 8),
        Block("partial_segment_offset", partials * item),
        Block("grad_weight_per_segment", partials * width * max(grad.itemsize, 4)),
    )


def index_put(
    generation: Generation, self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *_: Any
) -> Blocks:
    """For sums (the backward of `x[index]`): the flat index and its sorted copy with their origins, int64."""
    given = [index for index in indices if index is not None]
    if not accumulate or not given or given[0].itemsize == 1:  # a mask is turned into indices first, of unknown number
        return ()
    N = max(prod(index.shape) for index in given)
    return Block("linearIndex", N * 8), Block("sorted_indices", N * 8), Block("orig_indices", N * 8)


def layer_norm_backward(
    generation: Generation,
    grad_out: Any,
    x: Any,
    shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any = None,
    bias: Any = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> Blocks:
    """Dense copies where needed; partial sums of the weight's and the bias's gradient where rows are many and short."""
    sums = sum(1 for wanted, of in zip(output_mask[1:], (weight, bias), strict=True) if wanted and of is not None)
    return _norm_backward(generation, grad_out, x, shape, weight, sums)


def rms_norm_backward(
    generation: Generation,
    grad_out: Any,
    x: Any,
    shape: Sequence[int],
    rstd: Any,
    weight: Any = None,
    output_mask: Sequence[bool] = (True, True),
) -> Blocks:
    """As of layer norm, without a bias."""
    return _norm_backward(generation, grad_out, x, shape, weight, int(output_mask[1] and weight is not None))


def _norm_backward(
    generation: Generation, grad_out: Any, x: Any, shape: Sequence[int], weight: Any, sums: int
) -> Blocks:
    width = prod(shape)
    num_rows = prod(x.shape) // width
    copies = (*_copied("dY", grad_out), *_copied("X", x))
    if num_rows <= 64 * 1024 or width // 32 >= generation.num_sms // 2:
        return copies
    blocks = min(64 * 1024 // 2 // ceil(width / 32), ceil(num_rows / 32))
    names = ("dgamma_blocks", "dbeta_blocks")[:sums]
    return (*copies, *(Block(name, blocks * width * weight.itemsize) for name in names))


def sum_over_rows(generation: Generation, x: Any, dims: Sequence[int] | None = None, *_: Any, **__: Any) -> Blocks:
    """Partial sums of thread blocks that share an output, and counters of those that are done, where the first
    dimensions of a dense tensor are summed: as many sums a block as if all outputs were those of its threads."""
    num_dims = len(x.shape)
    gone = sorted(dim % num_dims for dim in dims or ())
    if not gone or gone != list(range(len(gone))) or len(gone) == num_dims or not x.is_contiguous():
        return ()
    rows, width = prod(x.shape[: len(gone)]), prod(x.shape[len(gone) :])
    vector = 4 if width % 4 == 0 else 2 if width % 2 == 0 else 1
    threads = 512 // vector
    across, down = min(threads, _power(width // vector)), min(threads, _power(rows))
    height = min(down, threads // min(across, 32))
    across = min(across, threads // height)
    per_thread, grid = ceil(rows / height), ceil(width // vector / across)
    target = generation.num_sms * (generation.threads_per_sm // (across * height))
    blocks = max(min(ceil(target / grid), ceil(per_thread / 16)), ceil(per_thread / 256))
    if per_thread < 256 or grid > target or blocks == 1:
        return ()
    item = max(x.itemsize, 4)
    return Block("buffer", item * width * blocks * across * vector), Block("semaphores", 4 * grid)


def _power(value: int) -> int:
    """The largest power of two up to `value`."""
    return 1 << value.bit_length() - 1
