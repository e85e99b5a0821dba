"""Do estimate and measurement agree? Row by row, the worst first."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from memplan.record import RungResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One row that has both numbers."""

    row: RungResult
    """The row."""
    estimated_bytes: int
    """What the formulas said."""
    measured_bytes: int
    """What the allocator said."""

    @property
    def error_frac(self) -> float:
        """Estimate over measurement, less 1: positive when the estimate is too high."""
        return self.estimated_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """All pairs of some rows."""

    pairs: tuple[Pair, ...]
    """The largest absolute error first."""
    num_without: int
    """Rows that lack one of the two numbers; they are in no statistic."""

    @property
    def largest_frac(self) -> float:
        """Largest absolute error."""
        return max(abs(pair.error_frac) for pair in self.pairs)

    @property
    def median_frac(self) -> float:
        """Median absolute error."""
        return statistics.median(abs(pair.error_frac) for pair in self.pairs)

    def exit_code(self, within_frac: float) -> int:
        """0 when every error is at most `within_frac`, 1 when one is not, 3 when there is no pair."""
        if not self.pairs:
            return 3
        return 0 if self.largest_frac <= within_frac else 1


def agreement(rows: Iterable[RungResult]) -> Agreement:
    """The pairs among `rows`: those that were measured to their end and were estimated.

    A rung that died may have a peak of the windows before, but not its own.
    """
    pairs, num_without = [], 0
    for row in rows:
        ended = row.status in ("ok", "over_gate") and row.source == "measured"
        if ended and row.estimated_bytes is not None and row.peak_allocated_bytes:
            pairs.append(Pair(row=row, estimated_bytes=row.estimated_bytes, measured_bytes=row.peak_allocated_bytes))
        else:
            num_without += 1
    pairs.sort(key=lambda pair: -abs(pair.error_frac))
    return Agreement(pairs=tuple(pairs), num_without=num_without)
