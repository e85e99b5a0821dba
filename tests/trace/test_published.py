"""Published peaks of single layers and losses in eager PyTorch on an A100, traced without one.

The rows are files of ladders/published, their steps those of kernels.py there. Both benchmarks build tensors once, run
many times and read the peak of allocated bytes from a reset just before a run:

- Liger-Kernel (`benchmark/scripts/utils.py`, `_test_memory`, at b5672a15 for 0.2.1 and at v0.4.2): the median of ten
  runs' `max_memory_allocated() / 2**20`, by way of float32, with everything that is alive. Gradients of the run before
  are still there and are added to. The speed benchmarks of the same process came first, so cuBLAS has its workspaces.
- Cut Cross-Entropy (`benchmark/memory.py`): the peak less what was allocated at the reset, in MiB, after a first
  repetition that is not kept; gradients are cleared before. The table has one decimal.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.backends.loading import load
from memplan.spec.published import Published, read_published
from memplan.trace.replay import alive_at
from memplan.trace.tracing import tracing
from memplan.units import MIB

WORKSPACE_MIB = 8.125
"""cuBLAS on an A100, one a thread: 2 x 4096 KiB + 8 x 16 KiB (CUBLAS_WORKSPACE_CONFIG's default)."""
FOLDER = Path(__file__).parents[2] / "ladders" / "published"
ROWS = [row for row in read_published(FOLDER) if row.step is not None and row.step[0].stem == "kernels"]
"""Every row of these two sources that runs eager PyTorch. The others run Triton kernels or torch.compile."""


def float32(value: float) -> float:
    """`value` rounded to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def printed(row: Published, num_bytes: float) -> float:
    """Bytes in MiB as the source of `row` prints them."""
    return round(num_bytes / MIB, 1) if row.name.startswith("CE-") else float32(num_bytes / MIB)


def traced_bytes(row: Published, *, hidden: bool = True, runs: int = 2, **arguments: object) -> float:
    """The peak of the last of `runs`; without memory that ops take inside themselves when `hidden` is False."""
    assert row.step is not None
    with tracing(device=row.device, frames=False) as trace:
        if not hidden:
            trace.recorder.hidden = None
        run: Callable[[], object] = load(*row.step)(**row.arguments, **arguments)
        for _ in range(runs - 1):
            run()
        trace.reset_peak()
        run()
    found = trace.replayed()
    before = sum(found.block_bytes[index] for index in alive_at(found, found.start - 1)) if row.above_start else 0
    return found.peaks.allocated_bytes - before


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_published_peak_is_traced_to_its_last_digit(row: Published) -> None:
    assert printed(row, traced_bytes(row)) == printed(row, row.figure_bytes), row.source


@pytest.mark.parametrize(("name", "num_workspaces"), [("LK-077", 2), ("LK-061", 1), ("LK-053", 0)])
def test_without_cublas_workspaces_the_peak_falls_short_by_them(name: str, num_workspaces: int) -> None:
    """One for the thread of forward, one for that of backward where it multiplies matrices too."""
    row = next(row for row in ROWS if row.name == name)
    assert (row.figure_bytes - traced_bytes(row, hidden=False)) / MIB == num_workspaces * WORKSPACE_MIB


def test_a_gradient_more_or_less_is_seen() -> None:
    """The first run of all finds no gradients to add to: the figure is that of a later one."""
    row = next(row for row in ROWS if row.name == "LK-017")
    assert row.figure_bytes - traced_bytes(row, runs=1) >= 128256 * 4096 * 2


@pytest.mark.slow
def test_a_fused_loss_is_traced_to_its_last_digit_after_all_that_its_script_ran_before() -> None:
    """In a process of its own its parts would leave other gaps: 256 KiB less."""
    row = Published.from_toml(FOLDER / "LK-015.toml")
    assert printed(row, traced_bytes(row, whole_script=True)) == printed(row, row.figure_bytes)
    assert row.figure_bytes - traced_bytes(row) == MIB // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AO-017", "AO-019", "AO-021"])
def test_a_compiled_vision_transformer_takes_what_the_eager_one_does(name: str) -> None:
    row = Published.from_toml(FOLDER / f"{name}.toml")
    assert traced_bytes(row) == pytest.approx(row.figure_bytes, rel=0.006)
