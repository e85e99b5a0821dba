"""The climb: one fresh process a rung, each row on disk the moment it ends."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memplan.backends.environment import available_ram_bytes, fingerprint
from memplan.errors import MemplanError
from memplan.ladder.folder import ROWS_FILE
from memplan.ladder.gate import judge
from memplan.ladder.points import Point
from memplan.ladder.windows import device_facts, fold
from memplan.launch.process import Outcome, run_worker
from memplan.record import FINAL, RungResult, append_row, read_rows
from memplan.spec import Ladder
from memplan.units import format_bytes

Run = Callable[..., Outcome]
Say = Callable[[str, Literal["phase", "step", "end"]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What goes on, for whoever watches."""

    number: int
    """Which rung of the climb, from 1."""
    total: int
    """How many there are."""
    rung: str
    """Its name."""
    text: str
    """What it does, or how it ended."""
    kind: Literal["phase", "step", "end"]
    """A phase begins, a timed step is done, or the rung has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """What a ladder left behind."""

    rows: tuple[RungResult, ...]
    """A row for each rung that was tried or kept, in the ladder's order."""
    folder: Path
    """Where they are."""
    interrupted: bool
    """Whether it was ended by hand before the last rung."""

    @property
    def exit_code(self) -> int:
        """0 when a rung passes (without a gate: when one is ok), 1 when none does, 3 when nothing was measured, 130
        when interrupted."""
        if self.interrupted:
            return 130
        if any(row.verdict == "pass" or (row.gate_bytes is None and row.status == "ok") for row in self.rows):
            return 0
        return 1 if any(row.status in FINAL for row in self.rows) else 3


def climb(
    ladder: Ladder,
    points: Sequence[Point],
    folder: Path,
    *,
    resume: bool,
    estimated: Callable[[Point], int | None],
    say: Callable[[Note], None],
    run: Run = run_worker,
    available_bytes: Callable[[], int | None] = available_ram_bytes,
) -> Climb:
    """Rows of `points`, measured in order, added to the file in `folder` one by one.

    `estimated` gives the formulas' bytes, which only guard and compare, or None where there are none; `say` is told
    what goes on; `run` and `available_bytes` are the process and the host. With `resume`, rows whose status is final
    are kept and held against this ladder's gate, and the other rungs are climbed again. Ctrl-C ends the climb, not what
    was measured.
    """
    rows_file = folder / ROWS_FILE
    kept = {row.run_id: row for row in read_rows(rows_file)} if resume and rows_file.exists() else {}
    estimates = [estimated(point) for point in points]
    here = fingerprint()
    rows: list[RungResult] = []
    for number, (point, estimated_bytes) in enumerate(zip(points, estimates, strict=True), 1):
        say_here = _speaker(say, number, len(points), str(point.rung))
        before = kept.get(point.run.run_id)
        try:
            if before is not None and before.status in FINAL:
                row = judge(before, gate_bytes=ladder.gate_bytes, gate_on=ladder.gate_on)
                say_here(f"kept from before: {row.status}", "end")
                if row == before:
                    rows.append(row)
                    continue
            else:
                measured = _measure(ladder, point, folder, estimated_bytes, here, say_here, run, available_bytes)
                row = judge(measured, gate_bytes=ladder.gate_bytes, gate_on=ladder.gate_on)
                say_here(_summary(row), "end")
        except KeyboardInterrupt:
            say_here("interrupted", "end")
            return Climb(rows=tuple(rows), folder=folder, interrupted=True)
        append_row(rows_file, row)
        rows.append(row)
    return Climb(rows=tuple(rows), folder=folder, interrupted=False)


def check(ladder: Ladder, points: Sequence[Point]) -> None:
    """MemplanError when the ladder as a whole cannot be climbed, before its first rung is."""
    seen: dict[str, Point] = {}
    for point in points:
        if point.run.run_id in seen:
            first, run = seen[point.run.run_id].rung, point.run
            which = f"of {run.model.name} with loss {run.step.loss} and {run.step.precision}"
            raise MemplanError(f"The rungs {first} and {point.rung} {which} are the same run.", "Leave one out.")
        seen[point.run.run_id] = point
    if ladder.gate_on == "reserved" and any(point.run.device.rules == "cpu" for point in points):
        raise MemplanError("The CPU's allocator keeps nothing in reserve.", "Type --gate-on allocated.")


def _speaker(say: Callable[[Note], None], number: int, total: int, rung: str) -> Say:
    def speak(text: str, kind: Literal["phase", "step", "end"]) -> None:
        say(Note(number=number, total=total, rung=rung, text=text, kind=kind))

    return speak


def _measure(
    ladder: Ladder,
    point: Point,
    folder: Path,
    estimated_bytes: int | None,
    here: dict[str, Any],
    say: Say,
    run: Run,
    available_bytes: Callable[[], int | None],
) -> RungResult:
    common: dict[str, Any] = {
        "rung": str(point.rung),
        "run_id": point.run.run_id,
        "source": "simulated" if point.simulated else "measured",
        "model": point.run.model.name,
        "step": asdict(point.run.step),
        "estimated_bytes": estimated_bytes,
        "command": point.command,
    }
    room_bytes = available_bytes() if point.run.device.rules == "cpu" else None
    if room_bytes is not None and estimated_bytes is not None and estimated_bytes > room_bytes:
        error = f"not started: {format_bytes(estimated_bytes)} estimated, {format_bytes(room_bytes)} available here"
        return RungResult(**common, status="oom", error=error, environment=here)
    job = {"run": point.run.to_dict(), "simulated": point.simulated, "warmup": ladder.warmup, "steps": ladder.steps}
    log = folder / f"{point.rung}.{point.run.run_id}.log".replace(":", "-")

    num_timed = itertools.count(1)

    def hear(event: dict[str, Any]) -> None:
        match event.get("event"):
            case "phase":
                say(str(event["phase"]), "phase")
            case "step":
                say(f"timed {next(num_timed)}/{ladder.steps}", "step")

    outcome = run(job, timeout_s=ladder.timeout_s, log=log, on_event=hear)
    if outcome.status in ("ok", "oom"):
        log.unlink(missing_ok=True)
    told = fold(outcome.events)
    return RungResult(
        **common,
        traced_bytes=told["peak_allocated_bytes"] if point.simulated else None,
        status=outcome.status,
        error=outcome.error if outcome.status in ("ok", "oom") else f"{outcome.error} (log: {log.name})",
        environment=here | device_facts(outcome.events),
        **told,
    )


def _summary(row: RungResult) -> str:
    peak = f", peak {format_bytes(row.peak_allocated_bytes)}" if row.peak_allocated_bytes is not None else ""
    return f"{row.status}{peak}" + (f": {row.error}" if row.error else "")
