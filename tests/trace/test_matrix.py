"""The trace against real CPU runs on record: 108 peaks that the allocator reported, equal to the byte.

The runs are `reports/agreement_cpu_20261130`, made by `memplan ladder ladders/agreement_cpu.toml`: three shapes, two
precisions, three checkpoint modes, one and two chunks, three losses. Every fifth is traced here, all of them with
`-m slow`.
"""

from pathlib import Path

import pytest

from memplan.backends.simulated import simulate
from memplan.models.registry import model_spec
from memplan.record import RungResult, read_rows
from memplan.spec import RunSpec, StepSpec
from memplan.spec.device import CPU

ROWS = read_rows(Path(__file__).parents[2] / "reports" / "agreement_cpu_20261130" / "ladder.jsonl")


def name(row: RungResult) -> str:
    return f"{row.model} {row.rung} {row.step['loss']} {row.step['precision']}"


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name(row), marks=[] if at % 5 == 0 else [pytest.mark.slow]) for at, row in enumerate(ROWS)],
)
def test_traced_equals_what_was_measured(row: RungResult) -> None:
    run = RunSpec(model=model_spec(row.model), step=StepSpec(**row.step), device=CPU)
    assert simulate(run).steps.needed_bytes == row.peak_allocated_bytes


def test_the_record_is_whole() -> None:
    assert len(ROWS) == 108
    assert {row.status for row in ROWS} == {"ok"}
    assert {row.source for row in ROWS} == {"measured"}
