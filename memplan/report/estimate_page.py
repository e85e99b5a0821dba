"""What an estimate says, for people: static memory, what a sample adds, the peak of every phase, what fits."""

from typing import Any

from memplan.record import CATEGORIES, Band, Estimate, Fit
from memplan.report.render import render
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
    }


def estimate_page(estimate: Estimate, fit: Fit) -> str:
    """The page as plain text."""
    return "\n".join(
        [
            _heading(estimate),
            "",
            render(_static_table(estimate)),
            "",
            render(phase_table(estimate)),
            "",
            *_conclusion(estimate, fit),
        ]
    )


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


def _heading(estimate: Estimate) -> str:
    step, model = estimate.run.step, estimate.run.model
    counts = f"{estimate.params_total:,} parameters, {estimate.params_trainable:,} train"
    witness = "states by formula, the rest traced" if estimate.traced else "estimated"
    lines = [f"{model.name} ({counts})", f"{witness} for {estimate.run.device.name}: {step_line(step)}"]
    return "\n".join([*lines, *estimate.notes])


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
    if estimate.traced:
        rows.append(("the same by one token, on average", round(estimate.per_token_bytes), traced))
    if estimate.per_chunk_bytes:
        rows.append(("copies of weights kept by a chunk, whatever its samples", estimate.per_chunk_bytes, traced))
    rows.append(("log-probabilities kept by one sample of a chunk", estimate.logits_per_sample_bytes, traced))
    return Table(columns=columns, rows=tuple(rows))


def _conclusion(estimate: Estimate, fit: Fit) -> list[str]:
    step, device = estimate.run.step, estimate.run.device
    lines = [
        f"peak: {format_bytes(estimate.peak_allocated_bytes)} allocated, in {estimate.peak.phase}"
        + ", traced" * estimate.traced,
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
    room_bytes = fit.limit_bytes - estimate.peak_allocated_bytes
    verdict = {
        True: f"fits, {format_bytes(room_bytes)} to spare",
        False: f"does not fit, {format_bytes(-room_bytes)} over"
        if room_bytes < 0
        else "does not fit: fragments leave no room for what it asks for at its peak",
        None: f"may not fit: {format_bytes(room_bytes)} to spare is less than fragments usually take; memplan trace "
        "replays the allocator",
    }[fit.fits]
    lines.append(f"under {format_bytes(fit.limit_bytes)} ({name}): {verdict}")
    if fit.gate_bytes is None and device.context_bytes:
        lines.append(f"CUDA's own context takes {format_bytes(device.context_bytes)} beside it")
    largest = f"largest batch: {fit.max_batch or 'none fits'} in {step.chunks} chunk{'s' * (step.chunks > 1)}"
    if step.chunks > 1:
        largest += f", {fit.max_batch_unchunked or 'none fits'} in 1"
    if fit.max_seq is not None:
        largest += f"; longest sample at this batch: {f'{fit.max_seq:,} tokens' if fit.max_seq else 'none fits'}"
    return [*lines, largest + "; each traced, and the next" * estimate.traced]


def _band(band: Band) -> str:
    low, high = format_bytes(band.low_bytes), format_bytes(band.high_bytes)
    if low == high:
        return f"{low} ({band.reason})"
    likely = "" if band.likely_bytes is None else f"about {format_bytes(band.likely_bytes)}, "
    return f"{likely}{low} to {high} ({band.reason})"


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "."
