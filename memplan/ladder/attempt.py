"""One attempt: a rung's process and the row that comes of it."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from memplan.backends.environment import available_ram_bytes
from memplan.ladder.plan import Attempt
from memplan.ladder.telemetry import watched_over
from memplan.ladder.windows import device_facts, fold
from memplan.launch.process import Outcome, run_worker
from memplan.record import Failure, RungResult
from memplan.spec import EntryRun, Ladder, RunSpec
from memplan.units import format_bytes

Run = Callable[..., Outcome]
Say = Callable[[str, Literal["phase", "step", "end"]], None]
QUIET = ("ok", "over_gate", "oom", "thrash", "numerics_fail")
"""Statuses after which a log has nothing more to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a climb takes place; each part can be stood in for."""

    folder: Path
    """Where rows and logs go."""
    environment: dict[str, Any]
    """Machine, versions, settings."""
    run: Run = run_worker
    """Starts a worker and says how it ended."""
    available_bytes: Callable[[], int | None] = available_ram_bytes
    """What the host has left."""
    watch: Callable[[], Any] = field(default=lambda: None)
    """A watch over the device for one worker, or None where there is nothing to watch."""
    peak_flops: Callable[[dict[str, Any], str], float | None] = field(default=lambda environment, precision: None)
    """FLOPs a second that the device of an environment does at most in a precision."""


def common(attempt: Attempt) -> dict[str, Any]:
    """The fields of an attempt's row that are known before it starts."""
    point = attempt.point
    return {
        "rung": str(point.rung),
        "run_id": point.run.run_id,
        "repeat": attempt.repeat,
        "source": "simulated" if point.simulated else "measured",
        "model": point.run.name,
        "step": point.run.step_dict(),
        "estimated_bytes": attempt.estimated_bytes,
        "command": point.command,
    }


def job_of(ladder: Ladder, run: RunSpec | EntryRun, **more: Any) -> dict[str, Any]:
    """What a worker is to do."""
    which = "entry" if isinstance(run, EntryRun) else "run"
    steps = {"warmup": ladder.warmup, "steps": ladder.steps, "min_time_s": ladder.min_time_s, "seed": 0}
    return {"kind": "measure", which: run.to_dict()} | steps | more


def cap_of(ladder: Ladder, attempt: Attempt) -> int | None:
    """What the allocator is capped at, so that what cannot pass fails at once: the gate, on a card that is there."""
    cuda = attempt.point.run.device.rules == "cuda" and not attempt.point.simulated
    return ladder.gate_bytes if cuda else None


def measure(ladder: Ladder, attempt: Attempt, site: Site, say: Say) -> RungResult:
    """The row of `attempt`.

    A rung that ran out of memory or thrashed at the cap although fewer bytes than the gate were allocated runs once
    more without the cap: on the whole card fragments may find room.
    """
    began = time.monotonic_ns()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    cap_bytes = cap_of(ladder, attempt)
    row = _run(ladder, attempt, site, say, cap_bytes=cap_bytes)
    if cap_bytes is not None and _only_by_the_cap(row, cap_bytes):
        say("again without the cap", "phase")
        row = _run(ladder, attempt, site, say, cap_bytes=None)
        note = f"at a cap of {format_bytes(cap_bytes)} fragments left it no room; measured without the cap"
        row = dataclasses.replace(row, warnings=(*row.warnings, note))
    if ladder.snapshot_on_oom and row.status == "oom" and row.failure is not None:
        say("again with the allocator's history", "phase")
        snapshot = f"{file_stem(attempt)}.snapshot.pickle"
        _run(ladder, attempt, site, say, cap_bytes=cap_bytes, snapshot=str((site.folder / snapshot).resolve()))
        if (site.folder / snapshot).exists():
            row = dataclasses.replace(row, failure=dataclasses.replace(row.failure, snapshot=snapshot))
    if ladder.trace and row.source == "measured" and attempt.repeat == 1:
        say("trace", "phase")
        allocated = dataclasses.replace(ladder, gate_on="allocated")
        row = dataclasses.replace(row, traced_bytes=traced_bytes(allocated, attempt.point.run, site))
    return dataclasses.replace(row, started_at=started_at, elapsed_ns=time.monotonic_ns() - began)


