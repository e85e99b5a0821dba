"""Two results side by side: memory judged exactly, times by statistics, and never green because nothing was measured.

A rung is held against the one that asked the same question. Where the question differs, it is `incomparable` and the
fields that differ are named; where only the machine or a library differs, the facts that matter for bytes and for times
are, each for itself. What nobody held against anything counts as missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memplan.analysis.comparison import LABELS, Comparison, Finding
from memplan.analysis.finding import finding
from memplan.analysis.matching import Pair, is_empty, is_final, pairs
from memplan.analysis.memory_findings import TOLERANCE_BYTES, TOLERANCE_FRAC, memory_findings
from memplan.analysis.repeating import apart, more_repeats
from memplan.analysis.speed_findings import speed_findings
from memplan.analysis.stats import LEAST_EFFECT_FRAC, LEAST_EFFECT_NS
from memplan.analysis.surroundings import SPEED_KEYS, differences, memory_differences, speed_differences, told
from memplan.record import WHOLE, RungResult

TRIED = ("skipped", "dirty_device", "interrupted")
"""Kinds of status of a rung that nobody tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What is still the same."""

    memory_frac: float = TOLERANCE_FRAC
    """Share of the base's bytes."""
    memory_bytes: int = TOLERANCE_BYTES
    """Bytes, where they are more."""
    time_frac: float = LEAST_EFFECT_FRAC
    """Share of the base's step time."""
    time_ns: int = LEAST_EFFECT_NS
    """Nanoseconds, where they are more."""


def compare(
    base: Sequence[RungResult],
    new: Sequence[RungResult],
    *,
    base_name: str = "base",
    new_name: str = "new",
    tolerance: Tolerance | None = None,
    across: bool = False,
    allow_missing: bool = False,
    strict: bool = False,
    warnings: Sequence[str] = (),
) -> Comparison:
    """What the rows `new` say when they are held against `base`.

    With `across`, bytes are compared whatever the environment, and times whatever the software. `warnings` are those of
    whoever read the rows. `base_name` and `new_name` are the folders, files or baselines that they come from, and stand
    in the commands that ask for more repeats.
    """
    allowed = tolerance or Tolerance()
    matched = pairs(base, new)
    found = [one for pair in matched for one in _findings(pair, allowed, across)]
    kept = [pair for pair in matched if pair.base and pair.new]
    by_label: dict[str, set[str]] = {label: set() for label in LABELS}
    for one in found:
        if one.metric == "step_ns" and one.counts:
            by_label[one.label].add(one.name)
    unsure = [pair for pair in kept if pair.name in by_label["ambiguous"] | by_label["insufficient"]]
    moved = [pair for pair in kept if pair.name in by_label["worse"] | by_label["better"]]
    return Comparison(
        findings=tuple(sorted(found, key=lambda one: one.rank)),
        base_name=base_name,
        new_name=new_name,
        base_rows=tuple(base),
        new_rows=tuple(new),
        different=differences(base, new, SPEED_KEYS),
        warnings=(*warnings, *apart(moved)),
        commands=more_repeats(unsure, base_name, new_name),
        allow_missing=allow_missing,
        strict=strict,
        nothing=_nothing(base, base_name) or _nothing(new, new_name),
    )


def _nothing(rows: Sequence[RungResult], name: str) -> str | None:
    """A sentence where `rows` measured nothing."""
    if not rows:
        return f"{name} has no row"
    if is_final(rows):
        return None
    statuses = ", ".join(dict.fromkeys(row.status for row in rows))
    ended = f"its {len(rows)} rows" if len(rows) > 1 else "its row"
    without = " and without a number" if any(is_empty(row) for row in rows) else ""
    return f"{name} measured nothing: {ended} ended with {statuses}{without}"


