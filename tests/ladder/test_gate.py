"""The verdict: at the gate passes, one byte above fails, and what has no number has no verdict."""

from typing import Any

import pytest
from samples import row_of

from memplan.ladder.gate import judge
from memplan.record import FINAL, STATUSES


@pytest.mark.parametrize(
    ("row", "gate_bytes", "status", "verdict"),
    [
        ({"peak_allocated_bytes": 100}, 100, "ok", "pass"),
        ({"peak_allocated_bytes": 101}, 100, "over_gate", "fail"),
        ({"peak_allocated_bytes": 101}, None, "ok", "inconclusive"),
        ({"status": "oom", "peak_allocated_bytes": None}, 100, "oom", "fail"),
        ({"status": "oom", "peak_allocated_bytes": 50}, 100, "oom", "fail"),
        ({"status": "oom", "peak_allocated_bytes": None}, None, "oom", "inconclusive"),
        ({"status": "thrash", "peak_allocated_bytes": 50}, 100, "thrash", "fail"),
        ({"status": "numerics_fail", "peak_allocated_bytes": 50}, 100, "numerics_fail", "fail"),
        ({"status": "oom_suspect", "peak_allocated_bytes": 50}, 100, "oom_suspect", "inconclusive"),
        ({"status": "timeout", "peak_allocated_bytes": 50}, 100, "timeout", "inconclusive"),
        ({"status": "killed", "peak_allocated_bytes": 50}, 100, "killed", "inconclusive"),
        ({"status": "error", "peak_allocated_bytes": 500}, 100, "error", "inconclusive"),
        ({"status": "ok", "peak_allocated_bytes": None}, 100, "ok", "inconclusive"),
    ],
)
def test_verdicts(row: dict[str, Any], gate_bytes: int | None, status: str, verdict: str) -> None:
    judged = judge(row_of(**row), gate_bytes=gate_bytes, gate_on="allocated")
    assert (judged.status, judged.verdict) == (status, verdict)
    assert judged.gate_bytes == gate_bytes


def test_a_row_can_be_held_against_another_gate() -> None:
    row = row_of(peak_allocated_bytes=101)
    failed = judge(row, gate_bytes=100, gate_on="allocated")
    assert judge(failed, gate_bytes=101, gate_on="allocated").verdict == "pass"
    assert judge(failed, gate_bytes=None, gate_on="allocated").status == "ok"


def test_the_gate_reads_the_peak_it_was_told_to() -> None:
    row = row_of(peak_allocated_bytes=100, peak_reserved_bytes=200, peak_used_bytes=300)
    assert judge(row, gate_bytes=150, gate_on="allocated").verdict == "pass"
    assert judge(row, gate_bytes=150, gate_on="reserved").verdict == "fail"
    assert judge(row, gate_bytes=250, gate_on="reserved").verdict == "pass"
    assert judge(row, gate_bytes=250, gate_on="used").verdict == "fail"
    assert judge(row_of(), gate_bytes=150, gate_on="reserved").verdict == "inconclusive"


def test_only_what_says_something_about_the_rung_is_final() -> None:
    retried = {"oom_suspect", "killed", "host_oom", "timeout", "dirty_device", "error", "skipped"}
    assert set(STATUSES) - set(FINAL) == retried
