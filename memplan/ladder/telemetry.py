"""What the parent saw of the device while a rung ran, put beside what the rung says of itself."""

import dataclasses
from typing import Any

PHASE_OF_WINDOW = {"init": "build"}
"""Windows to what a worker calls the phase that they cover, where the names differ."""
MARKED_APART = {"phases": "measured", "measured": "timed"}
"""The same on a device whose counters cost nothing: the marked step is a window of its own, and the timed ones are
`measured`."""


def watched_over(told: dict[str, Any], telemetry: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row with what NVML reported: own and others' bytes by window, and clocks while steps were timed.

    What a process uses of a device is told by the device's total only while nobody else is there; where others were
    seen it is what NVML reported for the rung's own processes, or unknown.
    """
    windows = dict(told["windows"])
    named = PHASE_OF_WINDOW | (MARKED_APART if "phases" in windows else {})
    for name in windows:
        seen = telemetry.get("windows", {}).get(named.get(name, name), {})
        window = dataclasses.replace(
            windows[name], own_bytes=seen.get("own_bytes"), others_bytes=seen.get("others_bytes")
        )
        if window.others_bytes:
            window = dataclasses.replace(window, used_bytes=window.own_bytes)
        windows[name] = window
    used = [
        value for window in windows.values() for value in (window.used_bytes, window.own_bytes) if value is not None
    ]
    seen = telemetry.get("timed", {}) | {"others": telemetry.get("others")}
    timed = {name: value for name, value in seen.items() if value not in (None, [], {})}
    return told | {"windows": windows, "peak_used_bytes": max(used, default=None), "telemetry": timed}
