"""A rung on a card that is not there: its step traced instead of run, and told in a worker's events."""

from dataclasses import asdict
from typing import Any

from memplan.launch.events import Events
from memplan.record import Failure, TraceReport
from memplan.record.trace import TracedSteps
from memplan.spec import DeviceSpec, RunSpec
from memplan.spec.entry import EntryRun
from memplan.units import format_bytes


def imagine(run: RunSpec | EntryRun, events: Events) -> dict[str, Any]:
    """Traces the step on its imagined card and writes its windows; the status and error that end the rung.

    A step that the card has no room for is `oom`, and its windows say what it would have needed.
    """
    events.begin("trace")
    traced, note = traced_steps(run)
    for name, report in (("first_step", traced.first_step), ("measured", traced.steady)):
        peak = {
            "allocated_bytes": report.peak_allocated_bytes,
            "active_bytes": report.peak_active_bytes,
            "reserved_bytes": report.peak_reserved_bytes,
            "num_alloc_retries": report.num_alloc_retries,
            "num_steps": 1,
        }
        phases = {phase: totals.allocated_bytes for phase, totals in report.phases.items()}
        events.write("window", name=name, peak=peak, phase_peaks=phases)
        if report.host_bytes:
            events.write("host", window=name, bytes=report.host_bytes)
    largest = max(traced.steady, traced.first_step, key=lambda report: report.peak_allocated_bytes)
    events.write("breakdown", at_peak=largest.breakdown.to_dict(), between_steps=between_steps(traced.steady))
    events.write("look", attention=traced.steady.attention, model_flops=None, hardware_flops=None)
    events.write("environment", device=run.device.name, witness="trace", note=note or None)
    if traced.out_of_memory is None:
        return {"status": "ok", "error": None}
    return {"status": "oom"} | lack_of_room(run.device, traced)


def between_steps(report: TraceReport) -> dict[str, int]:
    """Bytes alive between two steps by category: the model's and the optimizer's, which stay, and `other`. Empty where
    these are less between steps than at the peak, as where they are gathered from other devices."""
    held = {name: report.breakdown.to_dict()[name] for name in ("params", "buffers", "optimizer")}
    rest = report.static_bytes - sum(held.values())
    return held | {"other": rest} if rest >= 0 else {}


def traced_steps(run: RunSpec | EntryRun) -> tuple[TracedSteps, str]:
    """What the trace says about two steps, and what was done instead of what was asked for."""
    if isinstance(run, EntryRun):
        from memplan.backends.simulated import simulate_entry
        from memplan.models.user_factory import load_entry

        make = load_entry(run.entry)
        return simulate_entry(lambda: make(**run.arguments()), run.device), ""
    from memplan.backends.simulated import simulate

    answer = simulate(run)
    return answer.steps, answer.note


def lack_of_room(device: DeviceSpec, traced: TracedSteps) -> dict[str, Any]:
    """Where `device` runs out, in words and in numbers."""
    name, report = first_without_room(traced)
    lacking = report.out_of_memory
    assert lacking is not None
    error = (
        f"needs {format_bytes(traced.needed_bytes)} allocated; {device.name} runs out in {lacking.phase}, when"
        f" {lacking.op}{f' of {lacking.module}' if lacking.module else ''} asks for"
        f" {format_bytes(lacking.requested_bytes)} with {format_bytes(lacking.allocated_bytes)} allocated"
    )
    if device.context_bytes:
        error += f"; CUDA's own context takes {format_bytes(device.context_bytes)} beside it"
    failure = Failure(
        window=name,
        phase=lacking.phase,
        requested_bytes=lacking.requested_bytes,
        allocated_bytes=lacking.allocated_bytes,
        reserved_bytes=lacking.reserved_bytes,
        cap_bytes=device.usable_bytes,
        alive=report.alive[:10],
    )
    return {"error": error, "failure": asdict(failure)}


def first_without_room(traced: TracedSteps) -> tuple[str, TraceReport]:
    """The first of the two steps in which the card runs out."""
    steps = {"first_step": traced.first_step, "measured": traced.steady}
    return next((name, report) for name, report in steps.items() if report.out_of_memory is not None)
