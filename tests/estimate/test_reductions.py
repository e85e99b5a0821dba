"""What sums over rows take inside themselves: by the trace's account, and by figures of published norms."""

import itertools

import numpy as np
import pytest

from memplan.estimate.reductions import buffers
from memplan.trace.cuda_rules.generation import generation
from memplan.trace.cuda_rules.hidden import Operand, hidden_blocks
from memplan.units import MIB

A100 = (108, (8, 0))
ROWS, WIDTHS = (1, 3, 63, 64, 1000, 1020, 1021, 2048, 8192, 300_000), (1, 2, 6, 45, 128, 1280, 4096, 32_768, 10**6)


@pytest.mark.parametrize(
    ("width", "num_mib", "counters"),
    [(1024, 16, 32), (2048, 32, 64), (4096, 64, 128), (8192, 108, 256), (16_384, 112, 512), (32_768, 112, 1024)],
)
def test_published_norms_show_what_the_sum_of_2048_rows_takes(width: int, num_mib: int, counters: int) -> None:
    """liger 0.2.1, rms_norm, x = H: what its figures hold beside the tensors; counters come rounded up to 512 bytes."""
    assert buffers(2048, width, *A100) == (num_mib * MIB, counters)


@pytest.mark.parametrize("card", ["a100-80g", "h100-80g", "rtx-4090"])
def test_estimate_and_trace_say_the_same(card: str) -> None:
    figures = generation(card)
    taken = 0
    for rows, width in itertools.product(ROWS, WIDTHS):
        blocks = hidden_blocks("sum", figures, Operand(shape=(rows, width), itemsize=2), [0])
        found = buffers(rows, width, figures.num_sms, figures.capability)
        assert found == (tuple(block.num_bytes for block in blocks) or (0, 0)), (rows, width)
        taken += found[0] > 0
    assert 10 < taken < len(ROWS) * len(WIDTHS) / 2


def test_arrays_of_sizes_are_told_one_by_one() -> None:
    rows = np.array([512, 2048, 8192])
    assert [found.tolist() for found in buffers(rows, 1024, *A100)] == [[0, 16 * MIB, 64 * MIB], [0, 32, 32]]
    assert buffers(2048, np.array([1024, 4096]), *A100)[0].tolist() == [16 * MIB, 64 * MIB]


def test_sums_over_other_dimensions_and_of_strided_tensors_are_not_counted() -> None:
    a100 = generation("a100-80g")
    assert not hidden_blocks("sum", a100, Operand(shape=(2048, 1024), itemsize=2), [1])
    assert not hidden_blocks("sum", a100, Operand(shape=(2048, 1024), itemsize=2, strides=(1, 2048)), [0])
    assert hidden_blocks("sum", a100, Operand(shape=(2, 1024, 1024), itemsize=2), [0, 1])
