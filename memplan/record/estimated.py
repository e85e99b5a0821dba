"""Rows of what `memplan estimate` or `memplan trace` printed with `-o json` or `-o jsonl`, so that predictions are
compared as ladders are."""

import json
from typing import Any

from memplan.record.memory import SCHEMA_VERSION

SOURCES = {"estimated": "estimated", "traced": "simulated"}
"""Source of such a row by that of what it is made of: a traced peak is that of a rung on a device that is not there."""


def is_estimate(data: dict[str, Any]) -> bool:
    """Whether a JSON object is an estimate's, and no row's."""
    return data.get("source") in SOURCES and "rung" not in data and "peak" in data


def estimated_row(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of the row that says what an estimate's says. ValueError where that misses something."""
    try:
        step, peak = dict(data["step"]), data["peak"]
        return {
            "schema_version": data.get("schema_version", SCHEMA_VERSION),
            "rung": f"B{step['batch']}c{step['chunks']}@{step['ckpt']}",
            "run_id": data["run_id"],
            "status": "ok",
            "source": SOURCES[data["source"]],
            "model": data["model"],
            "step": step,
            "peak_allocated_bytes": peak["allocated_bytes"],
            "peak_reserved_bytes": peak.get("reserved_bytes"),
            "phase_peaks": phase_peaks(data.get("phases", {})),
            "breakdown": data.get("breakdown", {}),
            "gate_bytes": data.get("gate_bytes"),
            "environment": {"device": data.get("device")},
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"its estimate lacks {error}") from None


def phase_peaks(phases: dict[str, Any]) -> dict[str, int]:
    """Peaks by the phases that a step is measured by: what is recomputed is a part of backward."""
    peaks = {name: phase["allocated_bytes"] for name, phase in phases.items()}
    if "recompute" in peaks:
        peaks["backward"] = max(peaks.pop("recompute"), peaks.get("backward", 0))
    return peaks


def printed(text: bytes) -> list[dict[str, Any]]:
    """The estimates of a file that is one JSON value over several lines, as `-o json` prints it; none where it is
    something else."""
    try:
        data = json.loads(text.decode())
    except (ValueError, RecursionError):
        return []
    found = data if isinstance(data, list) else [data]
    return found if all(isinstance(one, dict) and is_estimate(one) for one in found) else []
