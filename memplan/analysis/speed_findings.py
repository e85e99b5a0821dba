"""Times before and after: one number for each process, and the rules of `stats`."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from memplan.analysis.comparison import Finding
from memplan.analysis.finding import finding
from memplan.analysis.matching import Pair
from memplan.analysis.stats import LEAST, Difference, difference
from memplan.analysis.surroundings import Different
from memplan.analysis.surroundings import told as in_words
from memplan.record import RungResult
from memplan.units import format_ns, format_percent

USUAL = ("power cap",)
"""Reasons for a lower clock that are the usual state of a busy GPU: both sides have them, and the clock is told."""
SAME_CLOCK_FRAC = 0.02
"""Changes of a GPU's clock below this share explain nothing."""


def speed_findings(pair: Pair, different: Different, least_frac: float, least_ns: float) -> Iterator[Finding]:
    """The verdict on the step time, and the same as samples a second; nothing where no side was timed."""
    if not any(row.step_ns for row in (*pair.base, *pair.new)):
        return
    if different:
        yield finding(pair, "step_ns", "incomparable", unit="ns", why=in_words(different))
        return
    base, new = timed(pair.base), timed(pair.new)
    times = [[row.median_step_ns or 0 for row in rows] for rows in (base, new)]
    found = difference(*times, least_frac=least_frac, least_abs=least_ns)
    label, why = found.label, _why(pair, found, base, new, least_frac, least_ns)
    if label in ("worse", "better") and (clock := _clock_explains(found, base, new, least_frac)):
        label, why = "ambiguous", clock
    counts = {"num_base": len(base), "num_new": len(new), "interval": found.interval, "change": found.change}
    before, after = (int(statistics.median(side)) if side else None for side in times)
    yield finding(pair, "step_ns", label, before, after, unit="ns", why=why, **counts)  # type: ignore[arg-type]
    speeds = [[row.samples_per_s for row in rows if row.samples_per_s is not None] for rows in (base, new)]
    if all(speeds):
        yield finding(
            pair,
            "samples_per_s",
            label,
            statistics.median(speeds[0]),
            statistics.median(speeds[1]),
            unit="samples/s",
            counts=False,
            num_base=len(base),
            num_new=len(new),
            why="judged by the step time",
        )


def timed(rows: Sequence[RungResult]) -> tuple[RungResult, ...]:
    """Rows whose times may be believed."""
    return tuple(row for row in rows if row.step_ns and not disturbed(row))


def disturbed(row: RungResult) -> str:
    """Why the times of a row say little about its step; empty where they do."""
    watched = [row.windows[name] for name in ("measured", "timed") if name in row.windows]
    if row.kind not in ("ok", "over_gate"):
        return f"it ended with {row.status}"
    throttled = row.telemetry.get("throttled") or ()
    told = throttled if isinstance(throttled, list | tuple) else (throttled,)
    if reasons := [str(reason) for reason in told if reason not in USUAL]:
        return f"the GPU was slowed down ({', '.join(reasons)})"
    if row.telemetry.get("others") or any(window.others_bytes for window in watched):
        return "other processes used the GPU"
    if any(window.steady is False and window.num_device_allocs for window in watched):
        return "its steps still asked the driver for memory"  # times alone that differ are what repeats are for
    return ""


def _why(
    pair: Pair,
    found: Difference,
    base: Sequence[RungResult],
    new: Sequence[RungResult],
    least_frac: float,
    least_ns: float,
) -> str:
    left_out = [(row, side) for rows, side in ((pair.base, "before"), (pair.new, "now")) for row in rows if row.step_ns]
    reasons = dict.fromkeys(f"{why} {side}" for row, side in left_out if (why := disturbed(row)))
    processes = f"{len(base)} {'process' if len(base) == 1 else 'processes'} before, {len(new)} now"
    if found.label == "insufficient":
        return "; ".join([f"{processes}: times need {LEAST} a side", *reasons])
    words = [processes]
    if found.label == "ambiguous":
        low, high = (format_percent(end, 1) for end in found.interval or (0.0, 0.0))
        least = format_percent(found.least, 1).lstrip("+")
        words.append(f"the change lies between {low} and {high}: one of {least} cannot be told; repeat more often")
    if found.label == "same" and found.change is not None and abs(found.change) >= least_frac:
        words.append(f"a change of up to {format_ns(int(least_ns))} is none")
    return "; ".join([*words, *(f"left out: {reason}" for reason in reasons)])


def _clock_explains(
    found: Difference, base: Sequence[RungResult], new: Sequence[RungResult], least_frac: float
) -> str | None:
    """A sentence where the GPU ran at another clock and the step takes as many of its cycles as before."""
    clocks = [
        [clock for row in rows if (clock := _clock_mhz(row.telemetry.get("sm_clock_mhz")))] for rows in (base, new)
    ]
    if not all(clocks) or found.change is None:
        return None
    before, after = (statistics.median(side) for side in clocks)
    cycles = (1 + found.change) * after / before - 1
    if abs(after / before - 1) < SAME_CLOCK_FRAC or abs(cycles) >= least_frac:
        return None
    return (
        f"the GPU's clock was {before:.0f} MHz before and {after:.0f} MHz now; counted in its cycles the step differs "
        f"by {format_percent(cycles)}"
    )


def _clock_mhz(told: Any) -> float | None:
    """One number from however a clock was told: a number, several samples, or a summary of them."""
    if isinstance(told, dict):
        told = told.get("median", told.get("mean"))
    if isinstance(told, list | tuple):
        numbers = [value for value in told if isinstance(value, int | float)]
        return statistics.median(numbers) if numbers else None
    return float(told) if isinstance(told, int | float) else None
