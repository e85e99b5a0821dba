"""A comparison as tables: the worst first for people, every number for scripts."""

from typing import Any

from memplan.analysis.comparison import Comparison, Finding
from memplan.analysis.verdict import notes, number, signed_bytes, verdict
from memplan.record import RungResult
from memplan.report.ladder_table import device_name
from memplan.report.table import Column, Table
from memplan.units import format_percent

METRICS = {
    "status": "status",
    "peak_allocated_bytes": "peak",
    "peak_reserved_bytes": "reserved",
    "peak_used_bytes": "used",
    "between_steps_bytes": "between steps",
    "step_ns": "step time",
    "samples_per_s": "samples/s",
    "estimated_bytes": "estimated",
    "traced_bytes": "traced",
}
"""Metrics as people read them; of `phase:NAME` and `category:NAME` the colon is left out."""

COLUMNS = (
    Column(key="name", header="rung", align="left"),
    Column(key="model", header="model", align="left", hide_constant=True),
    Column(key="source", header="source", align="left", hide_constant=True),
    Column(key="metric", header="metric", align="left"),
    Column(key="label", header="verdict", align="left"),
    Column(key="base", header="base"),
    Column(key="new", header="new"),
    Column(key="change", header="change"),
    Column(key="interval", header="interval", hide_empty=True),
    Column(key="processes", header="processes", hide_constant=True),
    Column(key="why", header="why", align="left", hide_empty=True),
)
"""For people."""
MOST_COMMANDS = 4
"""Commands that a table shows."""
RAW = tuple(
    Column(key=key, header=key, align="left")
    for key in (
        "rung", "name", "model", "run_id", "source", "metric", "label", "counts", "base", "new", "unit", "change_frac",
        "low_frac", "high_frac", "num_base", "num_new", "why",
    )
)  # fmt: skip
"""For scripts."""


def compare_table(found: Comparison, *, details: bool = False) -> Table:
    """The verdict, the findings that a person has to see, and notes. A rung always shows its peak and its time;
    everything else only where it moved, or with `details`."""
    shown = [finding for finding in found.findings if details or worth_showing(finding)]
    hidden = 0 if details else len([finding for finding in found.counted if not worth_showing(finding)])
    names = {finding.name: place for place, finding in reversed(list(enumerate(found.findings)))}
    shown.sort(key=lambda finding: names[finding.name])
    more = [f"{hidden} further metric{' is' if hidden == 1 else 's are'} the same"] if hidden else []
    models = {finding.model for finding in found.findings}
    return Table(
        columns=COLUMNS,
        rows=tuple(_values(finding, models) for finding in shown),
        title=verdict(found),
        footer=(*more, *notes(found), *_commands(found), *sides(found)),
    )


def worth_showing(finding: Finding) -> bool:
    """Whether a person wants to see it without asking."""
    if finding.metric in ("peak_allocated_bytes", "step_ns"):
        return True
    if finding.metric == "samples_per_s":
        return finding.label in ("worse", "better")
    return finding.label != "same" and (finding.counts or finding.metric.startswith("category:"))


def findings_table(found: Comparison) -> Table:
    """Every finding with raw numbers."""
    return Table(columns=RAW, rows=tuple(tuple(record.values()) for record in map(finding_record, found.findings)))


def comparison_record(found: Comparison) -> dict[str, Any]:
    """The whole comparison as plain JSON values."""
    return {
        "verdict": verdict(found),
        "exit_code": found.exit_code,
        "base": found.base_name,
        "new": found.new_name,
        "num_compared": found.num_compared,
        "uncovered": list(found.uncovered),
        "stale": found.is_stale,
        "different": {key: list(values) for key, values in found.different.items()},
        "notes": list(notes(found)),
        "commands": list(found.commands),
        "findings": [finding_record(finding) for finding in found.findings],
    }


def finding_record(finding: Finding) -> dict[str, Any]:
    """A finding as plain JSON values."""
    low, high = finding.interval or (None, None)
    return {
        "rung": finding.rung,
        "name": finding.name,
        "model": finding.model,
        "run_id": finding.run_id,
        "source": finding.source,
        "metric": finding.metric,
        "label": finding.label,
        "counts": finding.counts,
        "base": finding.base,
        "new": finding.new,
        "unit": finding.unit,
        "change_frac": finding.change,
        "low_frac": low,
        "high_frac": high,
        "num_base": finding.num_base,
        "num_new": finding.num_new,
        "why": finding.why,
    }


def sides(found: Comparison) -> tuple[str, ...]:
    """Where both sides come from: name, commit, device, torch."""
    return tuple(
        f"{what} {name}: {', '.join(dict.fromkeys(_place(row) for row in rows)) or 'no row'}"
        for what, name, rows in (
            ("base", found.base_name, found.base_rows),
            ("new", found.new_name, found.new_rows),
        )
    )


def change_text(finding: Finding) -> str | None:
    """The change: bytes of bytes, a share of everything else."""
    if finding.unit == "bytes" and finding.delta is not None:
        share = "" if finding.change is None else f" ({format_percent(finding.change)})"
        return "0 B" if finding.delta == 0 else signed_bytes(int(finding.delta)) + share
    return None if finding.change is None else format_percent(finding.change)


def metric_text(metric: str) -> str:
    """A metric as people read it."""
    return METRICS.get(metric, metric.partition(":")[2])


def _values(finding: Finding, models: set[str]) -> tuple[Any, ...]:
    interval = finding.interval
    return (
        finding.name,
        finding.model if len(models) == 1 else None,  # where they differ the name tells it
        finding.source,
        metric_text(finding.metric),
        finding.label,
        number(finding, finding.base),
        number(finding, finding.new),
        change_text(finding),
        None if interval is None else " to ".join(format_percent(end) for end in interval),
        f"{finding.num_base}, {finding.num_new}",
        finding.why or None,
    )


def _commands(found: Comparison) -> tuple[str, ...]:
    shown = [f"to tell: {command}" for command in found.commands[:MOST_COMMANDS]]
    left_out = len(found.commands) - len(shown)
    return (*shown, *([f"and {left_out} more commands, which -o json lists"] if left_out else []))


def _place(row: RungResult) -> str:
    facts = row.environment
    words = [
        f"{row.source} on {device_name(row)}",
        *(f"{key} {facts[key]}" for key in ("torch", "driver", "commit") if key in facts),
    ]
    return ", ".join(words)
