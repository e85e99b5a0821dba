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
MOST_TRACES = 8
"""Traces that a search may make for one mode before it climbs; each takes seconds and no device."""


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


@dataclass(kw_only=True, slots=True)
class Bracket:
    """What is known about the largest batch that stays at or under a limit."""

    limit_bytes: int
    """What peaks are held against."""
    unit: int
    """Batches are multiples of it."""
    sample_bytes: Callable[[int], int | None]
    """What the formulas say that the last sample of a batch adds; None where there are none."""
    low: int = 0
    """Largest batch that passes; 0 when none is known to."""
    high: int | None = None
    """Smallest batch that does not."""

    @property
    def closed(self) -> bool:
        """Whether the next larger batch is known not to pass, or none passes."""
        return self.high is not None and self.high - self.low <= self.unit

    def learn(self, batch: int, *, passes: bool) -> None:
        """`batch` passes, or does not."""
        if passes:
            self.low = max(self.low, batch)
        else:
            self.high = batch if self.high is None else min(self.high, batch)

    def following(self, batch: int, peak_bytes: int | None) -> int:
        """The batch to look at behind `batch`, whose peak was `peak_bytes`: as many samples further as what is left has
        room for; where the peak is not known, halfway to what is known."""
        sample_bytes = self.sample_bytes(batch)
        if peak_bytes is None or not sample_bytes:
            guess = (self.low + batch) // 2 if batch == self.high else 2 * batch
        else:
            guess = batch + (self.limit_bytes - peak_bytes) // sample_bytes
        guess = max(guess // self.unit * self.unit, self.low + self.unit)
        return guess if self.high is None else min(guess, self.high - self.unit)


def refined(batch: int, bracket: Bracket, traced: Callable[[int], int | None]) -> int:
    """The largest batch that stays under the limit by the trace, sought from `batch` on in `MOST_TRACES` traces;
    the last one seen to stay under it, or else the last guess, where that was not enough or nothing can be traced."""
    for _ in range(MOST_TRACES):
        peak_bytes = traced(batch)
        if peak_bytes is None:
            break
        bracket.learn(batch, passes=peak_bytes <= bracket.limit_bytes)
        if bracket.closed:
            break
        batch = bracket.following(batch, peak_bytes)
    return bracket.low or batch


def largest_batch(
    gate_bytes: int,
    *,
    first: Point,
    predicted: int,
    estimated: Callable[[Point], int | None],
    traced: Callable[[Point], int | None],
    at: Callable[[int], Point],
) -> Plan:
    """Climbs at most `MOST_RUNGS` rungs like `first` around the largest batch that passes the gate.

    `predicted` is the largest batch by the formulas, which the trace refines before anything is climbed; `at` gives the
    point of a batch. A measured peak leads to the next batch. It ends when a batch that passes and the next one, which
    does not, were both climbed.
    """
    unit = first.rung.chunks

    def sample_bytes(batch: int) -> int | None:
        more, less = estimated(at(batch + unit)), estimated(at(batch))
        return None if more is None or less is None else (more - less) // unit

    def bracket() -> Bracket:
        return Bracket(limit_bytes=gate_bytes, unit=unit, sample_bytes=sample_bytes)

    found, by_trace = bracket(), bracket()
    batch = refined(max(predicted // unit * unit, unit), by_trace, lambda size: traced(at(size)))
    for _ in range(MOST_RUNGS):
        point = at(batch)
        row = yield Attempt(point=point, estimated_bytes=estimated(point))
        if row.verdict not in ("pass", "fail"):
            return
        found.learn(batch, passes=row.verdict == "pass")
        if found.closed:
            return
        shown = batch == by_trace.low and by_trace.closed and found.low == batch  # the next one fails, says the trace
        batch = batch + unit if shown else found.following(batch, needed_bytes(row))


def needed_bytes(row: RungResult) -> int | None:
    """What a rung needed at least: its peak, or at the moment of its failure what it had and asked for."""
    if row.kind in ("ok", "over_gate") or row.source == "simulated":
        return row.gated_bytes
    failure = row.failure
    if failure is None or failure.allocated_bytes is None or failure.requested_bytes is None:
        return None
    return failure.allocated_bytes + failure.requested_bytes
