"""`estimate --sweep`, as the command line runs it."""

import sys
from typing import Any

from memplan.api_sweep import SIZES, sweep
from memplan.cli_io import one_rung, rung_and_given, say, show
from memplan.cli_once import by_options, by_rung, by_size, by_sweep, refuse_two
from memplan.cli_options import RUNG
from memplan.report.estimate_page import assumptions, witnesses
from memplan.report.render import render
from memplan.report.sweep_table import left_out_lines, sweep_table
from memplan.spec import DeviceSpec
from memplan.spec.axes import parse_axes


def show_sweep(texts: list[str], step: dict[str, Any], others: dict[str, Any], on: DeviceSpec, output: str) -> None:
    """Estimates for every combination of what is swept; ends with 1 where none is within a gate that was asked for.
    `others`: card and gate, where they were typed."""
    axes = parse_axes(texts)
    swept = by_sweep(axes, texts)
    refuse_two(swept, by_size(**{name: step[name] for name in RUNG}))
    rung, given = rung_and_given(step, gate=others.get("gate"))
    question = one_rung(rung, given, name="estimate")
    refuse_two(swept, by_rung(question.rungs[0], axes.get("loss", ())))
    refuse_two(swept, by_options(question, given | others))
    found = sweep(question, on, axes)
    run, (own, *_) = found.run, question.rungs
    told = {"seq", "images", "precision", "attention"} if "model" in axes else set()  # each model has its own
    said = assumptions(run, given.keys() | others.keys() | axes.keys() | told)
    say([*witnesses(run), *said, *left_out_lines(found.left_out)])
    named = given.keys() | {
        name for name, value in (("ckpt", own.ckpt), ("loss", own.loss_chunks)) if value is not None
    }
    fixed = {
        name: getattr(run.step, name, given.get(name)) for name in sorted(named - {"model", "gate", *axes, *SIZES})
    }
    show(render(sweep_table(found.rows, fixed, traced=found.traced), output))
    if question.gate_bytes is not None and not any(row["fits"] for row in found.rows):
        sys.exit(1)
