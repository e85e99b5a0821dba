"""The verb `ladder`: its options, what is printed while it climbs, and what at the end."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

from memplan.cli_io import Gate, Output, ladder_of, say, show, show_json, typed
from memplan.cli_options import STEP, Argument, Verb, option
from memplan.errors import MemplanError
from memplan.spec import Ladder


def ladder(
    rungs: Annotated[str | None, Argument(help="Rungs like B12c6,B8c4@full, or a file.toml.", metavar="RUNGS")] = None,
    device: Annotated[str | None, option("--device", help="auto, cuda, cpu, simulated.")] = None,
    gpu: Annotated[str | None, option("--gpu", help="Card of a simulated climb, h100-80g when none is named.")] = None,
    entry: Annotated[
        str | None,
        option("--entry", help="A step of yours, pkg.mod:make_step; it gets batch, chunks and ckpt."),
    ] = None,
    gate: Gate = None,
    gate_on: Annotated[str | None, option("--gate-on", help="allocated, reserved, used.")] = None,
    search: Annotated[
        bool, option("--search", help="Look for the largest batch that passes, of each mode, in 3 rungs at most.")
    ] = False,
    warmup: Annotated[int | None, option("--warmup", help="Least steps before the measured ones.")] = None,
    steps: Annotated[int | None, option("--steps", help="Least timed steps.")] = None,
    min_time: Annotated[float | None, option("--min-time", help="Least seconds of timed steps.")] = None,
    repeat: Annotated[int | None, option("--repeat", help="Processes for each rung, interleaved.")] = None,
    timeout: Annotated[int | None, option("--timeout", help="Seconds a rung may take.")] = None,
    parity: Annotated[
        bool | None, option("--parity/--no-parity", help="Hold what is checkpointed against the plain step.")
    ] = None,
    trace: Annotated[bool | None, option("--trace", help="Trace each rung too: all three numbers in one row.")] = None,
    allow_shared: Annotated[
        bool | None, option("--allow-shared", help="Climb on a device that others use.", shows_default=False)
    ] = None,
    snapshot_on_oom: Annotated[
        bool | None,
        option("--snapshot-on-oom", help="Run a rung that ran out again, with the allocator's history."),
    ] = None,
    out: Annotated[Path | None, option("--out", help="Folder for the results.")] = None,
    resume: Annotated[bool, option("--resume", help="Go on with an earlier climb.")] = False,
    retry: Annotated[
        str | None, option("--retry", help="With --resume: final statuses to climb again, oom,over_gate.")
    ] = None,
    dry_run: Annotated[bool, option("--dry-run", help="Print the plan and start nothing.")] = False,
    output: Output = "table",
    **step: Any,
) -> None:
    """Train real steps, one fresh process a rung, and hold each peak against a gate."""
    from memplan.report.render import check_form, render, wants_rich

    check_form(output)
    given = typed(**step, device=device, gpu=gpu, entry=entry, gate=gate, gate_on=gate_on, warmup=warmup, steps=steps,
                  min_time=min_time, repeat=repeat, timeout=timeout, parity=parity, trace=trace,
                  allow_shared=allow_shared, snapshot_on_oom=snapshot_on_oom)  # fmt: skip
    if rungs is None and not search:
        raise MemplanError(
            "No rung was given.", "Type rungs like B12c6,B8c4, or --search to look for the largest batch."
        )
    if search and repeat not in (None, 1):
        raise MemplanError("A search climbs each rung once.", "Climb what it finds again with --repeat.")
    if out is not None and not out.name:
        raise MemplanError("--out names no folder.", "Type --out reports/NAME.")
    question = ladder_of("B1c1" if rungs is None else rungs, given)
    if dry_run:
        from memplan.api_ladder import planned
        from memplan.report.plan_table import plan_table

        if search:
            raise MemplanError("A search decides as it goes.", "Leave --dry-run out, or type the rungs.")
        if resume or retry:
            raise MemplanError("A dry run knows no kept rows.", "Leave --resume and --retry out.")
        show(render(plan_table(planned(question), gate_bytes=question.gate_bytes), output, rich=wants_rich()))
        return
    _climb(
        question,
        output,
        out=out,
        resume=resume,
        retry=tuple((retry or "").replace(" ", "").split(",")) if retry else (),
        search=search,
    )


def _climb(question: Ladder, output: str, *, search: bool, **how: Any) -> None:
    """Climbs, shows rows and writes the page; ends with the climb's exit code."""
    from memplan.analysis import brackets, recommend
    from memplan.api_ladder import climb
    from memplan.report.ladder_table import ladder_table, provenance
    from memplan.report.page import write_page
    from memplan.report.progress import Progress
    from memplan.report.render import render, wants_rich

    progress = Progress()
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        climbed = climb(question, search=search, tell=say, expect=progress.expect, say=progress.say, **how)
    finally:
        progress.done()
        signal.signal(signal.SIGTERM, before)
    rows = climbed.rows
    if output in ("json", "jsonl"):
        show_json([row.to_dict() for row in rows], lines=output == "jsonl")
    elif rows:
        show(render(ladder_table(rows, footer=provenance(rows)), output, rich=wants_rich()))
    try:
        if rows:
            write_page(rows, climbed.folder)
    except OSError as error:  # a full disk; the rows are there
        say([f"the page could not be written: {error.strerror}; memplan report {climbed.folder} makes it of the rows"])
    say(brackets(rows) if search else ())
    say([f"stopped: {climbed.stopped}"] if climbed.stopped else ())
    if climbed.interrupted:
        say(
            [f"interrupted: --resume --out {climbed.folder} goes on"] if rows else ["interrupted before any rung ended"]
        )
    elif (advice := recommend(rows)) is not None:
        say([advice.sentence])
    say([f"results: {climbed.folder}"])
    sys.exit(climbed.exit_code)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


VERBS = {"ladder": Verb(ladder, (STEP,))}
"""The verb by what is typed for it."""
