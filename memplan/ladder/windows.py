"""From what a worker said to the numbers of a row."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from memplan.record import WindowPeak


def fold(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The fields of `RungResult` that events tell: windows, peaks over all of them, losses, step times.

    Windows that were not finished left no event, so a rung that died keeps exactly what it had finished.
    """
    windows: dict[str, WindowPeak] = {}
    phase_peaks: dict[str, int] = {}
    losses: list[float] = []
    step_ns: list[int] = []
    for event in events:
        match event.get("event"):
            case "window":
                windows[event["name"]] = WindowPeak(**event["peak"])
                for phase, peak_bytes in event["phase_peaks"].items():
                    phase_peaks[phase] = max(phase_peaks.get(phase, 0), peak_bytes)
            case "host":
                windows[event["window"]] = replace(windows[event["window"]], host_bytes=event["bytes"])
            case "loss":
                losses.append(event["loss"])
            case "step":
                step_ns.append(event["ns"])
    reserved = [peak.reserved_bytes for peak in windows.values() if peak.reserved_bytes is not None]
    return {
        "windows": windows,
        "phase_peaks": phase_peaks,
        "peak_allocated_bytes": max((peak.allocated_bytes for peak in windows.values()), default=None),
        "peak_reserved_bytes": max(reserved, default=None),
        "loss": tuple(losses),
        "step_ns": tuple(step_ns),
    }


def device_facts(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the worker said about its device."""
    facts: dict[str, Any] = {}
    for event in events:
        if event.get("event") == "environment":
            facts |= {key: value for key, value in event.items() if key != "event" and value is not None}
    return facts
