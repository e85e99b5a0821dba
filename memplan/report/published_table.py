"""Published figures beside what trace and estimate say."""

from collections.abc import Sequence
from statistics import median

from memplan.analysis.published import PublishedPair
from memplan.report.table import Column, Table
from memplan.units import format_bytes, format_percent

COLUMNS = (
    Column(key="name", header="row", align="left"),
    Column(key="device", header="card", align="left", hide_constant=True),
    Column(key="reads", header="reads", align="left", hide_constant=True),
    Column(key="figure_bytes", header="published", text=format_bytes),
    Column(key="traced_bytes", header="traced", text=format_bytes),
    Column(key="traced_error_frac", header="trace's error", text=format_percent),
    Column(key="estimated_bytes", header="estimated", text=format_bytes),
    Column(key="estimated_error_frac", header="estimate's error", text=format_percent),
    Column(key="bound", header="trace is", align="left", hide_constant=True),
    Column(key="source", header="source", align="left"),
)


def published_table(pairs: Sequence[PublishedPair]) -> Table:
    """One line a figure, in the order given, the largest and number of exact ones below."""
    rows = tuple(
        (
            pair.row.name,
            pair.row.device.name,
            pair.row.reads,
            pair.row.figure_bytes,
            pair.traced_bytes,
            pair.traced_error_frac,
            pair.estimated_bytes,
            pair.estimated_error_frac,
            "upper bound" if pair.row.compiled else "exact",
            pair.row.source,
        )
        for pair in pairs
    )
    exact = [abs(pair.traced_error_frac) for pair in pairs if not pair.row.compiled]
    footer = []
    if exact:
        footer.append(f"{len(exact)} eager rows: largest error of the trace {format_percent(max(exact)).lstrip('+')}")
    errors = [pair.estimated_error_frac for pair in pairs if not pair.row.compiled]
    told = [abs(error) for error in errors if error is not None]
    if told:
        largest, middle = (format_percent(of(told)).lstrip("+") for of in (max, median))
        footer.append(f"largest error of the estimate {largest}, median {middle}")
    if len(exact) < len(pairs):
        footer.append("an eager trace of a compiled step is an upper bound")
    return Table(columns=COLUMNS, rows=rows, footer=tuple(footer))
