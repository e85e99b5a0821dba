"""What is climbed next: every rung in the order of the estimate, or a search for the largest batch that passes.

A plan is a generator that yields attempts and is sent the row of each, so that the next one may depend on it.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.ladder.gate import judge
from memplan.ladder.points import Point
from memplan.record import Planned, RungResult
from memplan.spec import Ladder

MOST_RUNGS = 3
"""Rungs that a search may climb for one mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One process that is to be started."""

    point: Point
    """What it climbs."""
    repeat: int = 1
    """For the how-manieth time, from 1."""
    estimated_bytes: int | None = None
    """What the formulas say; None where there are none."""

    @property
    def key(self) -> tuple[str, int]:
        """The row's key."""
        return self.point.run.run_id, self.repeat


Plan = Generator[Attempt, RungResult, None]


def every_rung(attempts: Sequence[Attempt]) -> Plan:
    """The attempts in their order."""
    for attempt in attempts:  # noqa: UP028  # a sequence cannot be sent the rows
        yield attempt


def ordered(points: Sequence[Point], estimated: Callable[[Point], int | None], repeat: int = 1) -> list[Attempt]:
    """Attempts of `points`, those that need least first, so that a failure tells of the larger ones before they run.

    Repeats come in rounds, every second one backwards, so that a drift of the machine falls on all rungs alike. Rungs
    that no formula knows come last, as they were typed.
    """
    first = [Attempt(point=point, estimated_bytes=estimated(point)) for point in points]
    first.sort(key=lambda one: (one.estimated_bytes is None, one.estimated_bytes or 0))
    rounds = []
    for number in range(1, repeat + 1):
        turn = first if number % 2 else first[::-1]
        rounds += [Attempt(point=one.point, repeat=number, estimated_bytes=one.estimated_bytes) for one in turn]
    return rounds


def dominating(attempt: Attempt, done: Sequence[tuple[Attempt, RungResult]]) -> RungResult | None:
    """A row that shows that `attempt` cannot pass: the same in all but a smaller batch, or an earlier repeat, ran out
    of memory or was over the gate. Memory is known to grow along the batch alone, so nothing else is concluded."""
    for other, row in done:
        smaller = other.point.rung.batch < attempt.point.rung.batch
        if other.point.same_but_batch != attempt.point.same_but_batch:
            continue
        if (smaller or other.point.run.run_id == attempt.point.run.run_id) and row.kind in ("oom", "over_gate"):
            return row
    return None


def rehearsed(attempts: Sequence[Attempt], ladder: Ladder) -> list[Planned]:
    """Each attempt with what would become of it if every rung needed just what the formulas say."""
    done: list[tuple[Attempt, RungResult]] = []
    plan: list[Planned] = []
    for attempt in attempts:
        point = attempt.point
        named: dict[str, Any] = {"rung": str(point.rung), "model": point.run.name, "repeat": attempt.repeat}
        row = RungResult(
            **named,
            run_id=point.run.run_id,
            status="ok",
            source="estimated",
            step=point.run.step_dict(),
            peak_allocated_bytes=attempt.estimated_bytes,
        )
        row = judge(row, gate_bytes=ladder.gate_bytes, gate_on="allocated")
        fate = "climbed; over the gate by the estimate" if row.status == "over_gate" else "climbed"
        if (smaller := dominating(attempt, done)) is not None:
            fate = f"skipped if {smaller.rung} is over the gate"
        plan.append(Planned(**named, estimated_bytes=attempt.estimated_bytes, fate=fate))
        done.append((attempt, row))
    return plan


def largest_batch(
    first: Point,
    gate_bytes: int,
    *,
    predicted: Callable[[Point, int], int],
    estimated: Callable[[Point], int | None],
    at: Callable[[int], Point],
) -> Plan:
    """Climbs at most `MOST_RUNGS` rungs like `first` around the largest batch that passes the gate.

    `predicted` gives the largest batch that stays under some bytes by the formulas, `at` the point of a batch. The
    bracket starts at the prediction; a measured peak corrects the next one by what the formulas were off. It ends when
    a batch that passes and the next one, which does not, were both climbed.
    """
    unit = first.rung.chunks
    low, limit_bytes = 0, gate_bytes
    high: int | None = None
    for _ in range(MOST_RUNGS):
        batch = predicted(first, limit_bytes) // unit * unit
        batch = max(batch, low + unit)
        if high is not None:
            batch = min(batch, high - unit)
        if batch <= low:
            return
        point = at(batch)
        estimated_bytes = estimated(point)
        row = yield Attempt(point=point, estimated_bytes=estimated_bytes)
        if row.verdict == "pass":
            low = batch
        elif row.verdict == "fail":
            high = batch
        else:
            return
        if row.gated_bytes and estimated_bytes and row.kind in ("ok", "over_gate"):
            limit_bytes = int(gate_bytes * estimated_bytes / row.gated_bytes)
