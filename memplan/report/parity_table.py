"""What verify found: a row for each variant, and below it in words what differs."""

from collections.abc import Iterator, Sequence

from memplan.record import ParityReport
from memplan.report.table import Column, Table

NUM_WORST = 3
"""Tensors of a variant that are named when they differ from the plain step's."""


def parity_table(reports: Sequence[ParityReport]) -> Table:
    """Each variant with its verdict; what differs stands below: first what was recomputed otherwise, for all else
    follows from it."""
    columns = (
        Column(key="variant", header="variant", align="left"),
        Column(key="num_tensors", header="tensors"),
        Column(key="num_differences", header="differ"),
        Column(key="num_recomputed", header="recomputed", text=_thousands),
        Column(key="num_entered", header="checkpointed"),
        Column(key="num_runs", header="runs"),
        Column(key="tolerance", header="tolerance", text=lambda value: f"{value:g}" if value else "bitwise"),
        Column(key="why", header="why", align="left"),
        Column(key="verdict", header="verdict", align="left"),
    )
    rows = tuple(
        (
            report.variant,
            report.num_tensors,
            len(report.differences),
            report.num_recomputed or None,
            report.num_entered or None,
            report.num_runs or None,
            report.tolerance,
            report.why,
            "same" if report.same else "differs",
        )
        for report in reports
    )
    footer = tuple(f"{report.variant}: {line}" for report in reports for line in parity_lines(report))
    return Table(columns=columns, rows=rows, footer=footer)


def parity_lines(report: ParityReport) -> Iterator[str]:
    """What is wrong with a variant, cause before consequence, and what was done instead of what was asked for."""
    yield from map(str, report.mutations)
    if report.recomputed is not None:
        yield str(report.recomputed)
    yield from report.faults
    for worst in report.differences[:NUM_WORST]:
        yield (
            f"{worst.name} {list(worst.shape)} is off by {worst.max_abs:.3g}, {worst.max_rel:.3g} of its largest value"
        )
    if report.note:
        yield report.note


def _thousands(value: int) -> str:
    return f"{value:,}"
