"""What an estimate says, for people: static memory, what a sample adds, the peak of every phase, what fits."""

import dataclasses
from typing import Any

from memplan.record import CATEGORIES, SEQ_STEP, Band, Estimate, Fit
from memplan.report.render import render, render_all
from memplan.report.step_line import step_line
from memplan.report.table import Column, Table
from memplan.spec import RunSpec
from memplan.units import format_bytes


def estimate_json(estimate: Estimate, fit: Fit) -> dict[str, Any]:
    """The JSON form: the estimate's own keys and what was held against them."""
    return estimate.to_dict() | {
        "gate_bytes": fit.gate_bytes,
        "limit_bytes": fit.limit_bytes,
        "fits": fit.fits,
        "max_batch": fit.max_batch,
        "max_batch_unchunked": fit.max_batch_unchunked,
        "max_seq": fit.max_seq,
        "may_not_fit": list(fit.may_not_fit),
        "model_ends": list(fit.model_ends),
    }


def estimate_page(estimate: Estimate, fit: Fit, form: str = "table") -> str:
    """The whole page as plain text, or in one of the forms `md` and `html`."""
    heading, conclusion = _heading(estimate), _conclusion(estimate, fit)
    static, phases = _static_table(estimate), phase_table(estimate)
    if form != "table":
        static = dataclasses.replace(static, title=heading[0], footer=tuple(heading[1:]))
        return render_all([static, dataclasses.replace(phases, footer=tuple(conclusion))], form)
    return "\n".join([*heading, "", render(static), "", render(phases), "", *conclusion])


def witnesses(run: RunSpec) -> list[str]:
    """A line that says whose numbers an estimate of `run` is made of, where they are not the formulas' alone."""
    if run.model.impl != "user":
        return []
    return [f"No formula knows the forward of {run.model.name}: states by formula, activations and peaks by trace."]


def assumptions(run: RunSpec, given: set[str]) -> list[str]:
    """Lines that say what nobody asked for and was filled in from the model, and what its configuration leaves open;
    none when everything was given."""
    step = run.step
    filled = {
        "model": run.model.name,
        "seq": f"seq {step.seq}",
        "images": f"{step.images} images" if step.images else None,
        "precision": step.precision,
        "attention": None if step.attention == "sdpa" else f"{step.attention} attention",
        "gpu": run.device.name if run.device.rules == "cuda" else None,
    }
    told = [text for name, text in filled.items() if text is not None and name not in given]
    return [*run.model.notes, *(["assumed: " + ", ".join(told)] if told else [])]


def phase_table(estimate: Estimate) -> Table:
    """The largest moment of each phase by category; categories that are empty everywhere are left out."""
    kept = [name for name in CATEGORIES if any(phase.breakdown.to_dict()[name] for phase in estimate.phases)]
    columns = (
        Column(key="phase", header="phase", align="left"),
        Column(key="moment", header="largest at", align="left"),
        *(Column(key=f"{name}_bytes", header=name, text=_size) for name in kept),
        Column(key="allocated_bytes", header="allocated", text=format_bytes),
        Column(key="peaks", header="", align="left"),
    )
    rows = tuple(
        (
            phase.phase,
            phase.moment,
            *(phase.breakdown.to_dict()[name] for name in kept),
            phase.breakdown.total_bytes,
            "<- peak" if phase is estimate.peak else "",
        )
        for phase in estimate.phases
    )
    return Table(columns=columns, rows=rows)


def named_phases(estimate: Estimate, fit: Fit) -> Table:
    """The same for a spreadsheet: each row says of which model, device and step it is, and whether that fits."""
    run = estimate.run
    named = {"model": run.model.name, "device": run.device.name, "step": step_line(run)}
    judged = {"gate_bytes": fit.gate_bytes, "limit_bytes": fit.limit_bytes, "fits": fit.fits}
    return phase_table(estimate).between(named, judged)


def _heading(estimate: Estimate) -> list[str]:
    model = estimate.run.model
    counts = f"{estimate.params_total:,} parameters, {estimate.params_trainable:,} train"
    witness = "states by formula, the rest traced" if estimate.traced else "estimated"
    lines = [f"{model.name} ({counts})", f"{witness} for {estimate.run.device.name}: {step_line(estimate.run)}"]
    return [*lines, *estimate.notes]


