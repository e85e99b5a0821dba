"""Verbs that answer by themselves: formulas, traces, proofs, and what is known here. No arithmetic, no formatting."""

import sys
from pathlib import Path
from typing import Annotated, Any

from memplan import api
from memplan.cli_io import Gate, Output, one_rung, rung_and_given, say, show, show_json, typed
from memplan.cli_once import check_rungs
from memplan.cli_options import RUNG, STEP, Argument, Verb, option
from memplan.errors import MemplanError, NothingMeasuredError
from memplan.record import Fit
from memplan.spec import Ladder
from memplan.units import parse_bytes, parse_percent


def estimate(
    gpu: Annotated[str | None, option("--gpu", help="Card, h100-80g when none is named.")] = None,
    device: Annotated[str | None, option("--device", help="cpu, to estimate for the host.")] = None,
    gate: Gate = None,
    method: Annotated[str, option("--method", help="formulas, or trace.")] = "formulas",
    sweep: Annotated[
        list[str] | None, option("--sweep", help="Many at once: batch=1:64 or ckpt=none,full; several cross.")
    ] = None,
    explain: Annotated[bool, option("--explain", help="Print the formula of each line of the peak.")] = False,
    output: Output = "table",
    **step: Any,
) -> None:
    """Say by formulas what a step needs: static memory, what a sample adds, the peak of each phase, what fits."""
    if method not in ("formulas", "trace"):
        raise MemplanError(f"Unknown method {method!r}.", "Type --method formulas or --method trace.")
    if sweep and (explain or method == "trace"):
        other = "--explain" if explain else "--method trace"
        raise MemplanError(f"{other} answers for one configuration, --sweep for many.", "Leave one out.")
    if method == "trace":
        if explain:
            raise MemplanError("--explain prints formulas, and --method trace has none.", "Leave one out.")
        trace(**step, gpu=gpu, device=device, gate=gate, plot=None, entry=None, output=output)
        return
    from memplan.report.estimate_page import assumptions, estimate_json, estimate_page, named_phases, witnesses
    from memplan.report.render import check_form, render

    check_form(output)
    if sweep:
        from memplan.cli_sweep import show_sweep

        show_sweep(sweep, step, typed(gpu=gpu, gate=gate), api.estimated_device(device, gpu), output)
        return
    rung, given = rung_and_given(step, gate=gate)
    question, on = one_rung(rung, given, name="estimate"), api.estimated_device(device, gpu)
    answer, fit = api.estimate(question, on)
    say([*witnesses(answer.run), *assumptions(answer.run, given.keys() | typed(gpu=gpu).keys())])
    if explain:
        from memplan.report.formula_table import formula_json, formula_table

        lines, letters = api.explain_estimate(question, on)
        if output == "json":
            show_json([formula_json(answer, lines, letters)], lines=False, single=True)
        else:
            show(render(formula_table(answer, lines, letters), output))
    elif output in ("table", "md", "html"):
        show(estimate_page(answer, fit, output))
    elif output in ("json", "jsonl"):
        show_json([estimate_json(answer, fit)], lines=output == "jsonl", single=True)
    else:
        show(render(named_phases(answer, fit), output))
    _end_at_gate(fit)


def trace(
    gpu: Annotated[str | None, option("--gpu", help="Card, h100-80g when none is named.")] = None,
    device: Annotated[str | None, option("--device", help="cpu, to trace under the host's rules.")] = None,
    gate: Gate = None,
    plot: Annotated[Path | None, option("--plot", help="The step as .png, .svg, or .json.")] = None,
    entry: Annotated[str | None, option("--entry", help="A step of yours: pkg.mod:make_step.")] = None,
    output: Output = "table",
    **step: Any,
) -> None:
    """Run the real step on fake tensors under a card's rules: the peak, where it is, and who is alive there."""
    from memplan.report.estimate_page import assumptions
    from memplan.report.render import check_form, render
    from memplan.report.step_line import step_line
    from memplan.report.timeline_plot import timeline_plot
    from memplan.report.trace_page import named_trace_phases, run_heading, trace_json, trace_page

    check_form(output)
    rung, given = rung_and_given(step, gate=gate)
    on = api.estimated_device(device, gpu)
    if entry is not None:
        if given.keys() - {"gate"} or rung is not None:
            raise MemplanError("--entry brings its own model and step.", "Leave the options about them out.")
        steps, fit = api.trace_entry(entry, on, None if gate is None else parse_bytes(gate))
        title, heading, answer = entry, [entry, f"traced for {on.name}"], trace_json(steps, fit)
        named = {"model": entry, "step": ""}
    else:
        traced, fit, kept = api.trace(one_rung(rung, given, name="trace"), on)
        say(assumptions(traced.run, given.keys() | typed(gpu=gpu).keys()))
        steps, heading = traced.steps, run_heading(traced, kept)
        answer = trace_json(traced, fit) | {"per_sample_bytes": kept[0], "logits_per_sample_bytes": kept[1]}
        named = {"model": traced.run.model.name, "step": step_line(traced.run)}
        title = traced.run.title
    if plot is not None:
        name = "gate" if fit.gate_bytes is not None else on.name
        timeline_plot(steps, plot, title=title, gate_bytes=fit.limit_bytes, gate_name=name)
    if output in ("table", "md", "html"):
        show(trace_page(steps, fit, heading=heading, form=output))
    elif output in ("json", "jsonl"):
        show_json([answer], lines=output == "jsonl", single=True)
    else:
        show(render(named_trace_phases(steps, fit, **named), output))
    _end_at_gate(fit)


