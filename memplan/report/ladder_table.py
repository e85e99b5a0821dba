"""The ladder's page as tables: rows side by side, and estimate against measurement."""

from collections.abc import Sequence
from typing import Any

from memplan.analysis import Agreement, findings, pulled
from memplan.record import RungResult
from memplan.report.table import Column, Table
from memplan.spec.run import NEW_LEVERS
from memplan.units import format_bytes, format_ns, format_percent


def step_columns(
    names: Sequence[str] = (
        "seq",
        "workload",
        "suffix",
        "loss",
        "precision",
        "optimizer",
        "attention",
        "norm",
        "dropout",
        "lora",
        "compile",
    ),
) -> tuple[Column, ...]:
    """A column for each field of the step that the rung's name does not say, hidden where it never varies."""
    return tuple(Column(key=name, header=name, align="left", hide_constant=True) for name in names)


COLUMNS = (
    Column(key="rung", header="rung", align="left"),
    Column(key="model", header="model", align="left", hide_constant=True),
    *step_columns(),
    Column(key="source", header="source", align="left"),
    Column(key="status", header="status", align="left"),
    Column(key="peak_allocated_bytes", header="peak", text=format_bytes),
    Column(key="estimated_bytes", header="estimated", text=format_bytes),
    Column(key="error_frac", header="estimate's error", text=format_percent),
    Column(key="headroom_bytes", header="headroom", text=format_bytes),
    Column(key="first_step_bytes", header="first step", text=format_bytes),
    Column(key="host_bytes", header="on the host", text=format_bytes, hide_empty=True),
    Column(key="saved_bytes", header="saves", text=format_bytes, hide_empty=True),
    Column(key="peak_phase", header="peaks in", align="left"),
    Column(key="step_ns", header="step", text=format_ns),
    Column(key="slower_frac", header="slower by", text=format_percent, hide_empty=True),
    Column(key="samples_per_s", header="samples/s", text=lambda value: f"{value:.2f}"),
    Column(key="verdict", header="verdict", align="left"),
)


def ladder_table(rows: Sequence[RungResult], footer: Sequence[str] = ()) -> Table:
    """One line a rung; failures say below why."""
    gates = sorted({(row.gate_bytes, row.gate_on) for row in rows if row.gate_bytes is not None})
    lines = [f"gate {format_bytes(size)} on {what} bytes, first step included" for size, what in gates]
    lines += [f"{label(row, rows)}: {row.status}: {row.error}" for row in rows if row.error]
    lines += [f"{label(row, rows)}: {row.environment['note']}" for row in rows if row.environment.get("note")]
    lines += findings(rows)
    return Table(columns=COLUMNS, rows=tuple(_values(row, rows) for row in rows), footer=(*lines, *footer))


def label(row: RungResult, rows: Sequence[RungResult]) -> str:
    """Name of the rung, with the model and the loss where those of `rows` differ."""
    words = [row.model] if len({other.model for other in rows}) > 1 else []
    words.append(row.rung)
    if len({other.step.get("loss") for other in rows}) > 1:
        words.append(f"loss {row.step['loss']}")
    return " ".join(words)


def agreement_table(found: Agreement, footer: Sequence[str] = ()) -> Table:
    """Estimate against measurement, the worst row first, the largest and the median error below."""
    columns = (
        Column(key="model", header="model", align="left"),
        Column(key="rung", header="rung", align="left"),
        *step_columns(),
        Column(key="device", header="device", align="left", hide_constant=True),
        Column(key="estimated_bytes", header="estimated", text=format_bytes),
        Column(key="measured_bytes", header="measured", text=format_bytes),
        Column(key="error_frac", header="error", text=format_percent),
    )
    rows = tuple(
        (
            pair.row.model,
            pair.row.rung,
            *_step_values(pair.row),
            device_name(pair.row),
            pair.estimated_bytes,
            pair.measured_bytes,
            pair.error_frac,
        )
        for pair in found.pairs
    )
    lines = []
    if found.pairs:
        largest, median = (format_percent(frac).lstrip("+") for frac in (found.largest_frac, found.median_frac))
        lines.append(f"{len(found.pairs)} rows: largest error {largest}, median {median}")
    if found.num_without:
        lines.append(f"{found.num_without} rows without both numbers are left out")
    return Table(columns=columns, rows=rows, footer=(*lines, *footer))


def provenance(rows: Sequence[RungResult]) -> tuple[str, ...]:
    """The footer that says where the rows come from: commit, torch, device; one line for each machine among them."""
    lines = []
    for row in rows:
        facts = row.environment
        words = [f"{row.source}", device_name(row)]
        words += [f"{name} {facts[name]}" for name in ("torch", "driver", "commit") if name in facts]
        line = ", ".join(words)
        if line not in lines:
            lines.append(line)
    return tuple(lines)


def device_name(row: RungResult) -> str:
    """What the row was measured on: the GPU's name, else the processor's."""
    facts = row.environment
    if row.source == "simulated":
        return f"{facts.get('device', 'a card')} on {facts.get('cpu', 'a processor')}"
    if facts.get("device") == "cuda":
        return str(facts.get("gpu", "cuda"))
    return f"cpu ({facts['cpu']})" if "cpu" in facts else "cpu"


def peak_phase(row: RungResult) -> str | None:
    """Phase with the largest peak; the earlier one when two are equal."""
    return max(row.phase_peaks, key=lambda phase: row.phase_peaks[phase], default=None)


def _values(row: RungResult, rows: Sequence[RungResult]) -> tuple[Any, ...]:
    lever = pulled(row, rows)
    hosts = [peak.host_bytes for peak in row.windows.values() if peak.host_bytes is not None]
    peak_bytes = row.whole_peak_bytes
    gated_bytes = row.peak_reserved_bytes if row.gate_on == "reserved" else peak_bytes
    first = row.windows.get("first_step")
    has_gate = row.gate_bytes is not None and gated_bytes is not None
    return (
        row.rung,
        row.model,
        *_step_values(row),
        row.source,
        row.status,
        peak_bytes,
        row.estimated_bytes,
        row.estimated_bytes / peak_bytes - 1 if row.estimated_bytes is not None and peak_bytes else None,
        row.gate_bytes - gated_bytes if has_gate else None,  # type: ignore[operator]  # has_gate says both are there
        first.allocated_bytes if first is not None else None,
        max(hosts, default=None),
        None if lever is None else lever.saved_bytes,
        peak_phase(row) if peak_bytes else None,
        row.median_step_ns,
        None if lever is None else lever.slower_frac,
        row.samples_per_s,
        row.verdict,
    )


def _step_values(row: RungResult) -> tuple[Any, ...]:
    return tuple(
        None if row.step.get(column.key) in NEW_LEVERS.get(column.key, ()) else row.step.get(column.key)
        for column in step_columns()
    )
