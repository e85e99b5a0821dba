"""The formula of each line of an estimate, for people."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from memplan.record import Estimate, FormulaLine
from memplan.record.memory import SCHEMA_VERSION
from memplan.report.step_line import step_line
from memplan.report.table import Column, Table
from memplan.units import format_bytes


def formula_json(answer: Estimate, lines: Sequence[FormulaLine], letters: Mapping[str, int]) -> dict[str, Any]:
    """The JSON form: the peak of `answer`, its lines, and what their letters stand for."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "traced" if answer.traced else "estimated",
        "model": answer.run.model.name,
        "run_id": answer.run.run_id,
        "device": answer.run.device.name,
        "phase": answer.peak.phase,
        "moment": answer.peak.moment,
        "peak_allocated_bytes": answer.peak_allocated_bytes,
        "unsplit_bytes": answer.unsplit_bytes,
        "letters": dict(letters),
        "lines": [dataclasses.asdict(line) for line in lines],
    }


def formula_table(answer: Estimate, lines: Sequence[FormulaLine], letters: Mapping[str, int]) -> Table:
    """What is alive at the peak of `answer`, the largest first, each line as count x formula = bytes."""
    columns = (
        Column(key="category", header="category", align="left"),
        Column(key="part", header="module", align="left"),
        Column(key="op", header="op", align="left"),
        Column(key="count", header="tensors"),
        Column(key="formula", header="bytes of one", align="left"),
        Column(key="num_bytes", header="together", text=format_bytes),
    )
    rows = tuple((line.category, line.part, line.op, line.count, line.formula, line.num_bytes) for line in lines)
    run = answer.run
    values = ", ".join(f"{name} = {value:,}" for name, value in letters.items())
    return Table(
        columns=columns,
        rows=rows,
        title=f"{run.model.name} at its peak on {run.device.name}: {step_line(run)}",
        footer=(
            f"with {values}",
            f"together {format_bytes(sum(line.num_bytes for line in lines))} in {answer.peak.phase}, at "
            f"{answer.peak.moment}; each tensor rounded up as the allocator rounds",
            *(
                ["what is not split stands in a line of its own, and in each category of the page"]
                * (answer.unsplit_bytes > 0)
            ),
            *(["states by formula; what says traced was found by tracing the step"] if answer.traced else []),
        ),
    )
