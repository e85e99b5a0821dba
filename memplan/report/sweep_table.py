"""Many estimates, one a row."""

from collections.abc import Iterable
from typing import Any

from memplan.report.table import Column, Table
from memplan.spec import RunSpec
from memplan.units import format_bytes


def sweep_table(swept: Iterable[dict[str, Any]], *, limit_bytes: int | None, title: str, run: RunSpec) -> Table:
    """A row for each configuration of `run`: the levers that were swept, the peak, and whether it fits."""
    witness = "traced" if run.model.impl == "user" else "estimated"
    found = [row | fitting(row["peak_allocated_bytes"], limit_bytes) for row in swept]
    names = [name for name in found[0] if name not in ("peak_allocated_bytes", "fits")]
    numbers = ("batch", "chunks", "seq")
    columns = (
        *(Column(key=name, header=name, align="right" if name in numbers else "left") for name in names),
        Column(key="peak_allocated_bytes", header=f"{witness} peak", text=format_bytes),
        Column(key="fits", header="fits", align="left", text=lambda fits: "yes" if fits else "no", hide_empty=True),
    )
    keys = [column.key for column in columns]
    footer = () if limit_bytes is None else (f"held against {format_bytes(limit_bytes)}",)
    rows = tuple(tuple(row[key] for key in keys) for row in found)
    return Table(columns=columns, rows=rows, title=title, footer=footer)


def fitting(peak_bytes: int, limit_bytes: int | None) -> dict[str, bool | None]:
    """Whether a peak stays at or under the limit, where there is one."""
    return {"fits": None if limit_bytes is None else peak_bytes <= limit_bytes}
