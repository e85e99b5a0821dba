"""The verdict: a row held against the gate."""

import dataclasses

from memplan.record import RungResult

FAILS = ("oom", "thrash", "ac_error", "numerics_fail")
"""Statuses with which a rung fails any gate."""


def judge(row: RungResult, *, gate_bytes: int | None, gate_on: str) -> RungResult:
    """`row` with its verdict against the gate, whatever gate it was held against before.

    A peak at or under the gate passes. A rung that ran out of memory, thrashed, or does not train fails any gate.
    Without a gate, without a number, and for any other failure, the verdict is `inconclusive`.
    """
    row = dataclasses.replace(row, gate_bytes=gate_bytes, gate_on=gate_on)
    status = "ok" if row.status == "over_gate" else row.status
    verdict = "inconclusive"
    if gate_bytes is not None and status in FAILS:
        verdict = "fail"
    elif gate_bytes is not None and status == "ok" and row.gated_bytes is not None:
        verdict = "pass" if row.gated_bytes <= gate_bytes else "fail"
        status = "ok" if verdict == "pass" else "over_gate"
    return dataclasses.replace(row, status=status, verdict=verdict)
