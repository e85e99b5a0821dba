"""Trace and estimate against figures that others measured and printed."""

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.record import TraceReport
from memplan.spec.published import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPair:
    """One figure, and what the witnesses say."""

    row: Published
    """The figure."""
    traced_bytes: int | None
    """What the trace says; None where there is no step to trace."""
    estimated_bytes: int | None
    """What the formulas say; None where they do not speak of the step."""

    @property
    def traced_error_frac(self) -> float | None:
        """Trace over figure, less 1: positive when the trace is too high."""
        return None if self.traced_bytes is None else self.traced_bytes / self.row.figure_bytes - 1

    @property
    def estimated_error_frac(self) -> float | None:
        """Estimate over figure, less 1."""
        return None if self.estimated_bytes is None else self.estimated_bytes / self.row.figure_bytes - 1

    @property
    def error_frac(self) -> float:
        """The error that judges the row: the trace's, or the estimate's where nothing is traced."""
        traced, estimated = self.traced_error_frac, self.estimated_error_frac
        error = estimated if traced is None else traced
        assert error is not None
        return error

    def holds(self, within_frac: float) -> bool:
        """Whether the witness is within `within_frac` of the figure, or prints as it; an upper bound, not below it by
        more."""
        within_frac = max(within_frac, self.row.rounding_bytes / self.row.figure_bytes)
        if self.row.is_bounded:
            return self.error_frac >= -within_frac
        return abs(self.error_frac) <= within_frac


def peak_of(report: TraceReport, row: Published) -> int:
    """The peak that a figure reads: `allocated`, `active` or `reserved`, less what was there before where it is so."""
    peaks = {
        "allocated": report.peak_allocated_bytes,
        "active": report.peak_active_bytes,
        "reserved": report.peak_reserved_bytes,
    }
    return peaks[row.reads] - report.static_bytes * row.above_start


def worst_first(pairs: Iterable[PublishedPair]) -> tuple[PublishedPair, ...]:
    """The pairs by the absolute error that judges each, the largest first; upper bounds behind all others."""
    return tuple(sorted(pairs, key=lambda pair: (pair.row.is_bounded, -abs(pair.error_frac))))
