"""A climb from question to rows: the glue between plan, processes, formulas and folder."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError
from memplan.ladder import runner
from memplan.ladder.attempt import Site, job_of, traced_bytes
from memplan.ladder.folder import claimed, open_folder
from memplan.ladder.guard import Guard
from memplan.ladder.parity import Comparisons, compared_run, is_compared
from memplan.ladder.plan import MOST_RUNGS, Attempt, Plan, every_rung, largest_batch, ordered, rehearsed
from memplan.ladder.points import Point, assumed, find_device, points, with_batch
from memplan.ladder.runner import Climb, check
from memplan.launch.process import Outcome, run_worker
from memplan.models.entry_source import check_entry
from memplan.record import FINAL, STATUSES, Note, Planned
from memplan.record.store import ROWS_FILE
from memplan.spec import EntryRun, Ladder, RunSpec

REPORTS = Path("reports")
"""Where climbs without `--out` go, below the current folder."""


class Formulas:
    """Estimated peaks, each run's once; None for what no formula knows."""

    def __init__(self) -> None:
        self._known: dict[str, int | None] = {}
        self.unknown: set[str] = set()

    def __call__(self, run: RunSpec | EntryRun) -> int | None:
        from memplan.estimate import estimate, uncovered

        if run.run_id not in self._known:
            why = "a step of your own" if isinstance(run, EntryRun) else uncovered(run)
            if why:
                self.unknown.add(why)
            self._known[run.run_id] = None if why or isinstance(run, EntryRun) else estimate(run).peak_allocated_bytes
        return self._known[run.run_id]

    def largest(self, point: Point, limit_bytes: int) -> int:
        """The largest batch of `point` that stays at or under `limit_bytes`; MemplanError where no formula knows it."""
        from memplan.estimate.search import max_batch

        if isinstance(point.run, EntryRun) or self(point.run) is None:
            raise MemplanError(
                "A search starts from the estimate, and no formula knows this step.", "Type the rungs: B8,B4,B2."
            )
        return max_batch(point.run, limit_bytes)


def planned(question: Ladder) -> list[Planned]:
    """The attempts of a ladder in the order of the climb, each with what would become of it by the estimate alone."""
    from memplan.backends.environment import available_ram_bytes

    found = asked(question)
    formulas = Formulas()
    room_bytes = available_ram_bytes() if found[0].run.device.rules == "cpu" else None
    plan = rehearsed(ordered(found, lambda point: formulas(point.run), question.repeat), question)
    return [
        dataclasses.replace(one, fate="skipped: this machine has no room for it")
        if room_bytes is not None and (one.estimated_bytes or 0) > room_bytes
        else one
        for one in plan
    ]


def climb(
    question: Ladder,
    *,
    out: Path | None = None,
    resume: bool = False,
    retry: Sequence[str] = (),
    search: bool = False,
    tell: Callable[[Iterable[str]], None] = lambda lines: None,
    say: Callable[[Note], None] = lambda note: None,
    expect: Callable[[Sequence[tuple[str, int | None]]], None] = lambda rungs: None,
    run: Callable[..., Outcome] = run_worker,
) -> Climb:
    """Climbs `question`; `tell` hears what was assumed, `expect` what is planned, `say` what goes on.

    Rows come back in the ladder's order, those of a search as they were climbed. MemplanError for a question that
    cannot be asked.
    """
    check_retry(retry, resume=resume)
    if search and question.gate_bytes is None:
        raise MemplanError("A search needs a gate to hold batches against.", "Type --gate 71GiB.")
    found = asked(question, search=search)
    formulas = Formulas()
    attempts = ordered(found, lambda point: formulas(point.run), question.repeat)
    if search and question.gate_bytes is not None:
        for point in found:
            formulas.largest(point, question.gate_bytes)  # says before anything starts where no formula is
    folder = open_folder(out, question.name, resume=resume, reports=REPORTS)
    if resume and not (folder / ROWS_FILE).exists():
        tell([f"nothing to resume in {folder}: a new climb"])
    unknown = [f"not estimated, since no formula knows it: {what}" for what in sorted(formulas.unknown)]
    tell([*assumed(question, found), *unknown])
    expect(() if search else [(runner.name_of(one, question), one.estimated_bytes) for one in attempts])
    site = site_of(folder, found[0], run)
    with claimed(folder):
        climbed = runner.climb(
            question,
            searching(question, found, formulas, site, tell) if search else every_rung(attempts),
            site,
            total=MOST_RUNGS * len(found) if search else len(attempts),
            resume=resume,
            retry=retry,
            guard=guard_of(question, found[0], site),
            compared=comparing(question, found, site, formulas),
            say=say,
        )
    if search:
        return climbed
    places = {point.run.run_id: place for place, point in enumerate(found)}
    rows = sorted(climbed.rows, key=lambda row: (places[row.run_id], row.repeat))
    return dataclasses.replace(climbed, rows=tuple(rows))


