"""A ladder without a GPU: every rung through the trace, with the card's memory as the limit."""

from pathlib import Path

import pytest

from memplan import api_ladder as api
from memplan.spec import Ladder


def climb(tmp_path: Path, rungs: str, **changes: object) -> object:
    question = Ladder.from_dict(
        {"rungs": rungs, "model": "tiny", "device": "simulated", "seq": 64} | changes, name="sim", origin="test"
    )
    told: list[str] = []
    climbed = api.climb(question, out=tmp_path / "out", resume=False, say=lambda note: None, tell=told.extend)
    assert "nothing is measured" in told[0]
    return climbed


def test_a_rung_that_the_card_holds_is_judged_by_its_traced_peak(tmp_path: Path) -> None:
    climbed = climb(tmp_path, "B4c2,B8c1@full", gate="1GiB", gpu="rtx-4090")
    assert climbed.exit_code == 0  # type: ignore[attr-defined]
    for row in climbed.rows:  # type: ignore[attr-defined]
        assert (row.source, row.status, row.verdict) == ("simulated", "ok", "pass")
        assert row.traced_bytes == row.peak_allocated_bytes == row.windows["measured"].allocated_bytes
        assert row.peak_reserved_bytes >= row.peak_allocated_bytes
        assert row.step_ns == () and row.loss == ()
        assert row.phase_peaks.keys() >= {"forward", "loss", "backward", "optimizer"}
        assert "--device simulated --gpu rtx-4090" in row.command


def test_a_rung_without_room_says_how_much_and_where(tmp_path: Path) -> None:
    climbed = climb(tmp_path, "B64c1", model="qwen3-0.6b", seq=2048, precision="bf16", gpu="rtx-4090", gate="80GiB")
    (row,) = climbed.rows  # type: ignore[attr-defined]
    assert climbed.exit_code == 1  # type: ignore[attr-defined]
    assert (row.source, row.status, row.verdict) == ("simulated", "oom", "fail")
    assert row.peak_allocated_bytes > 24 * 2**30
    assert "rtx-4090 runs out in forward, when aten." in row.error
    assert row.estimated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.01)
