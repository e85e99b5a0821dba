"""From what a worker said to the numbers of a row."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from memplan.record import WindowPeak


def fold(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The fields of `RungResult` that events tell: windows, peaks over all of them, losses, step times, and what was
    looked at.

    Windows that were not finished left no event, so a rung that died keeps exactly what it had finished. `used_bytes`
    takes the whole device for the rung's own: whoever saw others on it must correct that.
    """
    windows: dict[str, WindowPeak] = {}
    phase_peaks: dict[str, int] = {}
    losses: list[float] = []
    step_ns: list[int] = []
    warnings: dict[str, None] = {}
    found: dict[str, Any] = {}
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
            case "warning":
                warnings[event["text"]] = None
            case "training":
                found |= {name: event[name] for name in ("grad_norm", "num_targets")}
            case "look":
                found |= {name: event[name] for name in ("attention", "model_flops", "hardware_flops")}
            case "breakdown":
                found |= {"breakdown": event["at_peak"], "between_steps": event["between_steps"]}
            case "parity":
                found["parity"] = {name: event[name] for name in ("same", "rung", "says")}
    return found | {
        "windows": windows,
        "phase_peaks": phase_peaks,
        "peak_allocated_bytes": max((peak.allocated_bytes for peak in windows.values()), default=None),
        "peak_reserved_bytes": _largest(windows, "reserved_bytes"),
        "peak_used_bytes": _largest(windows, "used_bytes"),
        "loss": tuple(losses),
        "step_ns": tuple(step_ns),
        "warnings": tuple(warnings),
    }


def _largest(windows: dict[str, WindowPeak], name: str) -> int | None:
    """Largest value of a field over the windows that tell it."""
    told = [value for peak in windows.values() if (value := getattr(peak, name)) is not None]
    return max(told, default=None)


def device_facts(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the worker said about its device."""
    facts: dict[str, Any] = {}
    for event in events:
        if event.get("event") == "environment":
            facts |= {key: value for key, value in event.items() if key != "event" and value is not None}
    return facts