def _findings(pair: Pair, tolerance: Tolerance, across: bool) -> Iterator[Finding]:
    if not pair.new:
        lost = is_final(pair.base)
        label, why = ("missing", "") if lost else ("insufficient", "it was not measured before either")
        yield finding(pair, "status", label, status(pair.base), None, counts=lost, why=why)
        return
    if not pair.base:
        yield finding(pair, "status", "new", None, status(pair.new))
        return
    if pair.drift:
        yield finding(pair, "status", "incomparable", status(pair.base), status(pair.new), why=pair.drift)
        return
    if empty := [side for side, rows in (("before", pair.base), ("now", pair.new)) if all(map(is_empty, rows))]:
        label = "missing" if empty == ["now"] else "incomparable"
        why = f"neither a peak nor a time {' and '.join(empty)}, though it came to its end"
        yield finding(pair, "status", label, status(pair.base), status(pair.new), why=why)
        return
    different = {} if across else memory_differences(pair.base, pair.new)
    if different:
        yield finding(pair, "peak_allocated_bytes", "incomparable", unit="bytes", why=told(different))
    else:
        yield _status(pair)
        yield from _lost_peak(pair)
        if _tried(pair.base) and _tried(pair.new):
            yield from memory_findings(pair, tolerance.memory_frac, tolerance.memory_bytes)
    slower = speed_differences(pair.base, pair.new, across=across)
    yield from speed_findings(pair, slower, tolerance.time_frac, tolerance.time_ns)


def _lost_peak(pair: Pair) -> Iterator[Finding]:
    """A finding where the rung came to its end on both sides and just one of them tells its peak."""
    ended = [[row for row in rows if row.kind in WHOLE] for rows in (pair.base, pair.new)]
    peaks = [max((row.whole_peak_bytes for row in rows if row.whole_peak_bytes is not None), default=None)
             for rows in ended]  # fmt: skip
    if all(ended) and peaks.count(None) == 1:
        side, label = ("before", "new") if peaks[0] is None else ("now", "missing")
        why = f"it has no peak {side}, though it came to its end"
        yield finding(pair, "peak_allocated_bytes", label, *peaks, unit="bytes", why=why)


def _status(pair: Pair) -> Finding:
    """What became of a rung: `fixed`, `broke`, or the `same` end."""
    before, after = status(pair.base), status(pair.new)
    label, why = "same", _error(pair.new)
    gates = [{row.gate_bytes for row in rows} for rows in (pair.base, pair.new)]
    bad = [_is_bad(rows) for rows in (pair.base, pair.new)]
    kinds = {before.partition(":")[0], after.partition(":")[0]}
    if not _tried(pair.new):
        label = "insufficient"
    elif not _tried(pair.base):
        label, why = "new", "it was not tried before" if not why else f"it was not tried before; {why}"
    elif kinds == {"ok", "over_gate"} and gates[0] != gates[1]:
        why = "held against another gate than before"
    elif bad[0] != bad[1]:
        label = "broke" if bad[1] else "fixed"
    elif bad[1] and before != after:
        label, why = "ambiguous", f"another failure than before{': ' + why if why else ''}"
    counts = label != "insufficient" or not bad[0]  # what failed before and is not tried again has lost nothing
    return finding(pair, "status", label, before, after, counts=counts, why=why)


def status(rows: Sequence[RungResult]) -> str:
    """How a rung ended: as its repeats did, or as the first that failed did, with how many of them failed."""
    failed = [row for row in rows if _fails(row)]
    if not failed:
        return rows[0].status
    share = f" ({len(failed)} of {len(rows)})" if len(failed) < len(rows) else ""
    return failed[0].status + share


def _fails(row: RungResult) -> bool:
    return row.kind != "ok"


def _is_bad(rows: Sequence[RungResult]) -> bool:
    return any(_fails(row) for row in rows)


def _tried(rows: Sequence[RungResult]) -> bool:
    return any(row.kind not in TRIED for row in rows)


def _error(rows: Sequence[RungResult]) -> str:
    return next((row.error for row in rows if row.error and _fails(row)), "")
