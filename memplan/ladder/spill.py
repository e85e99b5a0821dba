"""Memory that went to the host unasked: Windows' driver lets a step that does not fit run on, only slowly."""

from collections.abc import Iterable
from typing import Any

from memplan.record import RungResult
from memplan.record.fingerprint import spill_possible

SUSPICIOUS_TIMES = 2.0
"""How many times as long for a sample as a smaller rung is no longer explained by anything that a larger batch does."""


def spill_warning(row: RungResult, done: Iterable[RungResult]) -> str | None:
    """What to know about a rung that may have run from the host's memory, or None.

    It is one that is no smaller than a rung of `done` alike but for batch and chunks, takes much longer for a sample,
    and whose allocator had to repeat no request, which would explain it too.
    """
    pace, peak_bytes = row.samples_per_s, row.peak_allocated_bytes
    measured = row.windows.get("measured")
    if not spill_possible(row.environment) or not pace or peak_bytes is None:
        return None
    if measured is not None and measured.num_alloc_retries:
        return None
    for other in done:
        smaller = other.peak_allocated_bytes is not None and other.peak_allocated_bytes < peak_bytes
        if smaller and _kind(other) == _kind(row) and (other.samples_per_s or 0) > SUSPICIOUS_TIMES * pace:
            times = (other.samples_per_s or 0) / pace
            return (
                f"possible spill: {times:.1f} times as long a sample as {other.rung}, and under"
                f" {row.environment['driver_model']} what does not fit goes to the host's memory without an error"
            )
    return None


def _kind(row: RungResult) -> tuple[str, dict[str, Any]]:
    return row.model, {name: value for name, value in row.step.items() if name not in ("batch", "chunks")}
