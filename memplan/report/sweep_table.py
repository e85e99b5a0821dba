"""Many estimates, one a row."""

from collections.abc import Mapping, Sequence
from typing import Any

from memplan.report.table import Column, Table
from memplan.units import format_bytes

NUMBERS = ("batch", "chunks", "seq", "images", "suffix", "world", "dropout", "clip")
BEHIND = ("peak_allocated_bytes", "fits", "gate_bytes", "limit_bytes", "unsplit")
"""What stands behind the levers."""
MOST_REASONS = 5
"""Reasons that are printed."""


def sweep_table(rows: Sequence[Mapping[str, Any]], fixed: Mapping[str, Any], *, traced: bool) -> Table:
    """A row for each configuration: the levers that were swept and those that are `fixed`, the peak, and whether it
    fits."""
    levers = [name for name in rows[0] if name not in ("model", "device", *BEHIND)]
    limited = any(row["limit_bytes"] is not None for row in rows)
    columns = (
        Column(key="model", header="model", align="left", hide_constant=True),
        Column(key="device", header="device", align="left", hide_constant=True),
        *(Column(key=name, header=name, align="left", hide_constant=True) for name in fixed),
        *(Column(key=name, header=name, align="right" if name in NUMBERS else "left") for name in levers),
        Column(key="peak_allocated_bytes", header="traced peak" if traced else "estimated peak", text=format_bytes),
        Column(key="fits", header="fits", align="left", text=_answer, hide_empty=not limited),
        Column(key="gate_bytes", header="gate", text=format_bytes, hide_constant=True),
        Column(key="limit_bytes", header="held against", text=format_bytes, hide_constant=True),
        Column(key="unsplit", header="peaks", align="left", text=_holding, hide_constant=True),
    )
    values = [{**fixed, **row} for row in rows]
    open_ones = sum(row["fits"] is None for row in rows) if limited else 0
    footer = (
        (f"{open_ones} may not fit (-): less room than fragments and blocks that are not split may take",)
        if open_ones
        else ()
    )
    return Table(
        columns=columns, rows=tuple(tuple(row[column.key] for column in columns) for row in values), footer=footer
    )


def left_out_lines(left_out: Mapping[str, int]) -> list[str]:
    """Lines that say how many configurations no step can be, and why; none where there are none."""
    reasons = sorted(((why, count) for why, count in left_out.items() if count), key=lambda one: -one[1])
    lines = [f"left out {count} of the sweep: {why}" for why, count in reasons[:MOST_REASONS]]
    rest = sum(count for _, count in reasons[MOST_REASONS:])
    return [*lines, *([f"left out {rest} more for other reasons of these kinds"] if rest else [])]


def _answer(fits: bool) -> str:
    return "yes" if fits else "no"


def _holding(unsplit: bool) -> str:
    return (
        "as the allocator holds them"
        if unsplit
        else ("as asked for: a single estimate adds what the allocator leaves unsplit, and looks at what it reserves")
    )
