"""Published figures beside what trace and estimate say."""

from collections.abc import Iterable, Sequence
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
    Column(key="bound", header="held as", align="left", hide_constant=True),
    Column(key="source", header="source", align="left"),
)


def absolute(errors: Iterable[float | None]) -> list[float]:
    """The errors that there are, without their signs."""
    return [abs(error) for error in errors if error is not None]


def percent(error: float) -> str:
    """An error without its sign: `2.00 %`."""
    return format_percent(error).lstrip("+")


def published_table(pairs: Sequence[PublishedPair]) -> Table:
    """One line a figure, in the order given; below, how well each witness does on exact rows."""
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
            "upper bound" if pair.row.is_bounded else "exact",
            pair.row.source,
        )
        for pair in pairs
    )
    exact = [pair for pair in pairs if not pair.row.is_bounded]
    footer = [
        f"{witness} of {len(told)} exact rows: largest error {percent(max(told))}, median {percent(median(told))}"
        for witness, told in (
            ("trace", absolute(pair.traced_error_frac for pair in exact)),
            ("estimate", absolute(pair.estimated_error_frac for pair in exact)),
        )
        if told
    ]
    if any(pair.traced_bytes is None for pair in pairs):
        footer.append("rows without a trace are judged by the estimate")
    if any(pair.row.compiled for pair in pairs):
        footer.append("an eager trace or estimate of a compiled step is an upper bound")
    if any(pair.row.longest for pair in pairs):
        footer.append("one of the longest samples is an upper bound where the source does not say how long they were")
    return Table(columns=COLUMNS, rows=rows, footer=tuple(footer))
