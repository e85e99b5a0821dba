"""What a trace says, for people: the peak and who is alive there, every phase, the places where the host waits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from memplan.record import Fit, TracedRun, TracedSteps
from memplan.record.trace import LiveTensor
from memplan.report.render import render, render_all
from memplan.report.step_line import step_line
from memplan.report.table import Column, Table
from memplan.units import format_bytes

MOST_ALIVE = 10
"""Rows of the table of what is alive at the peak."""


def trace_json(traced: TracedRun | TracedSteps, fit: Fit) -> dict[str, Any]:
    """The JSON form: the trace's own keys and what was held against them."""
    return traced.to_dict() | {
        "gate_bytes": fit.gate_bytes,
        "limit_bytes": fit.limit_bytes,
        "fits": fit.fits,
        "max_batch": fit.max_batch,
    }


def trace_page(traced: TracedSteps, fit: Fit, *, heading: list[str], form: str = "table") -> str:
    """The whole page under `heading`, as plain text or in one of the forms `md` and `html`."""
    phases, alive, peak, rest = trace_phase_table(traced), alive_table(traced), _peak(traced), _rest(traced, fit)
    if form != "table":
        phases = dataclasses.replace(phases, title=heading[0], footer=(*heading[1:], *peak))
        return render_all([phases, dataclasses.replace(alive, footer=tuple(rest))], form)
    return "\n".join([*heading, "", render(phases), "", *peak, "", render(alive), "", *rest])


def _peak(traced: TracedSteps) -> list[str]:
    report = traced.steady
    shares = [f"{name} {format_bytes(size)}" for name, size in report.breakdown.to_dict().items() if size]
    where = f"at {report.op}" if report.op else "where it starts"
    return [
        f"peak: {format_bytes(report.peak_allocated_bytes)} allocated in {report.phase}, {where}"
        + (f" of {report.module}" if report.module else ""),
        f"of it {', '.join(shares) or 'nothing'}",
    ]


def _rest(traced: TracedSteps, fit: Fit) -> list[str]:
    report, lines = traced.steady, []
    if report.attention:
        lines.append("attention: " + ", ".join(f"{name} {count} times" for name, count in report.attention.items()))
    for sync in report.syncs:
        lines.append(f"sync: {sync.where} reads a value in {sync.phase} ({sync.op}), {sync.count} a step")
    lines.append(f"the first step, which makes the optimizer's state, peaks at {_size(traced.first_step)}")
    return [*lines, *_conclusion(traced, fit)]


def named_trace_phases(traced: TracedSteps, fit: Fit, *, model: str, step: str) -> Table:
    """Peaks of every phase for a spreadsheet: each row says of which model, device and step it is, and whether that
    fits."""
    named = {"model": model, "device": traced.device.name, "step": step}
    judged = {"gate_bytes": fit.gate_bytes, "limit_bytes": fit.limit_bytes, "fits": fit.fits}
    return trace_phase_table(traced).between(named, judged)


def trace_phase_table(traced: TracedSteps) -> Table:
    """Peaks of every phase."""
    columns = (
        Column(key="phase", header="phase", align="left"),
        Column(key="allocated_bytes", header="allocated", text=format_bytes),
        Column(key="active_bytes", header="active", text=format_bytes),
        Column(key="reserved_bytes", header="reserved", text=format_bytes),
        Column(key="peaks", header="", align="left"),
    )
    rows = tuple(
        (
            name,
            totals.allocated_bytes,
            totals.active_bytes,
            totals.reserved_bytes,
            "<- peak" if name == traced.steady.phase else "",
        )
        for name, totals in traced.steady.phases.items()
    )
    return Table(columns=columns, rows=rows)


def alive_table(traced: TracedSteps) -> Table:
    """The largest of what is alive at the peak; storages that differ in nothing but their block stand together."""
    return tensor_table(traced.steady.alive, "alive at the peak")


def tensor_table(tensors: Sequence[LiveTensor], header: str) -> Table:
    """The first `MOST_ALIVE` of `tensors`; `header` says when they were alive."""
    columns = (
        Column(key="total_bytes", header=header, text=format_bytes),
        Column(key="count", header="count"),
        Column(key="category", header="category", align="left"),
        Column(key="module", header="module", align="left"),
        Column(key="op", header="op", align="left"),
        Column(key="shape", header="shape", align="left"),
        Column(key="dtype", header="dtype", align="left"),
    )
    rows = tuple(
        (
            tensor.total_bytes,
            tensor.count,
            tensor.category,
            tensor.module or "-",
            tensor.op.removeprefix("aten."),
            "x".join(map(str, tensor.shape)) or "-",
            tensor.dtype,
        )
        for tensor in tensors[:MOST_ALIVE]
    )
    return Table(columns=columns, rows=rows)


def run_heading(traced: TracedRun, kept: tuple[int, int]) -> list[str]:
    """What was traced, for which device, and what one more sample of a chunk keeps for backward: head and loss apart,
    and theirs."""
    model, (per_sample, logits) = traced.run.model, (format_bytes(num_bytes) for num_bytes in kept)
    counts = f"{traced.params_total:,} parameters, {traced.params_trainable:,} train"
    static = format_bytes(traced.steps.steady.static_bytes)
    lines = [f"{model.name} ({counts})", f"traced for {traced.run.device.name}: {step_line(traced.run)}"]
    lines += [f"{static} between two steps; one more sample of a chunk keeps {per_sample}, and {logits} of its loss"]
    return [*lines, *([traced.note] if traced.note else [])]


def _size(report: Any) -> str:
    return f"{format_bytes(report.peak_allocated_bytes)} allocated, {format_bytes(report.peak_reserved_bytes)} reserved"


def _conclusion(traced: TracedSteps, fit: Fit) -> list[str]:
    device, lacking = traced.device, traced.out_of_memory
    lines = []
    if traced.steady.host_bytes:
        lines.append(f"{format_bytes(traced.steady.host_bytes)} wait in the host's memory at most")
    if lacking is not None:
        capacity, requested = format_bytes(device.usable_bytes or 0), format_bytes(lacking.requested_bytes)
        held = f"{format_bytes(lacking.allocated_bytes)} allocated, {format_bytes(lacking.reserved_bytes)} reserved"
        where = f"in {lacking.phase}: {lacking.op} asks for {requested} with {held}"
        lines.append(f"{device.name} ({capacity}) runs out of memory {where}")
    elif retries := max(traced.first_step.num_alloc_retries, traced.steady.num_alloc_retries):
        # The peaks are those of a card without end, so that a reader would see more reserved than the card has.
        lines.append(
            f"{device.name} has {format_bytes(device.usable_bytes or 0)}: the allocator gives back all it keeps"
            f" {'once' if retries == 1 else f'{retries} times'} a step, which is slow, and so finds room"
        )
    if fit.limit_bytes is not None:
        name = "the gate" if fit.gate_bytes is not None else device.name
        lines.append(f"under {format_bytes(fit.limit_bytes)} ({name}): {'fits' if fit.fits else 'does not fit'}")
    if device.context_bytes and (lacking is not None or fit.gate_bytes is None):
        lines.append(f"CUDA's own context takes {format_bytes(device.context_bytes)} beside it")
    return lines
