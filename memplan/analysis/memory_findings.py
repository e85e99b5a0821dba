"""Bytes before and after. Memory of a fixed question is deterministic, so one run a side is enough.

Of several repeats the largest counts. Reserved and used bytes are not as exact: how many segments the allocator keeps
depends on the order in which other threads free, and what the driver takes on its version and on loaded kernels. They
have a tolerance of their own, and are a verdict of their own only where the gate reads them or where the allocator was
replayed; elsewhere they are shown beside the allocated bytes. What was predicted is judged where nothing ran, and told
beside what was measured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memplan.analysis.comparison import Finding
from memplan.analysis.finding import finding
from memplan.analysis.matching import Pair
from memplan.analysis.surroundings import PREDICTED
from memplan.record import CATEGORIES, PHASES, RungResult
from memplan.units import MIB, format_bytes

TOLERANCE_FRAC = 0.001
"""Share of the base by which bytes may differ and are still the same."""
TOLERANCE_BYTES = 2 * MIB
"""Bytes by which they may: one small segment of CUDA's allocator."""
LOOSE_FRAC = 0.02
"""The share for reserved and used bytes."""
LOOSE_BYTES = 64 * MIB
"""The bytes for these: three of the allocator's 20 MiB segments."""
LEFT = "between two steps "
"""What stands in the words about a peak before those about what is left there."""
WORTH_NAMING = 0.1
"""Share of a difference below which a category is not named as its cause."""

Read = Callable[[RungResult], int | None]


def memory_findings(pair: Pair, tolerance_frac: float, tolerance_bytes: int) -> Iterator[Finding]:
    """What the peaks of a pair say: the verdicts, and the details that explain them."""
    exact = (tolerance_frac, tolerance_bytes)
    loose = (max(LOOSE_FRAC, tolerance_frac), max(LOOSE_BYTES, tolerance_bytes))
    simulated, gates = pair.shown.source in PREDICTED, {row.gate_on for row in pair.new}
    left = _judge(
        pair, "between_steps_bytes", leftover_reader(pair), exact, why=lambda: leak_cause(pair.base, pair.new)
    )
    peak = _judge(pair, "peak_allocated_bytes", _whole, exact, why=lambda: peak_cause(pair.base, pair.new))
    if peak is not None and left is not None and peak.label == left.label == "worse" and left.why:
        peak = replace(peak, why="; ".join(filter(None, (peak.why, f"{LEFT}{left.why}"))))
    yield from (one for one in (peak, left) if one is not None)
    for metric, gate, read in (
        ("peak_reserved_bytes", "reserved", lambda row: row.peak_reserved_bytes),
        ("peak_used_bytes", "used", lambda row: row.peak_used_bytes),
    ):
        counts = simulated or gate in gates
        found = _judge(pair, metric, _of_whole(read), exact if simulated else loose, counts=counts)
        if found is not None:
            yield found
    yield from _details(pair, exact, judged=peak is not None and peak.label != "same")
    for metric, read in (("estimated_bytes", _estimated), ("traced_bytes", _traced)):
        predicted = _judge(pair, metric, read, exact, counts=peak is None or simulated)
        if predicted is not None and not (metric == "traced_bytes" and simulated and peak is not None):
            yield predicted


def judge_bytes(base: int, new: int, tolerance: tuple[float, int]) -> str:
    """`better`, `same` or `worse`: within the share or the bytes of `tolerance`, whichever is more, they are the
    same."""
    share, size = tolerance
    allowed = max(share * base, size)
    return "same" if abs(new - base) <= allowed else "worse" if new > base else "better"


def peak_cause(base: Sequence[RungResult], new: Sequence[RungResult]) -> str:
    """Which category moved the peak, or else which phase; empty where nobody noted either."""
    categories = grown(_parts(base, "breakdown"), _parts(new, "breakdown"))
    moved = [max(peaks, key=lambda phase: peaks[phase]) for peaks in _phases(base, new) if peaks]
    where = f", and the peak moved from {moved[0]} to {moved[1]}" if len(set(moved)) == 2 else ""
    if categories:
        return categories + where
    phases = grown(*_phases(base, new))
    return f"by phase: {phases}" if phases else ""


def leak_cause(base: Sequence[RungResult], new: Sequence[RungResult]) -> str:
    """Which category is left between two steps; empty where nobody noted."""
    return grown(_parts(base, "between_steps"), _parts(new, "between_steps"))


