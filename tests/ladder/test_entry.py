"""A ladder over a step of the user's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from climbing import HERE, in_this_process, went_well

from memplan.api_ladder import climb
from memplan.errors import MemplanError
from memplan.ladder.attempt import Site, measure
from memplan.ladder.plan import Attempt
from memplan.ladder.points import points
from memplan.launch.process import Outcome
from memplan.spec import EntryRun, Ladder
from memplan.spec.device import CPU
from memplan.units import MIB

MINE = """
import torch

def make(batch, chunks, ckpt):
    weight = torch.nn.Parameter(torch.zeros(256, 1024))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        for part in torch.ones(batch, 256).chunk(chunks):
            loss = (part @ weight).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
"""


def question(rungs: str = "B8c2,B4", **data: Any) -> Ladder:
    known = {"model": "mine:make", "entry": "mine:make", "rungs": rungs, "gate": "1GiB", "device": "cpu"}
    return Ladder.from_dict(known | data, name="mine", origin="options")


def test_points_carry_what_make_step_is_called_with() -> None:
    first, second, third, fourth = points(question(ckpt="none,full", seq=32), CPU)
    assert isinstance(first.run, EntryRun)
    assert first.run.arguments() == {"batch": 8, "chunks": 2, "ckpt": "none", "seq": 32}
    assert [str(point.rung) for point in (second, third, fourth)] == ["B8c2@full", "B4c1@none", "B4c1@full"]
    assert len({point.run.run_id for point in (first, second, third, fourth)}) == 4
    assert first.command.startswith("memplan ladder B8c2@none --entry mine:make --seq 32 --device cpu --gate 1GiB")
    assert EntryRun.from_dict(json.loads(json.dumps(first.run.to_dict()))) == first.run


def test_the_job_names_the_entry_and_the_row_too(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []

    def run(job: dict[str, Any], **how: Any) -> Outcome:
        jobs.append(job)
        return went_well(5 * MIB)

    [point] = points(question("B4"), CPU)
    row = measure(
        question("B4"), Attempt(point=point), Site(folder=tmp_path, environment=HERE, run=run), lambda *_: None
    )
    assert jobs[0]["entry"]["entry"] == "mine:make" and "run" not in jobs[0]
    assert (row.model, row.rung, row.step["batch"], row.estimated_bytes) == ("mine:make", "B4c1@none", 4, None)


def test_a_search_over_a_step_that_no_formula_knows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MemplanError, match="no formula knows this step"):
        climb(question(), out=tmp_path / "out", search=True)
    with pytest.raises(MemplanError, match="has no function 'makes'"):
        climb(question(entry="mine:makes"), out=tmp_path / "out")
    with pytest.raises(MemplanError, match="makes its loss itself"):
        climb(question("B4l2"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_step_of_the_users_own_is_traced_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    climbed = climb(question("B4096", device="simulated", gate="18MiB"), out=tmp_path / "out", run=in_this_process)
    [row] = climbed.rows
    assert (row.status, row.verdict, row.source) == ("over_gate", "fail", "simulated")
    assert row.peak_allocated_bytes is not None and row.peak_allocated_bytes > 20 * MIB  # 4096 x 1024 fp32 and more
