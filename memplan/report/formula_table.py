"""The formula of each line of an estimate, for people."""

from collections.abc import Mapping, Sequence

from memplan.record import Estimate, FormulaLine
from memplan.report.step_line import step_line
from memplan.report.table import Column, Table
from memplan.units import format_bytes


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
            *(["states by formula; what says traced was found by tracing the step"] if answer.traced else []),
        ),
    )
