"""The trend of each rung over several results, oldest first.

Numbers are told against the moment before. A step is marked, by the rules of `compare`, against the last moment at
which one was, so that a creep of many small changes is a step once it is beyond the tolerance; and against one on the
same device and torch, so that an excursion to others hides none.
"""

import datetime
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memplan.analysis.compare import Tolerance, compare, status
from memplan.analysis.matching import Key, repeats, rung_names
from memplan.analysis.speed_findings import timed
from memplan.analysis.surroundings import memory_differences, told
from memplan.record import WHOLE, RungResult

UNKNOWN = "unknown"
"""The time of a result that does not say when it began."""
STEPS = ("broke", "worse", "fixed", "better")
"""Labels that mark a step in a trend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """One result among several."""

    path: Path
    """Where it was read."""
    rows: tuple[RungResult, ...]
    """Its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One rung in one result."""

    name: str
    """The rung and whatever tells it from the others."""
    model: str
    """Model name."""
    run_id: str
    """Identity of the run."""
    source: str
    """`measured`, `simulated` or `estimated`."""
    at: str
    """When it began, UTC, ISO 8601; `UNKNOWN` where no row says."""
    place: int
    """Which of the results it is from, oldest first, from 0."""
    commit: str | None
    """Commit that it ran on."""
    path: Path
    """Where it was read."""
    status: str
    """How it ended."""
    peak_bytes: int | None
    """Largest allocated bytes over the repeats; None where no step was whole."""
    step_ns: int | None
    """Median over processes of their median step time."""
    num_processes: int
    """Processes behind it."""
    peak_change_bytes: int | None = None
    """Peak less the one before; None for the first and where one has none."""
    step_change: float | None = None
    """Step time over the one before, less 1."""
    marks: tuple[str, ...] = ()
    """Which step was taken since the last one there: `memory worse`, `speed better`, `broke`; `elsewhere` where the
    moment before is from a machine or torch whose bytes cannot be compared."""


def history(climbed: Sequence[Climbed], tolerance: Tolerance | None = None) -> tuple[Moment, ...]:
    """All rungs in all results, rung by rung in the order of their first appearance, each oldest first. A result that
    does not say when it began stays behind the one that it was given after."""
    ordered = _ordered(climbed)
    names = rung_names([row for one in ordered for row in one.rows])
    series: dict[Key, list[tuple[int, tuple[RungResult, ...]]]] = {}
    for place, one in enumerate(ordered):
        for key, rows in repeats(one.rows).items():
            series.setdefault(key, []).append((place, rows))
    moments = []
    for key, points in series.items():
        before: tuple[RungResult, ...] = ()
        levels: list[tuple[RungResult, ...]] = []  # one for each machine and torch
        for place, rows in points:
            marks: tuple[str, ...] = ()
            if before and (moved := memory_differences(before, rows)):
                marks = (f"elsewhere: {told(moved)}",)
            level = next((one for one in levels if not memory_differences(one, rows)), None)
            steps = _steps(level, rows, tolerance) if level else ()
            if steps and level:
                levels.remove(level)
            if steps or not level:
                levels.append(rows)
            moments.append(_moment(names[key], place, ordered[place], rows, before, (*marks, *steps)))
            before = rows
    return tuple(moments)


def _ordered(climbed: Sequence[Climbed]) -> list[Climbed]:
    """By when they began, as far as that is known."""
    at, times = "", []
    for one in climbed:
        at = began(one.rows) or at
        times.append(at)
    return [climbed[place] for place in sorted(range(len(climbed)), key=lambda place: times[place])]


def began(rows: Sequence[RungResult]) -> str | None:
    """When the first of `rows` began, UTC, ISO 8601; None where none says."""
    return min((_utc(row.started_at) for row in rows if row.started_at), default=None)


def _utc(text: str) -> str:
    """`text` to the second in UTC, so that texts sort as times do; as it is where it is no time."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.astimezone(datetime.UTC).isoformat(timespec="seconds")


def _moment(
    name: str,
    place: int,
    one: Climbed,
    rows: tuple[RungResult, ...],
    before: tuple[RungResult, ...],
    marks: tuple[str, ...],
) -> Moment:
    peak, step = peak_of(rows), step_of(rows)
    earlier_peak, earlier_step = peak_of(before), step_of(before)
    return Moment(
        name=name,
        model=rows[0].model,
        run_id=rows[0].run_id,
        source=rows[0].source,
        at=began(rows) or UNKNOWN,
        place=place,
        commit=next((str(row.environment["commit"]) for row in rows if row.environment.get("commit")), None),
        path=one.path,
        status=status(rows),
        peak_bytes=peak,
        step_ns=step,
        num_processes=len(rows),
        peak_change_bytes=None if peak is None or earlier_peak is None else peak - earlier_peak,
        step_change=None if step is None or not earlier_step else step / earlier_step - 1,
        marks=marks,
    )


def _steps(level: tuple[RungResult, ...], rows: tuple[RungResult, ...], tolerance: Tolerance | None) -> tuple[str, ...]:
    """What moved since `level`, which is from the same machine and torch."""
    found = compare(level, rows, tolerance=tolerance)
    words = {"peak_allocated_bytes": "memory", "step_ns": "speed", "status": ""}
    return tuple(
        f"{words[one.metric]} {one.label}".strip()
        for one in found.counted
        if one.metric in words and one.label in STEPS
    )


def peak_of(rows: Sequence[RungResult]) -> int | None:
    """The largest whole peak of the repeats."""
    return max((row.whole_peak_bytes for row in rows if row.whole_peak_bytes is not None), default=None)


def step_of(rows: Sequence[RungResult]) -> int | None:
    """Median over processes of the median step time, of those whose times may be believed, or else of all that came to
    their end."""
    usable = timed(rows) or [row for row in rows if row.step_ns and row.kind in WHOLE]
    times = [row.median_step_ns or 0 for row in usable]
    return int(statistics.median(times)) if times else None