def grown(base: dict[str, int], new: dict[str, int]) -> str:
    """The parts that moved the sum, the largest first: `activations grew by 12.00 MiB, temps by 3.00 MiB`; empty where
    one side has none or nothing moved."""
    moves = movers(base, new)
    if not moves:
        return ""
    (first, size), *others = moves
    verb = "grew" if size > 0 else "shrank"
    words = [f"{first} {verb} by {format_bytes(abs(size))}"]
    return ", ".join(words + [f"{name} by {format_bytes(abs(size))}" for name, size in others[:2]])


def movers(base: dict[str, int], new: dict[str, int]) -> list[tuple[str, int]]:
    """Parts and bytes that moved in the direction of the largest move, the largest first."""
    if not base or not new:
        return []
    moves = {name: new.get(name, 0) - base.get(name, 0) for name in dict.fromkeys((*base, *new))}
    total = sum(new.values()) - sum(base.values())
    largest = max(moves.values(), key=abs)
    way = total if total else largest
    kept = [(name, size) for name, size in moves.items() if size * way > 0]
    kept.sort(key=lambda move: -abs(move[1]))
    return [(name, size) for name, size in kept if abs(size) >= WORTH_NAMING * abs(kept[0][1])]


def leftover_reader(pair: Pair) -> Read:
    """How what is alive between two steps is read: by category where both sides have that, else from the counters."""
    if all(any(row.between_steps for row in side) for side in (pair.base, pair.new)):
        return lambda row: sum(row.between_steps.values()) if row.between_steps else None
    return lambda row: row.windows["measured"].live_bytes if "measured" in row.windows else None


def largest(rows: Sequence[RungResult], read: Read) -> int | None:
    """The largest of what `read` gives."""
    return max((value for row in rows if (value := read(row)) is not None), default=None)


def _details(pair: Pair, tolerance: tuple[float, int], *, judged: bool) -> Iterator[Finding]:
    """Phases and categories; where the peak holds, what moved among them is not `judged`."""
    base, new = _phases(pair.base, pair.new)
    for prefix, names, before, after in (
        ("phase", PHASES, base, new),
        ("category", CATEGORIES, _parts(pair.base, "breakdown"), _parts(pair.new, "breakdown")),
    ):
        if not before or not after:
            continue
        for name in names:
            if before.get(name) or after.get(name):
                was, now = before.get(name, 0), after.get(name, 0)
                label = judge_bytes(was, now, tolerance)
                label = label if judged or label == "same" else "moved"
                yield finding(pair, f"{prefix}:{name}", label, was, now, unit="bytes", counts=False)


def _judge(
    pair: Pair,
    metric: str,
    read: Read,
    tolerance: tuple[float, int],
    *,
    counts: bool = True,
    why: Callable[[], str] = str,
) -> Finding | None:
    """The finding of one metric; None unless both sides have it."""
    base, new = largest(pair.base, read), largest(pair.new, read)
    if base is None or new is None:
        return None
    label = judge_bytes(base, new, tolerance)
    if label == "same":
        told = _floor(base, new, tolerance)
    else:
        label, told = label if counts else "moved", why()
    return finding(pair, metric, label, base, new, unit="bytes", counts=counts, why=told)


def _floor(base: int, new: int, tolerance: tuple[float, int]) -> str:
    """What to say where bytes are the same only because their difference is small in itself."""
    share, size = tolerance
    return f"a change of up to {format_bytes(size)} is none" if abs(new - base) > share * base else ""


def _phases(base: Sequence[RungResult], new: Sequence[RungResult]) -> tuple[dict[str, int], dict[str, int]]:
    return _parts(base, "phase_peaks"), _parts(new, "phase_peaks")


def _parts(rows: Sequence[RungResult], name: str) -> dict[str, int]:
    """Bytes by part of the repeat in which the sum was largest."""
    found: list[dict[str, int]] = [getattr(row, name) for row in rows if row.whole_peak_bytes is not None]
    return max(found, key=lambda parts: sum(parts.values()), default={})


def _whole(row: RungResult) -> int | None:
    return row.whole_peak_bytes


def _of_whole(read: Read) -> Read:
    return lambda row: read(row) if row.whole_peak_bytes is not None else None


def _estimated(row: RungResult) -> int | None:
    return row.estimated_bytes


def _traced(row: RungResult) -> int | None:
    return row.traced_bytes
