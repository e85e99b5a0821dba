"""The verdict: a row held against the gate."""

import dataclasses

from memplan.record import RungResult

FINAL = ("ok", "over_gate", "oom")
"""Statuses that say something about the rung itself. The others (`timeout`, `killed`, `error`) may go away when the
rung is tried again, so `--resume` tries them again."""


def judge(row: RungResult, *, gate_bytes: int | None, gate_on: str) -> RungResult:
    """`row` with its verdict against the gate, whatever gate it was held against before.

    A peak at or under the gate passes. A rung that ran out of memory fails any gate. Without a gate, without a
    number, and for any other failure, the verdict is `inconclusive`.
    """
    peak_bytes = row.peak_reserved_bytes if gate_on == "reserved" else row.peak_allocated_bytes
    status = "ok" if row.status == "over_gate" else row.status
    verdict = "inconclusive"
    if gate_bytes is not None and status == "oom":
        verdict = "fail"
    elif gate_bytes is not None and status == "ok" and peak_bytes is not None:
        verdict = "pass" if peak_bytes <= gate_bytes else "fail"
        status = "ok" if verdict == "pass" else "over_gate"
    return dataclasses.replace(row, status=status, verdict=verdict, gate_bytes=gate_bytes, gate_on=gate_on)
