"""What was measured against what was said: one row a kernel or a rung's window, the worst first."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from memplan.record import RungResult
from memplan.report.render import render
from memplan.report.table import Column, Table
from memplan.units import format_bytes, format_percent

TOLERANCE = 0.02
"""Largest error of the trace and of the estimate that passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A number of the card beside what the witnesses said of it."""

    kind: str
    """`kernel` or `rung`."""
    name: str
    """Kernel, or model, rung and window."""
    rule: str = ""
    """What the row puts to the test."""
    status: str = "ok"
    """How it ended."""
    measured_bytes: int | None = None
    """Allocated peak on the card."""
    traced_bytes: int | None = None
    """What the trace says."""
    estimated_bytes: int | None = None
    """What the formulas say, where they speak of it."""
    reserved_bytes: int | None = None
    """Reserved peak on the card."""
    traced_reserved_bytes: int | None = None
    """The trace's; it depends on what came before, and is not judged."""
    note: str = ""
    """What to know about the row."""
    judged: bool = True
    """Whether an error counts."""

    @property
    def traced_error_frac(self) -> float | None:
        """Trace over measurement, less 1."""
        return _error(self.traced_bytes, self.measured_bytes)

    @property
    def estimated_error_frac(self) -> float | None:
        """Estimate over measurement, less 1."""
        return _error(self.estimated_bytes, self.measured_bytes)

    @property
    def worst(self) -> float:
        """The larger absolute error; 0.0 where nothing can be compared."""
        errors = (self.traced_error_frac, self.estimated_error_frac)
        return max((abs(error) for error in errors if error is not None), default=0.0)

    @property
    def fails(self) -> bool:
        """Whether it counts against the tables."""
        return self.judged and (self.worst > TOLERANCE or self.status.partition(":")[0] == "error")


def _error(said: int | None, measured: int | None) -> float | None:
    return said / measured - 1 if said is not None and measured else None


def of_rungs(rows: Iterable[RungResult], told: dict[str, dict[str, object]]) -> list[Finding]:
    """The windows of measured rows beside `told`: by run, what `gpu_witnesses` says."""
    found = []
    for row in rows:
        said = told.get(row.run_id, {})
        name = f"{row.model} {row.rung}"
        if row.whole_peak_bytes is None:
            found.append(
                Finding(kind="rung", name=name, status=row.status, note=row.error or "", judged=row.kind == "error")
            )
            continue
        attention = said.get("attention")
        other = attention is not None and bool(row.attention) and set(attention) != set(row.attention)  # type: ignore[call-overload]
        for window, title in (("first_step", "first step"), ("measured", "later steps")):
            peak, witness = row.windows.get(window), said.get(window)
            if peak is None:
                continue
            traced, reserved = witness if isinstance(witness, (list, tuple)) else (None, None)
            found.append(
                Finding(
                    kind="rung",
                    name=f"{name}, {title}",
                    rule=str(row.step.get("ckpt")),
                    status=row.status,
                    measured_bytes=peak.allocated_bytes,
                    traced_bytes=traced,
                    estimated_bytes=said.get("estimated_bytes") if window == "measured" else None,  # type: ignore[arg-type]
                    reserved_bytes=peak.reserved_bytes,
                    traced_reserved_bytes=reserved,
                    note=str(said.get("error") or (f"attention: {row.attention}, traced {attention}" if other else "")),
                )
            )
    return found


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Failures first, then by error, the largest first; what is not judged last."""
    return sorted(findings, key=lambda one: (not one.fails, not one.judged, -one.worst))


def table_of(findings: Sequence[Finding], *, title: str, footer: Sequence[str]) -> Table:
    """The table of all findings."""

    def percent(frac: float) -> str:
        return format_percent(frac, 2)

    columns = (
        Column(key="name", header="what", align="left"),
        Column(key="rule", header="puts to the test", align="left"),
        Column(key="status", header="status", align="left", hide_constant=True),
        Column(key="measured_bytes", header="measured", text=format_bytes),
        Column(key="traced_bytes", header="traced", text=format_bytes),
        Column(key="traced_error_frac", header="error", text=percent),
        Column(key="estimated_bytes", header="estimated", text=format_bytes, hide_empty=True),
        Column(key="estimated_error_frac", header="error", text=percent, hide_empty=True),
        Column(key="reserved_bytes", header="reserved", text=format_bytes, hide_empty=True),
        Column(key="traced_reserved_bytes", header="traced", text=format_bytes, hide_empty=True),
        Column(key="note", header="note", align="left", hide_empty=True),
    )
    rows = tuple(
        tuple(
            getattr(one, column.key) or None if column.key == "note" else getattr(one, column.key) for column in columns
        )
        for one in findings
    )
    return Table(columns=columns, rows=rows, title=title, footer=tuple(footer))


def summary(findings: Sequence[Finding]) -> list[str]:
    """How many rows of each kind hold, in words."""
    lines = []
    for kind in ("kernel", "rung"):
        compared = [one for one in findings if one.kind == kind and one.judged and one.measured_bytes is not None]
        within = sum(not one.fails for one in compared)
        worst = max((one.worst for one in compared), default=None)
        if worst is not None:
            lines.append(f"{kind}s: {within} of {len(compared)} within {TOLERANCE:.0%}, the largest error {worst:.2%}")
        else:
            lines.append(f"{kind}s: nothing was compared")
    return lines


def write(findings: Sequence[Finding], folder: Path, table: Table) -> None:
    """`table.md`, `table.csv` and `rows.jsonl` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(render(table, "md") + "\n", encoding="utf-8")
    (folder / "table.csv").write_text(render(table, "csv") + "\n", encoding="utf-8")
    lines = [asdict(one) | {"traced_error_frac": one.traced_error_frac} for one in findings]
    text = "".join(
        json.dumps(line | {"estimated_error_frac": one.estimated_error_frac}) + "\n"
        for line, one in zip(lines, findings, strict=True)
    )
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
