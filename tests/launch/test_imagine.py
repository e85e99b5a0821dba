"""Rungs on cards that are not there, as a worker tells them."""

import dataclasses
import json
from pathlib import Path

import pytest
from samples import run_of
from subjects import Heard

from memplan.launch.worker import Work
from memplan.record import Failure
from memplan.spec.device import card
from memplan.spec.entry import EntryRun


def test_a_traced_rung_has_a_breakdown_and_its_attention() -> None:
    heard = Heard()
    run = dataclasses.replace(run_of(ckpt="full", precision="bf16"), device=card("h100-80g"))
    assert Work({"run": run.to_dict(), "simulated": True}, heard).done() == {"status": "ok", "error": None}
    row = heard.row()
    assert sum(row["breakdown"].values()) == row["peak_allocated_bytes"]
    assert row["between_steps"]["params"] == row["breakdown"]["params"] > 0
    assert row["attention"] == {"cudnn": 8}


def test_where_a_card_runs_out_is_told_as_where_a_real_one_does() -> None:
    heard = Heard()
    small = dataclasses.replace(card("h100-80g"), capacity_bytes=64 << 20, context_bytes=0)
    run = dataclasses.replace(run_of(seq=512), device=small)
    end = Work({"run": run.to_dict(), "simulated": True}, heard).done()
    failure = Failure.from_dict(json.loads(json.dumps(end["failure"])))
    assert end["status"] == "oom"
    assert failure.window in ("first_step", "measured")
    assert failure.requested_bytes and failure.allocated_bytes and failure.phase
    assert failure.cap_bytes == small.usable_bytes
    assert len(failure.alive) == 10


def test_a_users_step_is_traced_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_traced_step.py").write_text(
        "import torch\n"
        "def make_step(batch, chunks, ckpt, seq):\n"
        "    weight = torch.zeros(1024, 1024, requires_grad=True)\n"
        "    def step():\n"
        "        (torch.ones(batch, seq, 1024) @ weight).sum().backward()\n"
        "        weight.grad = None\n"
        "    return step\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    peaks = {}
    for batch in (1, 2):
        heard = Heard()
        run = EntryRun(
            entry="my_traced_step:make_step", batch=batch, chunks=1, ckpt="none", seq=1024, device=card("h100-80g")
        )
        assert Work({"entry": run.to_dict(), "simulated": True}, heard).done()["status"] == "ok"
        peaks[batch] = heard.row()["peak_allocated_bytes"]
    assert peaks[2] - peaks[1] == pytest.approx(2 * 4 * 1024 * 1024, abs=1024), (
        "one more sample, and one more row of results"
    )
