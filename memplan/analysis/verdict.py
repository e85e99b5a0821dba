"""A comparison in a sentence, and what to know besides."""

from collections.abc import Sequence

from memplan.analysis.comparison import Comparison, Finding
from memplan.analysis.memory_findings import LEFT
from memplan.units import format_bytes, format_ns, format_percent

NAMED = 3
"""Rungs that a sentence names; the rest are counted."""
MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_used_bytes", "estimated_bytes", "traced_bytes")
"""Metrics that are peaks, the one that speaks for a rung first."""
FORESEEN = ("estimated_bytes", "traced_bytes")
"""Those of them that were said before anything ran."""
KINDS = {metric: metric.split("_")[-2] for metric in MEMORY[1:]}
"""What to call the bytes of a peak that are not allocated ones: `reserved`."""


def verdict(found: Comparison) -> str:
    """The whole answer in one sentence, the worst first."""
    if found.nothing is not None:
        return f"Nothing to compare: {found.nothing}."
    if not found.num_compared:
        lost = [finding for finding in found.of("incomparable", "missing") if finding.why]
        if not lost:
            return "Not comparable: the two have no rung in common."
        return f"Not comparable: {lost[0].why}."
    total = len({finding.name for finding in found.counted})
    parts = [
        part
        for part in (
            _part(_broke(found), total, "does not come to its end any more", "do not come to their end any more"),
            _part(_broke(found, over=True), total, "is over the gate now", "are over the gate now"),
            _part(_peaks(found, "worse"), total, "needs more memory", "need more memory"),
            _part(
                _leaks(found, "worse"),
                total,
                "leaves more behind between two steps",
                "leave more behind between two steps",
            ),
            _part(_times(found, "worse"), total, "is slower", "are slower"),
            "" if found.allow_missing else _uncovered(found, total),
        )
        if part
    ]
    if not parts:
        rungs = f"{found.num_compared} rung{'s' * (found.num_compared != 1)}"
        unsure = _times(found, "ambiguous")
        better = found.of("better", "fixed")
        parts = [_part(better, total, "is better", "are better")] if better else [f"nothing is worse in {rungs}"]
        if unsure:
            parts.append(_part(unsure, total, "cannot be told apart in speed", "cannot be told apart in speed"))
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def notes(found: Comparison) -> tuple[str, ...]:
    """What to know besides, a sentence each: what could not be judged, what is stale, what differs around it."""
    lines = list(found.warnings)
    ambiguous, thin = found.of("ambiguous"), found.of("insufficient")
    if ambiguous:
        lines.append(f"AMBIGUOUS, neither passed nor failed: {_names(ambiguous)}.")
    if thin:
        lines.append(f"Not judged for want of numbers: {_names(thin)}.")
    if lost := found.of("incomparable"):
        lines += [f"Not comparable: {_names(lost)}: {why}." for why in dict.fromkeys(finding.why for finding in lost)]
    if gone := found.of("missing"):
        allowed = "allowed" if found.allow_missing else "a failure without --allow-missing"
        lines.append(f"Missing ({allowed}): {_names(gone)}.")
    predicted = [
        one for one in found.findings if one.metric in FORESEEN and one.label == "moved" and (one.delta or 0) > 0
    ]
    if predicted:
        lines.append(f"Predicted memory grew, which is no verdict beside what was measured: {_moves(predicted)}.")
    if found.is_stale:
        lines.append(
            f"The base is stale: {_names(found.of('better', 'fixed'))} improved beyond the tolerance, which could be "
            "lost again unseen."
        )
    return tuple(lines)


def effect(finding: Finding) -> str:
    """What a finding says, in a few words: `+12.00 MiB in activations`, `+8.20 % step time`, `ok before, oom now`."""
    if finding.unit == "bytes" and finding.delta is not None:
        return " ".join(filter(None, (signed_bytes(int(finding.delta)), KINDS.get(finding.metric))))
    if finding.unit == "ns" and finding.change is not None:
        return f"{format_percent(finding.change)} step time"
    if finding.metric == "status" and finding.base is not None and finding.new is not None:
        return f"{finding.base} before, {finding.new} now"
    return finding.why