def explain(
    what: Annotated[str, Argument(help="checkpoint.", metavar="WHAT")],
    gpu: Annotated[str | None, option("--gpu", help="Card, h100-80g when none is named.")] = None,
    device: Annotated[str | None, option("--device", help="cpu, for the host's own ops.")] = None,
    output: Output = "table",
    **step: Any,
) -> None:
    """Say what checkpointing does with each op of a block: kept, run again or every second call, bytes and FLOPs."""
    from memplan.report.estimate_page import assumptions
    from memplan.report.explain_table import explain_table
    from memplan.report.render import check_form, render, wants_rich

    check_form(output)
    if what != "checkpoint":
        raise MemplanError(f"There is nothing to explain called {what!r}.", "Type memplan explain checkpoint.")
    rung, given = rung_and_given(step)
    question = one_rung(rung, given, name="explain", ckpt="selective")
    answer = api.explain(question, api.estimated_device(device, gpu))
    say(assumptions(answer.run, given.keys() | typed(gpu=gpu).keys()))
    if output in ("json", "jsonl"):
        show_json([answer.to_dict()], lines=output == "jsonl", single=True)
    else:
        show(render(explain_table(answer), output, rich=wants_rich()))


def models(output: Output = "table") -> None:
    """List the built-in models: exact parameter counts, usual set-up, where the facts come from."""
    from memplan.report.lists import models_table
    from memplan.report.render import render, wants_rich

    show(render(models_table(api.models()), output, rich=wants_rich()))


def doctor(output: Output = "table") -> None:
    """Look at this machine: torch, GPU, driver, allocator settings; say what is missing and what to type."""
    from memplan.report.lists import doctor_table
    from memplan.report.render import render, wants_rich

    show(render(doctor_table(api.doctor()), output, rich=wants_rich()))


def verify(
    rungs: Annotated[
        str, Argument(help="Variants to hold against the plain step.", metavar="RUNGS")
    ] = "B4c1@full,B4c1@every:2,B4c1@first:2,B4c1@selective,B4c1@submodule,B4c1@offload,B4c2@none,B4c4@full",
    device: Annotated[str | None, option("--device", help="cpu, cuda.")] = None,
    output: Output = "table",
    **step: Any,
) -> None:
    """Prove that a variant leaves loss, gradients, buffers and caches alone, and recomputes just what it had made."""
    from memplan.report.parity_table import parity_table
    from memplan.report.render import check_form, render, wants_rich

    check_form(output)
    given = typed(**step, device=device)
    assumed = {"model": "tiny", "device": "cpu", "loss": "full,chunked-ckpt:2"}
    question = Ladder.from_dict(assumed | given | {"rungs": rungs}, name="verify", origin="options")
    check_rungs(question, given)
    reports = list(api.verify(question))
    show(render(parity_table(reports), output, rich=wants_rich()))
    sys.exit(0 if all(report.same for report in reports) else 1)


def calibrate(
    folders: Annotated[
        list[Path] | None, Argument(help="Folders of ladders, or their jsonl files.", metavar="DIR...")
    ] = None,
    published: Annotated[
        bool, option("--published", help="Hold traces against printed figures, of ladders/published or of DIR.")
    ] = False,
    within: Annotated[str, option("--within", help="Largest error that is agreement.")] = "2%",
    output: Output = "table",
) -> None:
    """Hold estimates against measurements, or traces against published figures, the worst row first."""
    from memplan.report.ladder_table import agreement_table, provenance
    from memplan.report.render import check_form, render, wants_rich

    check_form(output)
    within_frac = parse_percent(within)
    if published:
        from memplan.report.published_table import published_table

        pairs = api.published(folders or (), say=lambda name: say([f"replaying {name}"]))
        show(render(published_table(pairs), output, rich=wants_rich()))
        sys.exit(0 if all(pair.holds(within_frac) for pair in pairs) else 1)
    if not folders:
        raise MemplanError("calibrate needs a folder of results.", "Type memplan calibrate reports/NAME.")
    rows, found = api.calibrate(folders)
    if not found.pairs:
        raise NothingMeasuredError("None of these rows has both an estimate and a measurement.")
    show(render(agreement_table(found, footer=provenance(rows)), output, rich=wants_rich()))
    sys.exit(found.exit_code(within_frac))


def _end_at_gate(fit: Fit) -> None:
    """Ends with 1 when a gate was asked for and does not hold."""
    if fit.gate_bytes is not None and not fit.fits:
        sys.exit(1)


VERBS = {
    "estimate": Verb(estimate, (RUNG, STEP)),
    "trace": Verb(trace, (RUNG, STEP)),
    "explain": Verb(explain, (RUNG, STEP)),
    "models": Verb(models),
    "doctor": Verb(doctor),
    "verify": Verb(verify, (STEP,)),
    "calibrate": Verb(calibrate),
}
"""The verbs by what is typed for them."""
