"""The short tables: models, what a machine has."""

from collections.abc import Sequence
from typing import Any

from memplan.record import Check
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


def _thousands(value: int) -> str:
    return f"{value:,}"
