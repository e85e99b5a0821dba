"""The repeats of a rung as one: medians over separate processes, and every status that they ended with."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memplan.record import RungResult

VERDICTS = ("fail", "inconclusive", "pass")
"""The worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """One rung, as often as it was climbed."""

    rows: tuple[RungResult, ...]
    """Its rows, at least one."""

    @property
    def row(self) -> RungResult:
        """The row to show: the one with the median peak where a repeat came to its end, else the last."""
        whole = [row for row in self.rows if row.whole_peak_bytes is not None]
        whole.sort(key=lambda row: row.whole_peak_bytes or 0)
        return whole[(len(whole) - 1) // 2] if whole else self.rows[-1]

    @property
    def status(self) -> str:
        """How they ended; each status with how often where they differ."""
        return _counted([row.status for row in self.rows])

    @property
    def verdict(self) -> str:
        """Their verdict; each with how often, the worst first, where they differ."""
        return _counted(sorted((row.verdict for row in self.rows), key=_rank))

    @property
    def worst_verdict(self) -> str:
        """The worst of their verdicts: a gate holds when every repeat holds it."""
        return min((row.verdict for row in self.rows), key=_rank)

    @property
    def peak_bytes(self) -> int | None:
        """Median of the allocated peaks of those that came to their end."""
        return self.median(lambda row: row.whole_peak_bytes)

    @property
    def gated_bytes(self) -> int | None:
        """Median of what the gate reads, of those that came to their end."""
        return self.median(lambda row: None if row.whole_peak_bytes is None else row.gated_bytes)

    @property
    def headroom_bytes(self) -> int | None:
        """Room up to the gate, negative when over it."""
        gate_bytes, gated_bytes = self.row.gate_bytes, self.gated_bytes
        return None if gate_bytes is None or gated_bytes is None else gate_bytes - gated_bytes

    @property
    def error_frac(self) -> float | None:
        """The estimate over the peak, less 1."""
        estimated_bytes, peak_bytes = self.row.estimated_bytes, self.peak_bytes
        return estimated_bytes / peak_bytes - 1 if estimated_bytes is not None and peak_bytes else None

    @property
    def step_ns(self) -> int | None:
        """Median over the repeats of the median time of a step."""
        return self.median(lambda row: row.median_step_ns)

    @property
    def samples_per_s(self) -> float | None:
        """Median over the repeats of samples a second."""
        return self.middle(lambda row: row.samples_per_s)

    def middle(self, read: Callable[[RungResult], float | None]) -> float | None:
        """Median of the numbers that `read` finds; None where there is none."""
        known = [value for row in self.rows if (value := read(row)) is not None and value == value]
        return statistics.median(known) if known else None

    def median(self, read: Callable[[RungResult], int | None]) -> int | None:
        """The same of whole numbers, rounded down."""
        found = self.middle(read)
        return None if found is None else int(found)


def repeats_of(rows: Sequence[RungResult]) -> tuple[Repeats, ...]:
    """`rows` rung by rung, in the order of each rung's first row. Repeats that were skipped for what an earlier one had
    shown are left out."""
    found: dict[tuple[str, ...], list[RungResult]] = {}
    for row in rows:
        found.setdefault((row.run_id, row.model, row.rung, row.source), []).append(row)
    tried = ([row for row in same if row.kind != "skipped"] or same for same in found.values())
    return tuple(Repeats(rows=tuple(sorted(same, key=lambda row: row.repeat))) for same in tried)


def worst_first(rungs: Sequence[Repeats]) -> list[Repeats]:
    """`rungs` in the order in which a person wants to hear of them: failed, then undecided, then the fullest."""

    def rank(rung: Repeats) -> tuple[int, bool, float]:
        room = rung.headroom_bytes
        return _rank(rung.worst_verdict), rung.row.kind == "ok", room if room is not None else -(rung.peak_bytes or 0)

    return sorted(rungs, key=rank)


def _counted(words: Sequence[str]) -> str:
    counts = Counter(words)
    return words[0] if len(counts) == 1 else ", ".join(f"{word} ×{count}" for word, count in counts.items())


def _rank(verdict: str) -> int:
    return VERDICTS.index(verdict) if verdict in VERDICTS else 0
