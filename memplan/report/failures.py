"""The moment at which a rung failed, in words."""

from memplan.record import RungResult
from memplan.record.outcome import Failure
from memplan.report.outside import LINE_CHARS, visible
from memplan.units import format_bytes


def failure_lines(row: RungResult) -> list[str]:
    """What is known of the failure of `row`, each number with what it is; empty where nothing is."""
    lines = [visible(row.error, LINE_CHARS)] if row.error else []
    gated_bytes, gate_bytes = row.gated_bytes, row.gate_bytes
    if row.kind == "over_gate" and gated_bytes is not None and gate_bytes is not None:
        over = f"{format_bytes(gated_bytes - gate_bytes)} over the gate of {format_bytes(gate_bytes)}"
        lines.append(f"{format_bytes(gated_bytes)} on {row.gate_on} bytes, {over}")
    return lines if row.failure is None else [*lines, *_moment(row.failure)]


def _moment(failure: Failure) -> list[str]:
    where = visible(failure.window, 80) + (f", {visible(failure.phase, 80)}" if failure.phase else "")
    sizes = (
        ("asked for in vain", failure.requested_bytes, ""),
        ("allocated until then", failure.allocated_bytes, ", so that more is needed"),
        ("reserved until then", failure.reserved_bytes, ""),
        ("free at the driver", failure.free_bytes, ""),
        ("the allocator was capped at", failure.cap_bytes, ""),
    )
    lines = [f"failed in: {where}"]
    lines += [f"{what}: {format_bytes(size)}{behind}" for what, size, behind in sizes if size is not None]
    if failure.snapshot:
        lines.append(f"snapshot of the allocator, of a second run: {visible(failure.snapshot, 300)}")
    return lines
