"""The climb: one fresh process an attempt, each row on disk the moment it ends."""

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memplan.errors import MemplanError
from memplan.ladder.attempt import Say, Site, common, measure
from memplan.ladder.gate import judge
from memplan.ladder.guard import Guard
from memplan.ladder.plan import Attempt, Plan, dominating
from memplan.ladder.points import Point
from memplan.ladder.spill import spill_warning
from memplan.record import FINAL, Note, RungResult, append_row, read_rows
from memplan.record.fingerprint import MEMORY_KEYS
from memplan.record.store import ROWS_FILE
from memplan.spec import EntryRun, Ladder
from memplan.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """What a ladder left behind."""

    rows: tuple[RungResult, ...]
    """A row for each attempt that was made or kept, in the ladder's order."""
    folder: Path
    """Where they are."""
    interrupted: bool = False
    """Whether it was ended by hand before the last rung."""
    stopped: str = ""
    """Why it ended before the last rung, in words, where the device did it."""

    @property
    def exit_code(self) -> int:
        """0 when a rung passes (without a gate: when one is ok), 1 when none does, 3 when nothing was measured, 130
        when interrupted."""
        if self.interrupted:
            return 130
        if any(row.verdict == "pass" or (row.gate_bytes is None and row.status == "ok") for row in self.rows):
            return 0
        return 1 if any(row.kind in FINAL for row in self.rows) else 3


def climb(
    ladder: Ladder,
    plan: Plan,
    site: Site,
    *,
    total: int,
    resume: bool = False,
    retry: Collection[str] = (),
    guard: Guard | None = None,
    compared: Callable[[Attempt, Say], dict[str, Any]] = lambda attempt, say: {},
    say: Callable[[Note], None] = lambda note: None,
) -> Climb:
    """Rows of the attempts of `plan`, at most `total` of them, added to the file in the site's folder one by one.

    With `resume`, rows of this kind of device whose status is final and not in `retry` are kept and held against this
    ladder's gate, and the others are climbed again. What a smaller batch has shown to be too large is skipped.
    `compared` gives the comparison with the plain step, `guard` watches over the device between two rungs. Ctrl-C ends
    the climb, not what was measured.
    """
    rows_file = site.folder / ROWS_FILE
    before_now = read_rows(rows_file) if resume and rows_file.exists() else ()
    kept = {row.key: row for row in before_now if is_kept(row, retry) and same_place(row, site)}
    elsewhere = {row.key for row in before_now if is_kept(row, retry)} - kept.keys()
    done: list[tuple[Attempt, RungResult]] = []
    clock = _Clock(total)
    stopped, name, interrupted = "", "", False
    try:
        attempt = next(plan, None)
        while attempt is not None:
            name = name_of(attempt, ladder)
            before = kept.get(attempt.key)
            if before is not None:
                row = judge(before, gate_bytes=ladder.gate_bytes, gate_on=ladder.gate_on)
                said = f"kept from before: {row.status}"
            else:
                speak = _speaker(say, clock, name)
                if attempt.key in elsewhere:
                    speak("again, since its row is from another device or torch", "phase")
                row = _new_row(ladder, attempt, site, done, guard, compared, speak, stopped)
                said = summary(row)
            if row != before:
                append_row(rows_file, row)
            done.append((attempt, row))
            clock.ended(row, kept=before is not None)
            say(clock.note(name, said, "end", row))
            if guard is not None and before is None and not stopped:
                stopped = guard.after(row)
            attempt = _following(plan, row)
    except KeyboardInterrupt:
        say(clock.note(name, "interrupted", "end"))
        interrupted = True
    return Climb(rows=tuple(row for _, row in done), folder=site.folder, interrupted=interrupted, stopped=stopped)


def check(ladder: Ladder, points: Sequence[Point]) -> None:
    """MemplanError when the ladder as a whole cannot be climbed, before its first rung is."""
    seen: dict[str, Point] = {}
    for point in points:
        if point.run.run_id in seen:
            first, run = seen[point.run.run_id].rung, point.run
            which = (
                run.name
                if isinstance(run, EntryRun)
                else f"{run.name} with loss {run.step.loss} and {run.step.precision}"
            )
            raise MemplanError(f"The rungs {first} and {point.rung} of {which} are the same run.", "Leave one out.")
        seen[point.run.run_id] = point
    if ladder.gate_on != "allocated" and any(point.run.device.rules == "cpu" for point in points):
        raise MemplanError("The CPU's allocator keeps nothing in reserve.", "Type --gate-on allocated.")
    if ladder.gate_on == "used" and points[0].simulated:
        raise MemplanError("What the driver holds is not traced.", "Type --gate-on reserved.")


