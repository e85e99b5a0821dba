"""Which rung to use, in words: only what was measured and passed is recommended."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.record import RungResult
from memplan.units import format_bytes, format_percent

LEVEL_FRAC = 0.01
"""Rungs that are at most this much slower than the fastest are as good as it; the one that needs least is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A rung and why."""

    row: RungResult
    """The rung, by the row of its first repeat."""
    sentence: str
    """Which rung to use, by how much faster than the next, and how much headroom it has."""


def speed(rows: Sequence[RungResult]) -> float | None:
    """Samples a second of a rung, the median over its repeats; None where it was not timed."""
    known = [row.samples_per_s for row in rows if row.samples_per_s is not None]
    return statistics.median(known) if known else None


def passing(rows: Sequence[RungResult]) -> list[list[RungResult]]:
    """Repeats of each rung all of which came to their end and, where there is a gate, passed it."""
    groups: dict[str, list[RungResult]] = {}
    for row in rows:
        groups.setdefault(row.run_id, []).append(row)
    for group in groups.values():
        group[:] = [row for row in group if row.kind != "skipped"] or group
    return [
        group
        for group in groups.values()
        if all(row.status == "ok" and (row.gate_bytes is None or row.verdict == "pass") for row in group)
    ]


def recommend(rows: Sequence[RungResult]) -> Recommendation | None:
    """The fastest rung that was measured and passed; of those within `LEVEL_FRAC` of it the one with the lowest peak.

    None where nothing was measured: what a card would do that is not there is no recommendation.
    """
    timed = [(found, group) for group in passing(rows) if (found := speed(group)) and group[0].source == "measured"]
    if not timed:
        return None
    fastest = max(found for found, _ in timed)
    level = [(found, group) for found, group in timed if found >= fastest * (1 - LEVEL_FRAC)]
    own_speed, group = min(level, key=lambda one: (peak(one[1]), -one[0]))
    row = max(group, key=lambda one: one.peak_allocated_bytes or 0)
    words = [f"use {_name(row, rows)}: {_round(own_speed)} samples/s"]
    others = sorted((one for one in timed if one[1] is not group), key=lambda one: -one[0])
    if others:
        next_speed, other = others[0]
        change = own_speed / next_speed - 1
        if abs(change) <= LEVEL_FRAC:
            words.append(f"as fast as {_name(other[0], rows)}{_less(peak(group), peak(other))}")
        elif _overlap(group, other):
            words.append(
                f"not told apart from the next, {_name(other[0], rows)}, by so few steps (--repeat 5 tells more)"
            )
        else:
            once = " (one process each; --repeat 5 tells speed from noise)" if 1 in (len(group), len(other)) else ""
            words.append(f"{format_percent(change).lstrip('+')} faster than the next, {_name(other[0], rows)}{once}")
    elif len({one.run_id for one in rows}) > 1:
        words.append("the only measured rung that passed")
    if row.peak_allocated_bytes is not None:
        words.append(f"peak {format_bytes(row.peak_allocated_bytes)}")
    if row.gate_bytes is not None and row.gated_bytes is not None:
        words.append(f"{format_bytes(row.gate_bytes - row.gated_bytes)} under the gate")
    words += [f"but beware: {warning}" for warning in dict.fromkeys(text for one in group for text in one.warnings)]
    return Recommendation(row=group[0], sentence=", ".join(words))


def brackets(rows: Sequence[RungResult]) -> tuple[str, ...]:
    """For each mode of a search: the largest batch that passed and the smallest that did not, in words."""
    groups: dict[tuple[str, ...], list[RungResult]] = {}
    for row in rows:
        step = {key: value for key, value in row.step.items() if key != "batch"}
        groups.setdefault((row.model, str(sorted(step.items(), key=str))), []).append(row)
    lines = []
    for group in groups.values():
        passed = max((row for row in group if row.verdict == "pass"), key=lambda row: row.step["batch"], default=None)
        failed = min((row for row in group if row.verdict == "fail"), key=lambda row: row.step["batch"], default=None)
        unit = group[0].step.get("chunks", 1)
        if passed is None:
            lines.append(
                f"@{group[0].step['ckpt']}: no batch passed"
                + ("" if failed is None else f"; {failed.rung} is too large")
            )
        elif failed is None:
            lines.append(f"{passed.rung} passes; a larger batch was not tried")
        elif failed.step["batch"] - passed.step["batch"] == unit:
            lines.append(f"{passed.rung} is the largest that passes; {failed.rung} does not")
        else:
            lines.append(f"{passed.rung} passes and {failed.rung} does not; what lies between was not tried")
    return tuple(lines)


def peak(group: Sequence[RungResult]) -> int:
    """Largest allocated bytes over a rung's repeats."""
    return max((row.peak_allocated_bytes or 0) for row in group)


def _less(own_bytes: int, other_bytes: int) -> str:
    difference = other_bytes - own_bytes
    if not difference:
        return ""
    return f" with {format_bytes(abs(difference))} {'less' if difference > 0 else 'more'} memory"


def _overlap(group: Sequence[RungResult], other: Sequence[RungResult]) -> bool:
    """Whether the slowest step a sample of the one took as long as the fastest of the other: of repeats their medians,
    of a single process its steps."""
    own, others = _times(group), _times(other)
    return max(own) >= min(others) and max(others) >= min(own)


def _times(group: Sequence[RungResult]) -> list[float]:
    """Nanoseconds a sample."""
    if len(group) > 1:
        return [row.median_step_ns / row.step["batch"] for row in group if row.median_step_ns is not None]
    return [step_ns / row.step["batch"] for row in group for step_ns in row.step_ns]


def _round(speed: float) -> str:
    return f"{speed:.3g}" if speed < 1000 else f"{speed:,.0f}"


def _name(row: RungResult, rows: Sequence[RungResult]) -> str:
    """The rung, with the model, loss and precision where those of `rows` differ."""
    words = [row.rung]
    if len({other.model for other in rows}) > 1:
        words.insert(0, row.model)
    for name in ("loss", "precision", "compile"):
        if len({str(other.step.get(name)) for other in rows}) > 1:
            words.append(f"{name} {row.step.get(name)}")
    return " ".join(words)
