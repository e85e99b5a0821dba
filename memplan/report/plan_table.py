"""What a climb would do, before it does anything."""

from collections.abc import Sequence

from memplan.record import Planned
from memplan.report.table import Column, Table
from memplan.units import format_bytes

COLUMNS = (
    Column(key="place", header="#"),
    Column(key="rung", header="rung", align="left"),
    Column(key="model", header="model", align="left", hide_constant=True),
    Column(key="repeat", header="repeat", hide_constant=True),
    Column(key="estimated_bytes", header="estimated", text=format_bytes),
    Column(key="headroom_bytes", header="headroom", text=format_bytes, hide_empty=True),
    Column(key="fate", header="what would be done", align="left"),
)


def plan_table(plan: Sequence[Planned], *, gate_bytes: int | None) -> Table:
    """One line an attempt, in the order of the climb."""
    rows = tuple(
        (
            place,
            one.rung,
            one.model,
            one.repeat,
            one.estimated_bytes,
            None if gate_bytes is None or one.estimated_bytes is None else gate_bytes - one.estimated_bytes,
            one.fate,
        )
        for place, one in enumerate(plan, 1)
    )
    gate = () if gate_bytes is None else (f"gate {format_bytes(gate_bytes)}",)
    return Table(columns=COLUMNS, rows=rows, footer=(*gate, "estimated; nothing was started"))