def summary(row: RungResult) -> str:
    """How a rung ended, in a line."""
    peak = f", peak {format_bytes(row.peak_allocated_bytes)}" if row.peak_allocated_bytes is not None else ""
    return f"{row.status}{peak}" + (f": {row.error}" if row.error else "")


def _new_row(
    ladder: Ladder,
    attempt: Attempt,
    site: Site,
    done: Sequence[tuple[Attempt, RungResult]],
    guard: Guard | None,
    compared: Callable[[Attempt, Say], dict[str, Any]],
    say: Say,
    stopped: str,
) -> RungResult:
    """The row of an attempt that nobody has made: skipped, refused because the climb has `stopped`, or measured."""
    reason: dict[str, Any] | None = None
    if (larger := dominating(attempt, done)) is not None:
        name = larger.rung + (f", repeat {larger.repeat}" if larger.run_id == attempt.point.run.run_id else "")
        why = (
            "ran out of memory"
            if larger.kind == "oom"
            else f"is over the gate with {format_bytes(larger.gated_bytes or 0)}"
        )
        reason = {"status": f"skipped:dominated_by {larger.rung}", "error": f"not started: {name} {why}"}
    elif dirt := stopped or (guard.before() if guard is not None else ""):
        reason = {"status": "dirty_device", "error": f"not started: {dirt}"}
    if reason is not None:
        row = RungResult(**common(attempt), **reason, environment=site.environment)
        return judge(row, gate_bytes=ladder.gate_bytes, gate_on=ladder.gate_on)
    parity = compared(attempt, say)
    if parity.get("same") is False:
        error = f"not measured: it is not the plain step at {parity['rung']}: {parity['says']}"
        row = RungResult(
            **common(attempt), status="numerics_fail", error=error, environment=site.environment, parity=parity
        )
    else:
        row = dataclasses.replace(measure(ladder, attempt, site, say), parity=parity)
        if spill := spill_warning(row, [before for _, before in done]):
            row = dataclasses.replace(row, warnings=(*row.warnings, spill))
    return judge(row, gate_bytes=ladder.gate_bytes, gate_on=ladder.gate_on)


def is_kept(row: RungResult, retry: Collection[str]) -> bool:
    """Whether a row says something about its rung, and was not asked for again."""
    return row.kind in FINAL and row.kind not in retry and row.status not in retry


def same_place(row: RungResult, site: Site) -> bool:
    """Whether a row comes from a device and a torch like those of `site`, as far as both are told."""
    return all(
        row.environment[key] == site.environment[key]
        for key in MEMORY_KEYS
        if key in row.environment and key in site.environment
    )


def _following(plan: Plan, row: RungResult) -> Attempt | None:
    try:
        return plan.send(row)
    except StopIteration:
        return None


def name_of(attempt: Attempt, ladder: Ladder) -> str:
    """Its rung, with the repeat where there are several."""
    return str(attempt.point.rung) + (f" #{attempt.repeat}" if ladder.repeat > 1 else "")


class _Clock:
    """Counts attempts, and guesses from those that ended how long the others take."""

    def __init__(self, total: int) -> None:
        self.number, self.total = 1, total
        self._taken_s: list[float] = []
        self._began = time.monotonic()

    def ended(self, row: RungResult, *, kept: bool) -> None:
        """An attempt has ended."""
        if not kept and row.kind != "skipped":
            self._taken_s.append((row.elapsed_ns or 0) / 10**9)

    def note(self, rung: str, text: str, kind: Literal["phase", "step", "end"], row: RungResult | None = None) -> Note:
        """A note about the attempt that is under way."""
        left = self.total - self.number + (kind != "end")
        mean_s = sum(self._taken_s) / len(self._taken_s) if self._taken_s else None
        left_s = None if mean_s is None else mean_s * left
        note = Note(number=self.number, total=self.total, rung=rung, text=text, kind=kind, left_s=left_s, row=row)
        self.number += kind == "end"
        return note


def _speaker(say: Callable[[Note], None], clock: _Clock, rung: str) -> Say:
    def speak(text: str, kind: Literal["phase", "step", "end"]) -> None:
        say(clock.note(rung, text, kind))

    return speak
