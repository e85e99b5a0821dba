"""The short tables: models, what a machine has, parity reports."""

from collections.abc import Sequence
from typing import Any

from memplan.record import Check, ParityReport
from memplan.report.table import Column, Table
from memplan.spec import ModelSpec


def models_table(models: Sequence[tuple[ModelSpec, dict[str, Any]]]) -> Table:
    """Each built-in model with its exact counts, its usual set-up, and where the facts come from."""
    columns = (
        Column(key="model", header="model", align="left"),
        Column(key="params_total", header="parameters", text=_thousands),
        Column(key="params_trainable", header="train", text=_thousands),
        Column(key="params_embedding", header="embedding", text=_thousands),
        Column(key="seq", header="usual seq"),
        Column(key="precision", header="precision", align="left"),
        Column(key="images", header="images", text=_thousands),
        Column(key="source", header="source", align="left"),
    )
    rows = tuple(
        (
            model.name,
            counts["total"],
            counts["trainable"],
            counts["embedding"],
            model.seq,
            model.precision,
            model.images or None,
            model.source,
        )
        for model, counts in models
    )
    return Table(columns=columns, rows=rows)


def doctor_table(checks: Sequence[Check]) -> Table:
    """Each check with what to type about it."""
    columns = (
        Column(key="name", header="what", align="left"),
        Column(key="status", header="status", align="left"),
        Column(key="found", header="found", align="left"),
        Column(key="advice", header="what to type", align="left"),
    )
    return Table(
        columns=columns, rows=tuple((item.name, item.status, item.found, item.advice or None) for item in checks)
    )


def parity_table(reports: Sequence[ParityReport]) -> Table:
    """Each variant with its verdict; the worst tensors of those that differ stand below."""
    columns = (
        Column(key="variant", header="variant", align="left"),
        Column(key="num_tensors", header="tensors"),
        Column(key="num_differences", header="differ"),
        Column(key="tolerance", header="tolerance", text=lambda value: f"{value:g}" if value else "bitwise"),
        Column(key="why", header="why", align="left"),
        Column(key="verdict", header="verdict", align="left"),
    )
    rows = tuple(
        (
            report.variant,
            report.num_tensors,
            len(report.differences),
            report.tolerance,
            report.why,
            "same" if report.same else "differs",
        )
        for report in reports
    )
    footer = tuple(
        f"{report.variant}: {worst.name} {list(worst.shape)} is off by {worst.max_abs:.3g}, "
        f"{worst.max_rel:.3g} of its largest value"
        for report in reports
        for worst in report.differences[:3]
    )
    return Table(columns=columns, rows=rows, footer=footer)


def _thousands(value: int) -> str:
    return f"{value:,}"
