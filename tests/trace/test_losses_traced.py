"""Every loss priced by the trace: to the byte what the CPU's allocator says, and in units of logits on a card."""

import pytest
from samples import asked, measured_peak

from memplan.backends.simulated import simulate
from memplan.spec import RunSpec
from memplan.spec.device import card
from memplan.step.fused_loss import SLICE_BYTES

LOSSES = ["full", "valid-rows", "chunked:3", "chunked-ckpt:3"]


def run_of(workload: str, loss: str, precision: str) -> RunSpec:
    return asked("tiny", "B4c2", seq=64, workload=workload, loss=loss, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("workload", ["lm", pytest.param("distill", marks=pytest.mark.slow)])
def test_the_trace_is_what_the_cpu_measures(workload: str, loss: str, precision: str) -> None:
    run = run_of(workload, loss, precision)
    assert simulate(run).steps.steady.peak_allocated_bytes == measured_peak(run)


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16-mixed"))]
)
@pytest.mark.parametrize("workload", ["lm", pytest.param("distill", marks=pytest.mark.slow)])
def test_the_fused_loss_is_traced_but_for_slices_inside_its_ops(workload: str, precision: str) -> None:
    run = run_of(workload, "fused", precision)
    traced, measured = simulate(run).steps.steady.peak_allocated_bytes, measured_peak(run)
    assert 0 <= measured - traced <= 8 * SLICE_BYTES
    assert measured == traced or precision != "fp32", "in fp32 its peak is elsewhere"


# In units of 4 * R * V bytes: one fp32 matrix of logits

ROWS, VOCAB = 64 * 128, 4096


def needed(workload: str, loss: str) -> float:
    """Peak of tiny-wide's step on an H100, in units."""
    run = asked("tiny-wide", "B64c1", seq=128, precision="bf16", workload=workload, loss=loss, device=card("h100-80g"))
    return simulate(run).steps.steady.peak_allocated_bytes / (4 * ROWS * VOCAB)


@pytest.mark.parametrize(("workload", "kept", "passing"), [("lm", 1, 2), ("distill", 2, 3)])
def test_chunks_lower_what_passes_and_recomputed_chunks_what_is_kept_too(
    workload: str, kept: int, passing: int
) -> None:
    """Of each row backward keeps its log-probabilities, and for a teacher its probabilities. Beside them pass, of one
    part, two more fp32 matrices, and for a teacher a third. N recomputed parts keep those of one; gradients of rows
    and head, made by the parts before, are some hundredths."""
    full, chunked, again = (needed(workload, loss) for loss in ("full", "chunked:4", "chunked-ckpt:4"))
    assert full - chunked == pytest.approx(passing * 3 / 4, abs=1e-3)
    assert chunked - again == pytest.approx(kept * 3 / 4, abs=0.05)


def test_the_fused_loss_leaves_no_matrix_of_logits() -> None:
    """Its peak is that of the blocks, which more recomputed parts come down to."""
    assert needed("lm", "fused") == needed("lm", "chunked-ckpt:32")
