"""The ladder's page as tables: rows side by side, and estimate against measurement."""

from collections.abc import Callable, Sequence

from memplan.analysis import Agreement, findings, pulled
from memplan.record import RungResult
from memplan.report.ladder_columns import COLUMNS, Line, step_columns, step_values
from memplan.report.ladder_columns import values as values_of
from memplan.report.repeats import repeats_of
from memplan.report.table import Column, Table
from memplan.units import format_bytes, format_percent


def ladder_table(rows: Sequence[RungResult], footer: Sequence[str] = (), *, errors: bool = True) -> Table:
    """One line a rung, its repeats together; failures say below why, unless `errors` is off."""
    rungs = repeats_of(rows)
    shown = [rung.row for rung in rungs]
    gates = sorted({(row.gate_bytes, row.gate_on) for row in rows if row.gate_bytes is not None})
    lines = [f"gate {format_bytes(size)} on {what} bytes, first step included" for size, what in gates]
    tried = [row for rung in rungs for row in rung.rows]
    label = labels(rows)
    said = [f"{label(row)}: {row.status}: {row.error}" for row in tried if row.error and errors]
    said += [f"{label(row)}: {row.environment['note']}" for row in tried if row.environment.get("note")]
    said += [f"{label(row)}: {warning}" for row in tried for warning in row.warnings]
    lines += dict.fromkeys(said)
    lines += findings(shown)
    levers = pulled(shown)
    values = tuple(values_of(Line(rung=rung, lever=lever)) for rung, lever in zip(rungs, levers, strict=True))
    return Table(columns=COLUMNS, rows=values, footer=(*lines, *footer))


def labels(rows: Sequence[RungResult]) -> Callable[[RungResult], str]:
    """What names a rung: with the model and the loss where those of `rows` differ."""
    models = len({row.model for row in rows}) > 1
    losses = len({row.step.get("loss") for row in rows}) > 1

    def label(row: RungResult) -> str:
        loss = f" loss {row.step.get('loss', 'full')}" if losses else ""
        return f"{row.model} {row.rung}{loss}" if models else row.rung + loss

    return label


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
            *step_values(pair.row),
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
        if row.kind == "skipped":  # nothing ran
            continue
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
    if row.source == "estimated":
        return str(facts.get("device", "a card"))
    if row.source == "simulated":
        return f"{facts.get('device', 'a card')} on {facts.get('cpu', 'a processor')}"
    if facts.get("device") == "cuda":
        return str(facts.get("gpu", "cuda"))
    return f"cpu ({facts['cpu']})" if "cpu" in facts else "cpu"
