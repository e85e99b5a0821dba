"""What a ladder came to, in sentences: the verdict, what was left out, and what to type to run it again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from memplan.analysis.matching import is_final
from memplan.record import RungResult
from memplan.report.ladder_columns import LEAST_FOR_PERCENTILES
from memplan.report.outside import visible
from memplan.report.repeats import Repeats
from memplan.units import format_bytes

NAME_CHARS = 80
"""Characters of a rung's name in a sentence."""


class Recommended(Protocol):
    """A rung to use, and why."""

    @property
    def row(self) -> RungResult:
        """The rung, by one of its rows."""

    @property
    def sentence(self) -> str:
        """Why, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to read first."""

    sentences: tuple[str, ...]
    """The verdict, and which rung to use."""
    tone: Literal["good", "bad", "open"]
    """Whether a rung passes, none does, or nothing was decided."""


def verdict_of(rungs: Sequence[Repeats], recommended: Recommended | None = None) -> Verdict:
    """The verdict over all rungs. It is good only where something was measured or simulated and holds."""
    total = len(rungs)
    finished = [rung for rung in rungs if rung.peak_bytes is not None]
    gated = [rung for rung in rungs if rung.row.gate_bytes is not None]
    passed = [rung for rung in gated if rung.worst_verdict == "pass"]
    failed = [rung for rung in gated if rung.worst_verdict == "fail"]
    sentences = []
    tone: Literal["good", "bad", "open"] = "open"
    if not rungs:
        sentences.append("Nothing was measured: there is no row.")
    elif not finished and (not failed or not is_final([row for rung in rungs for row in rung.rows])):
        sentences.append(f"Nothing was measured: {_rungs(total)} ended without a peak ({_statuses(rungs)}).")
    elif gated:
        tone = "good" if passed else "bad" if failed else "open"
        gates = sorted({f"{format_bytes(rung.row.gate_bytes or 0)} on {rung.row.gate_on} bytes" for rung in gated})
        holds = f"{len(passed)} of {_rungs(total)} {_hold(len(passed))} the gate of {' and '.join(gates)}"
        open_ones = total - len(passed) - len(failed)
        if failed:
            holds += f"; {len(failed)} {'does' if len(failed) == 1 else 'do'} not"
        if open_ones:
            holds += f"; {open_ones} came to no verdict"
        sentences.append(f"{holds} ({_sources(rungs)}).")
    else:
        ended = [rung for rung in rungs if rung.row.kind == "ok"]
        tone = "good" if len(ended) == total else "open" if ended else "bad"
        sentences.append(
            f"{len(ended)} of {_rungs(total)} came to {'its' if len(ended) == 1 else 'their'} end ({_sources(rungs)}); "
            "there was no gate to hold."
        )
    if recommended is not None:
        sentences.append(visible(_sentence(recommended.sentence), 400))
    if finished:
        worst = max(finished, key=lambda rung: rung.peak_bytes or 0)
        largest = f"The largest peak is {format_bytes(worst.peak_bytes or 0)}, {worst.row.source}"
        sentences.append(f"{largest}, of {visible(worst.row.rung, NAME_CHARS)}.")
    return Verdict(sentences=tuple(sentences), tone=tone)


def left_out(rungs: Sequence[Repeats], pictures: Sequence[str]) -> list[str]:
    """What a reader will miss and why, a sentence each; `pictures` says what of them is not there."""
    lines = []
    for rung in rungs:
        if rung.row.kind == "skipped":
            reason = rung.row.error or rung.row.status.partition(":")[2] or "not tried"
            lines.append(f"{visible(rung.row.rung, NAME_CHARS)} was skipped: {visible(reason, 300)}")
    for rung in rungs:
        without = [row for row in rung.rows if row.whole_peak_bytes is None and row.kind != "skipped"]
        if without and rung.peak_bytes is not None:
            which = f"{len(without)} of {len(rung.rows)} repeats of {visible(rung.row.rung, NAME_CHARS)}"
            lines.append(f"{which} came to no end and are in no median")
    timed = [len(rung.row.step_ns) for rung in rungs if rung.row.step_ns]
    if timed and max(timed) < LEAST_FOR_PERCENTILES:
        lines.append(
            f"percentiles of step times: {max(timed)} were timed, and fewer than {LEAST_FOR_PERCENTILES} have none"
        )
    if not any(rung.row.telemetry for rung in rungs):
        lines.append("clocks, power and temperature: no row carries any, as without an NVIDIA GPU")
    if not any(rung.row.mfu_frac for rung in rungs):
        lines.append("MFU and HFU: the device's peak FLOPs or the step's are not known")
    return [*lines, *(_sentence(line).removesuffix(".") for line in pictures)]


def commands(rows: Sequence[RungResult]) -> list[str]:
    """What to type to measure `rows` again: one command for all rungs whose options are the same."""
    found: dict[str, list[str]] = {}
    for row in rows:
        words = row.command.split(" ", 3)
        if words[:2] == ["memplan", "ladder"] and len(words) > 2:
            rungs = found.setdefault(words[3] if len(words) > 3 else "", [])
            if words[2] not in rungs:
                rungs.append(words[2])
        elif row.command:
            found.setdefault(row.command, [])
    return [
        visible(" ".join(["memplan ladder", ",".join(rungs), rest]).rstrip() if rungs else rest, 4000)
        for rest, rungs in found.items()
    ]


def _rungs(count: int) -> str:
    return f"{count} rung" + "s" * (count != 1)


def _hold(count: int) -> str:
    return "holds" if count == 1 else "hold"


def _statuses(rungs: Sequence[Repeats]) -> str:
    counts = Counter(row.kind for rung in rungs for row in rung.rows)
    return ", ".join(f"{visible(kind, 40)} {count}" for kind, count in counts.most_common())


def _sources(rungs: Sequence[Repeats]) -> str:
    return " and ".join(sorted({rung.row.source for rung in rungs}))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