def _static_table(estimate: Estimate) -> Table:
    columns = (
        Column(key="what", header="what", align="left"),
        Column(key="bytes", header="size", text=format_bytes),
        Column(key="source", header="by", align="left", hide_empty=True),
    )
    sources, traced = estimate.sources, "traced" if estimate.traced else None
    rows: list[tuple[Any, ...]] = [
        (f"{name} (static)", size, traced and sources.get(f"static.{name}"))
        for name, size in estimate.static.to_dict().items()
        if size
    ]
    rows.append(("static together, between two steps", estimate.static.total_bytes, None))
    rows.append(("saved for backward by one sample of a chunk", estimate.per_sample_bytes, traced))
    rows.append(("the same by one token, on average", round(estimate.per_token_bytes), traced))
    if estimate.per_chunk_bytes:
        rows.append(("copies of weights kept by a chunk, whatever its samples", estimate.per_chunk_bytes, traced))
    rows.append(("log-probabilities kept by one sample of a chunk", estimate.logits_per_sample_bytes, traced))
    return Table(columns=columns, rows=tuple(rows))


def _conclusion(estimate: Estimate, fit: Fit) -> list[str]:
    device = estimate.run.device
    lines = [
        f"peak: {format_bytes(estimate.peak_allocated_bytes)} allocated, in {estimate.peak.phase}"
        + ", traced" * estimate.traced,
        f"active: {format_bytes(estimate.peak_allocated_bytes)} (on one stream no freed block waits for another)",
        f"reserved: {_band(estimate.reserved)}",
        f"process: {_band(estimate.process)}",
    ]
    if estimate.host_bytes:
        lines.append(f"on the host: {format_bytes(estimate.host_bytes)} of offloaded tensors")
    if estimate.managed_bytes:
        lines.append(f"in unified memory: {format_bytes(estimate.managed_bytes)} of paged optimizer state")
    if fit.limit_bytes is None:
        return [*lines, "nothing to hold it against: type --gate SIZE to see the largest batch"]
    name = "the gate" if fit.gate_bytes is not None else device.name
    room_bytes, likely_bytes = fit.limit_bytes - estimate.peak_allocated_bytes, estimate.reserved.likely_bytes or 0
    verdict = {
        True: f"fits, {format_bytes(room_bytes)} to spare",
        False: f"does not fit, {format_bytes(-room_bytes)} over"
        if room_bytes < 0
        else "does not fit: fragments leave no room for what it asks for at its peak",
        None: f"may not fit: {format_bytes(room_bytes)} to spare is less than fragments "
        + (f"take, {format_bytes(likely_bytes)} reserved" if likely_bytes > fit.limit_bytes else "usually take")
        + "; memplan trace replays the allocator",
    }[fit.fits]
    lines.append(f"under {format_bytes(fit.limit_bytes)} ({name}): {verdict}")
    if fit.gate_bytes is None and device.context_bytes:
        lines.append(f"CUDA's own context takes {format_bytes(device.context_bytes)} beside it")
    return [*lines, _largest(estimate, fit) + "; each traced, and the next" * estimate.traced]


def _largest(estimate: Estimate, fit: Fit) -> str:
    """The largest batch and the longest sample, and which of them fragments may keep out."""
    step = estimate.run.step

    def sized(name: str, unit: str = "") -> str:
        size = getattr(fit, name)
        if not size:
            return "the model takes none" if name in fit.model_ends else "none fits"
        text = f"{size:,}{unit}" + " (may not fit)" * (name in fit.may_not_fit)
        return text + ", as many as the model takes" * (name in fit.model_ends)

    text = f"largest batch: {sized('max_batch')} in {step.chunks} chunk{'s' * (step.chunks > 1)}"
    if step.chunks > 1:
        text += f", {sized('max_batch_unchunked')} in 1"
    if fit.max_seq is not None:
        unit = f" tokens, in steps of {SEQ_STEP}"
        text += f"; longest sample at this batch: {sized('max_seq', unit)}"
    return text


def _band(band: Band) -> str:
    low, high = format_bytes(band.low_bytes), format_bytes(band.high_bytes)
    if low == high:
        return f"{low} ({band.reason})"
    likely = "" if band.likely_bytes is None else f"about {format_bytes(band.likely_bytes)}, "
    return f"{likely}{low} to {high} ({band.reason})"


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "."