def traced_bytes(ladder: Ladder, run: RunSpec | EntryRun, site: Site) -> int | None:
    """What the trace says that the gate would read of `run`, in a process of its own; None where nothing is traced."""
    log = site.folder / f"trace.{run.run_id}.log"
    outcome = site.run(job_of(ladder, run, simulated=True), timeout_s=ladder.timeout_s, log=log)
    log.unlink(missing_ok=True)
    told = fold(outcome.events)
    if told["peak_allocated_bytes"] is None or outcome.status not in ("ok", "oom"):
        return None
    peaks: dict[str, int | None] = {"reserved": told["peak_reserved_bytes"]}
    peaks["used"] = None if peaks["reserved"] is None else peaks["reserved"] + run.device.context_bytes
    return peaks.get(ladder.gate_on, told["peak_allocated_bytes"])


def file_stem(attempt: Attempt) -> str:
    """The beginning of the names of an attempt's own files."""
    turn = f".{attempt.repeat}" if attempt.repeat > 1 else ""
    return f"{attempt.point.rung}.{attempt.point.run.run_id}{turn}".replace(":", "-").replace("/", "-")


def no_room(attempt: Attempt, site: Site) -> str:
    """Why a rung on the host's own memory is not started, in words, or empty: the estimate guards the machine."""
    room_bytes = site.available_bytes() if attempt.point.run.device.rules == "cpu" else None
    if room_bytes is None or attempt.estimated_bytes is None or attempt.estimated_bytes <= room_bytes:
        return ""
    return f"not started: {format_bytes(attempt.estimated_bytes)} estimated, {format_bytes(room_bytes)} available here"


def _only_by_the_cap(row: RungResult, cap_bytes: int) -> bool:
    if row.status == "thrash":
        return (row.peak_allocated_bytes or 0) <= cap_bytes
    failure = row.failure
    if row.status != "oom" or failure is None or failure.allocated_bytes is None or failure.requested_bytes is None:
        return False
    return failure.allocated_bytes + failure.requested_bytes <= cap_bytes


def _run(
    ladder: Ladder, attempt: Attempt, site: Site, say: Say, *, cap_bytes: int | None, snapshot: str | None = None
) -> RungResult:
    point = attempt.point
    if error := no_room(attempt, site):
        return RungResult(**common(attempt), status="skipped:no_room", error=error, environment=site.environment)
    job = job_of(ladder, point.run, simulated=point.simulated, cap_bytes=cap_bytes, snapshot=snapshot)
    log = site.folder / f"{file_stem(attempt)}.log"
    num_timed = itertools.count(1)

    def hear(event: dict[str, Any]) -> None:
        match event.get("event"):
            case "phase":
                say(str(event["phase"]), "phase")
            case "step":
                say(f"timed {next(num_timed)}/{ladder.steps}", "step")

    watch = site.watch()
    watched = {} if watch is None else {"watch": watch}
    outcome = site.run(job, timeout_s=ladder.timeout_s, log=log, on_event=hear, **watched)
    kind = outcome.status.partition(":")[0]
    if kind in QUIET:
        log.unlink(missing_ok=True)
    told = watched_over(fold(outcome.events), outcome.telemetry)
    environment = site.environment | device_facts(outcome.events)
    return RungResult(
        **common(attempt),
        traced_bytes=told["peak_allocated_bytes"] if point.simulated else None,
        status=outcome.status,
        error=outcome.error if kind in QUIET else f"{outcome.error} (log: {log.name})",
        failure=None if outcome.failure is None else Failure.from_dict(outcome.failure),
        environment=environment,
        peak_flops=site.peak_flops(environment, str(point.run.step_dict().get("precision"))),
        **told,
    )
