"""A climb with a stand-in for the process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memplan.ladder.attempt import Site
from memplan.ladder.plan import every_rung, ordered
from memplan.ladder.points import points
from memplan.ladder.runner import Climb, climb
from memplan.launch.process import Outcome
from memplan.record import Note
from memplan.spec import EntryRun, Ladder, RunSpec
from memplan.spec.device import CPU, DeviceSpec
from memplan.units import MIB

HERE = {"device": "cpu", "torch": "2.13.0"}
"""The machine of these climbs."""


def ladder_of(**data: Any) -> Ladder:
    """A small ladder with a gate of 100 MiB."""
    known = {"rungs": "B4c2,B2c1", "model": "tiny", "seq": 64, "device": "cpu", "gate": "100MiB"}
    asked = {name: value for name, value in (known | data).items() if value is not None}
    return Ladder.from_dict(asked, name="tiny_cpu", origin="options")


def went_well(peak_bytes: int) -> Outcome:
    """A rung that came to its end."""
    events = (
        {"event": "phase", "phase": "first_step"},
        {"event": "window", "name": "first_step", "peak": {"allocated_bytes": peak_bytes}, "phase_peaks": {}},
        {"event": "environment", "device": "cpu"},
        {"event": "step", "ns": 10**9},
        {"event": "end", "status": "ok", "error": None},
    )
    return Outcome(status="ok", error=None, events=events)


class Processes:
    """Stands for `run_worker`: gives each rung the outcome named for it and remembers who was started."""

    def __init__(self, **outcomes: Outcome | BaseException) -> None:
        self.outcomes = outcomes
        self.started: list[str] = []

    def __call__(self, job: dict[str, Any], *, timeout_s: float, log: Path, on_event: Callable[..., None]) -> Outcome:
        step = job["run"]["step"]
        name = f"B{step['batch']}c{step['chunks']}"
        self.started.append(name)
        log.write_text("what it said")
        outcome = self.outcomes.get(name, went_well(50 * MIB))
        if isinstance(outcome, BaseException):
            raise outcome
        for event in outcome.events:
            on_event(event)
        return outcome


def go(
    folder: Path,
    processes: Callable[..., Outcome],
    *,
    resume: bool = False,
    available: int | None = None,
    device: DeviceSpec = CPU,
    here: dict[str, Any] = HERE,
    say: Callable[[Note], None] = lambda note: None,
    options: dict[str, Any] | None = None,
    **data: Any,
) -> Climb:
    """Climbs the rungs of `ladder_of(**data)`, each estimated at 10 MiB a sample."""
    ladder = ladder_of(**data)
    attempts = ordered(points(ladder, device), lambda point: point.run.step_dict()["batch"] * 10 * MIB, ladder.repeat)
    site = Site(folder=folder, environment=here, run=processes, available_bytes=lambda: available)
    return climb(ladder, every_rung(attempts), site, total=len(attempts), resume=resume, say=say, **options or {})


def in_this_process(job: dict[str, Any], *, log: Path, **how: Any) -> Outcome:
    """What a worker would say of a simulated rung, without its start."""
    from memplan.launch.events import Events
    from memplan.launch.imagine import imagine

    path = log.with_suffix(".events")
    with path.open("w+", encoding="utf-8") as file:
        run = EntryRun.from_dict(job["entry"]) if "entry" in job else RunSpec.from_dict(job["run"])
        end = imagine(run, Events(file))
        file.seek(0)
        events = tuple(json.loads(line) for line in file)
    path.unlink()
    return Outcome(status=end["status"], error=end["error"], events=events, failure=end.get("failure"))