def signed_bytes(num_bytes: int) -> str:
    """Bytes with their sign."""
    return ("+" if num_bytes > 0 else "") + format_bytes(num_bytes)


def number(finding: Finding, value: int | float | str | None) -> str | None:
    """One side of a finding as text; None where it has none."""
    if value is None or isinstance(value, str):
        return value
    if finding.unit == "bytes":
        return format_bytes(int(value))
    return format_ns(int(value)) if finding.unit == "ns" else f"{value:.2f}"


def _part(findings: Sequence[Finding], total: int, one: str, many: str) -> str:
    """`1 of 6 rungs needs more memory: B4c2@none +12.00 MiB in activations`; empty where there is none."""
    by_name = {finding.name: finding for finding in reversed(findings)}  # the worst of each rung stays
    if not by_name:
        return ""
    count = len(by_name)
    rest = f" and {count - NAMED} more" if count > NAMED else ""
    named = [f"{name} {effect(finding)}{_cause(finding)}" for name, finding in reversed(by_name.items())][:NAMED]
    return f"{count} of {total} rung{'s' * (total != 1)} {one if count == 1 else many}: {', '.join(named)}{rest}"


def _cause(finding: Finding) -> str:
    """` in activations` where `why` says that a category grew or shrank, and what is left between two steps."""
    at_peak, _, left = finding.why.partition(LEFT)
    first, kept = _mover(at_peak), _mover(left)
    stays = f" ({'' if kept == first else f'{kept} '}left from the step before)" if kept else ""
    return (f" in {first}" if first else "") + stays


def _mover(why: str) -> str:
    """The category that `why` begins with; empty where it names none."""
    name, _, rest = why.partition(" ")
    return name if rest.startswith(("grew by", "shrank by")) else ""


def _uncovered(found: Comparison, total: int) -> str:
    lost = found.uncovered
    if not lost:
        return ""
    rest = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    verb = "is held against nothing" if len(lost) == 1 else "are held against nothing"
    return f"{len(lost)} of {total} rung{'s' * (total != 1)} {verb}: {', '.join(lost[:NAMED])}{rest}"


def _broke(found: Comparison, *, over: bool = False) -> list[Finding]:
    """What broke: by being `over` its gate, or in whatever other way."""
    return [finding for finding in found.of("broke") if str(finding.new).startswith("over_gate") == over]


def _peaks(found: Comparison, label: str) -> list[Finding]:
    """Peaks with this label: of each rung the one that speaks for it, where it has several."""
    first: dict[str, Finding] = {}
    for finding in sorted(found.of(label), key=lambda one: MEMORY.index(one.metric) if one.metric in MEMORY else -1):
        if finding.metric in MEMORY:
            first.setdefault(finding.name, finding)
    return sorted(first.values(), key=lambda one: one.rank)


def _leaks(found: Comparison, label: str) -> list[Finding]:
    grown = {finding.name for finding in _peaks(found, label)}
    return [
        finding for finding in found.of(label) if finding.metric == "between_steps_bytes" and finding.name not in grown
    ]


def _times(found: Comparison, label: str) -> list[Finding]:
    return [finding for finding in found.of(label) if finding.metric == "step_ns"]


def _moves(findings: Sequence[Finding]) -> str:
    """`B4c2@none +12.00 MiB estimated`, as many as a sentence names."""
    told = ", ".join(f"{finding.name} {effect(finding)}" for finding in findings[:NAMED])
    return told + (f" and {len(findings) - NAMED} more" if len(findings) > NAMED else "")


def _names(findings: Sequence[Finding]) -> str:
    names = list(dict.fromkeys(finding.name for finding in findings))
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