def asked(question: Ladder, *, search: bool = False) -> tuple[Point, ...]:
    """The points of a ladder, of a search one for each mode; MemplanError where it cannot be climbed as a whole."""
    device, simulated = find_device(question.device, question.gpu)
    found = points(question, device, simulated=simulated)
    if search:
        found = tuple({point.same_but_batch: point for point in found}.values())
    check(question, found)
    if isinstance(found[0].run, EntryRun):
        check_entry(found[0].run.entry, tuple(found[0].run.arguments()))
        if any(point.rung.loss_chunks for point in found):
            raise MemplanError("A step of your own makes its loss itself.", "Leave the l out of the rung.")
    return found


def check_retry(retry: Sequence[str], *, resume: bool) -> None:
    """MemplanError for statuses that are none, or that nothing is kept of without `resume`."""
    for status in retry:
        if status.partition(":")[0] not in STATUSES:
            raise MemplanError(f"Unknown status {status!r}.", f"Final ones are {', '.join(FINAL)}.")
    if retry and not resume:
        raise MemplanError("--retry says which kept rows to climb again, and nothing is kept.", "Type --resume too.")


def searching(
    question: Ladder, found: Sequence[Point], formulas: Formulas, site: Site, tell: Callable[[Iterable[str]], None]
) -> Plan:
    """A search for the largest batch of each point, one after another."""
    gate_bytes = question.gate_bytes
    assert gate_bytes is not None

    def traced(point: Point) -> int | None:
        tell([f"tracing {point.rung} to choose the first rung"])
        return traced_bytes(question, point.run, site)

    for point in found:
        yield from largest_batch(
            gate_bytes,
            first=point,
            predicted=formulas.largest(point, gate_bytes),
            estimated=lambda one: formulas(one.run),
            traced=traced,
            at=lambda batch, first=point: with_batch(question, first, batch),  # type: ignore[misc]
        )


def site_of(folder: Path, point: Point, run: Callable[..., Outcome]) -> Site:
    """Where the climb takes place."""
    from memplan.analysis.utilisation import peak_flops
    from memplan.backends.environment import fingerprint

    def device_peak(environment: dict[str, Any], precision: str) -> float | None:
        return peak_flops(str(environment.get("gpu", "")), precision) if environment.get("device") == "cuda" else None

    site = Site(folder=folder, environment=fingerprint(), run=run, peak_flops=device_peak)
    if not on_card(point):
        return site
    from memplan.launch.watch import open_watch

    watch = open_watch()
    return dataclasses.replace(site, watch=lambda: watch)


def on_card(point: Point) -> bool:
    """Whether the rung runs on a GPU that is there."""
    return point.run.device.rules == "cuda" and not point.simulated


def comparing(
    question: Ladder, found: Sequence[Point], site: Site, formulas: Formulas
) -> Callable[[Attempt, Any], dict[str, Any]]:
    """Asks for the comparison of an attempt's mode with the plain step, at the largest of its batches that has room."""
    limit_bytes = found[0].run.device.usable_bytes if on_card(found[0]) else site.available_bytes()

    def ask(run: RunSpec, rung: str) -> Outcome:
        log = site.folder / f"parity.{run.run_id}.log"
        outcome = site.run(job_of(question, run, kind="parity"), timeout_s=question.timeout_s, log=log)
        if outcome.status == "ok":
            log.unlink(missing_ok=True)
        return outcome

    comparisons = Comparisons(site.folder, ask)
    answers: dict[tuple[Any, ...], dict[str, Any]] = {}

    def compared(attempt: Attempt, say: Any) -> dict[str, Any]:
        if not question.parity or (attempt.point.rung.ckpt or "none") == "none" or attempt.point.simulated:
            return {}
        if isinstance(attempt.point.run, EntryRun):
            return {"same": None, "rung": "", "says": "not compared: a step of your own has no plain twin here"}
        mode = mode_of(attempt.point)
        if mode not in answers:
            alike = [point for point in (*found, attempt.point) if mode_of(point) == mode]
            answers[mode] = answer(max(alike, key=lambda point: point.rung.batch), say)
        return answers[mode]

    def answer(largest: Point, say: Any) -> dict[str, Any]:
        if not is_compared(largest):
            return {}
        run = compared_run(largest, limit_bytes, formulas)
        if run is None:
            return {"same": None, "rung": "", "says": "not compared: no batch leaves room for both steps"}
        say("parity", "phase")
        return comparisons.of(run, f"B{run.step.batch}c{run.step.chunks}@{run.step.ckpt}")

    return compared


def mode_of(point: Point) -> tuple[Any, ...]:
    """What rungs share that differ in batch and chunks alone: one comparison speaks for all of them."""
    step = point.run.step_dict() | {"batch": None, "chunks": None}
    return point.model, tuple(sorted((name, str(value)) for name, value in step.items()))


def guard_of(question: Ladder, point: Point, site: Site) -> Guard | None:
    """The guard over a GPU that is there; None elsewhere, and where NVML does not answer."""
    from memplan.backends.nvml import open_device
    from memplan.launch import settle

    device = open_device() if on_card(point) else None
    if device is None:
        return None
    health = job_of(question, point.run)
    return Guard(
        used_bytes=lambda: settle.unclaimed_bytes(device),
        foreign=lambda: [str(process) for process in settle.foreign(device)],
        settled=lambda before_bytes: settle.settled(device, before_bytes),
        sick=lambda: settle.health_check(health, site.run),
        allow_shared=question.allow_shared,
    )
