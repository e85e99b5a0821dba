"""F11: no error, only a slow step, where the driver moves memory to the host."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from climbing import Processes, go, went_well

from memplan.ladder.spill import spill_warning
from memplan.launch.process import Outcome
from memplan.record import RungResult, WindowPeak
from memplan.units import GIB, MIB


def row_of(
    batch: int, *, seconds: float, model: str | None = "WSL", retries: int | None = 0, **step: Any
) -> RungResult:
    """A rung of this batch that took so long a step, and a GiB a sample."""
    return RungResult(
        rung=f"B{batch}c1@none",
        run_id=f"run {batch} {step}",
        status="ok",
        source="measured",
        model="tiny",
        step={"batch": batch, "chunks": 1, "seq": 8, "ckpt": "none"} | step,
        peak_allocated_bytes=batch * GIB,
        step_ns=(int(seconds * 1e9),) * 3,
        windows={"measured": WindowPeak(allocated_bytes=batch * GIB, num_alloc_retries=retries)},
        environment={"gpu": "RTX 4090"} | ({"driver_model": model} if model else {}),
    )


SMALL = row_of(4, seconds=0.4)


@pytest.mark.parametrize("model", ["WSL", "WDDM"])
def test_f11_a_rung_that_is_much_slower_a_sample_may_have_spilled(model: str) -> None:
    said = spill_warning(row_of(8, seconds=3.2, model=model), [SMALL])
    assert said is not None
    assert said.startswith("possible spill: 4.0 times as long a sample as B4c1@none")
    assert model in said


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (row_of(8, seconds=0.8), "as quick as the smaller one"),
        (row_of(8, seconds=1.5), "a little slower"),
        (row_of(8, seconds=3.2, model=None), "Linux says that it is out of memory instead"),
        (row_of(8, seconds=3.2, retries=2), "the allocator's retries explain it"),
        (row_of(8, seconds=3.2, ckpt="full"), "another mode has another pace"),
        (row_of(2, seconds=3.2), "a smaller rung spills no sooner"),
        (replace(SMALL, step_ns=()), "nothing was timed"),
    ],
)
def test_f11_nothing_is_said_without_a_reason(row: RungResult, why: str) -> None:
    assert spill_warning(row, [SMALL]) is None, why


def test_f11_an_allocator_that_counts_no_retries_excuses_nothing() -> None:
    assert spill_warning(row_of(8, seconds=3.2, retries=None), [SMALL]) is not None
    assert spill_warning(row_of(8, seconds=3.2), []) is None


def test_f11_the_climb_puts_it_into_the_row(tmp_path: Path) -> None:
    def took(outcome: Outcome, seconds: int) -> Outcome:
        told = ({"event": "environment", "driver_model": "WSL"}, {"event": "step", "ns": seconds * 10**9})
        return replace(outcome, events=(*(event for event in outcome.events if event["event"] != "step"), *told))

    climbed = go(tmp_path, Processes(B4c2=took(went_well(30 * MIB), 8), B2c1=took(went_well(10 * MIB), 1)))
    assert climbed.rows[0].warnings == ()
    assert climbed.rows[1].warnings[0].startswith("possible spill: 4.0 times")
