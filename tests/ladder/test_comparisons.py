"""The comparison with the plain step that a mode must stand before its rungs are measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from climbing import HERE, Processes, ladder_of, went_well

from memplan.api_ladder import comparing, mode_of
from memplan.ladder.attempt import Site
from memplan.ladder.parity import PARITY_FILE, Comparisons, compared_run, is_compared
from memplan.ladder.plan import Attempt, every_rung, ordered
from memplan.ladder.points import points
from memplan.ladder.runner import Climb, climb
from memplan.launch.process import Outcome
from memplan.record import read_rows
from memplan.spec import RunSpec
from memplan.spec.device import CPU
from memplan.units import MIB


class Compared(Processes):
    """Measures well, and compares as it is told; remembers at which batches."""

    def __init__(self, *, same: bool | None) -> None:
        super().__init__()
        self.same = same
        self.batches: list[int] = []

    def __call__(self, job: dict[str, Any], **how: Any) -> Outcome:
        if job["kind"] != "parity":
            return super().__call__(job, **how)
        self.batches.append(job["run"]["step"]["batch"])
        if self.same is None:
            return Outcome(status="oom", error="no memory", events=())
        says = {"event": "parity", "same": self.same, "rung": "x", "says": "the gradient of head.weight is 3 % off"}
        return Outcome(status="ok", error=None, events=(says,))


def go(folder: Path, processes: Compared, *, estimated: Callable[[Any], int | None], **data: Any) -> Climb:
    ladder = ladder_of(**data)
    found = points(ladder, CPU)
    attempts = ordered(found, lambda point: point.rung.batch)
    site = Site(folder=folder, environment=HERE, run=processes, available_bytes=lambda: None)
    asked = comparing(ladder, found, site, estimated)  # type: ignore[arg-type]
    return climb(ladder, every_rung(attempts), site, total=len(attempts), compared=asked)


def a_mib_each(run: RunSpec) -> int:
    return run.step.batch * MIB


def test_f24_what_is_not_the_plain_step_is_not_measured(tmp_path: Path) -> None:
    processes = Compared(same=False)
    climbed = go(tmp_path, processes, estimated=a_mib_each, ckpt="full,none", rungs="B4c2,B2c1")
    failed = [row for row in climbed.rows if row.rung.endswith("@full")]
    assert [row.status for row in failed] == ["numerics_fail", "numerics_fail"]
    assert [row.verdict for row in failed] == ["fail", "fail"]
    assert failed[0].error == (
        "not measured: it is not the plain step at B4c2@full: the gradient of head.weight is 3 % off"
    )
    assert sorted(processes.started) == ["B2c1", "B4c2"]  # the plain ones
    assert processes.batches == [4]


def test_what_is_the_plain_step_is_measured_and_says_where_that_was_seen(tmp_path: Path) -> None:
    processes = Compared(same=True)
    climbed = go(tmp_path, processes, estimated=a_mib_each, rungs="B4c2@full,B2c1@full")
    assert [row.status for row in climbed.rows] == ["ok", "ok"]
    assert {row.parity["rung"] for row in climbed.rows} == {"B4c2@full"}
    assert read_rows(tmp_path / "ladder.jsonl")[0].parity["same"] is True
    again = Compared(same=False)
    go(tmp_path, again, estimated=a_mib_each, rungs="B4c2@full,B2c1@full")
    assert again.batches == []  # the folder remembers


def test_a_comparison_without_room_says_so_and_stops_nothing(tmp_path: Path) -> None:
    climbed = go(tmp_path, Compared(same=None), estimated=a_mib_each, rungs="B2c1@full")
    assert climbed.rows[0].status == "ok"
    assert climbed.rows[0].parity == {"same": None, "rung": "B2c1@full", "says": "not compared: no memory"}
    assert not (tmp_path / PARITY_FILE).exists()


def test_no_parity_asks_for_nothing(tmp_path: Path) -> None:
    processes = Compared(same=False)
    climbed = go(tmp_path, processes, estimated=a_mib_each, rungs="B2c1@full", parity=False)
    assert (climbed.rows[0].status, climbed.rows[0].parity, processes.batches) == ("ok", {}, [])


def test_both_steps_must_find_room() -> None:
    """Under 100 MiB, at 20 MiB a sample: of 16 samples 2 are left, for copies of the weights take room too."""
    [point] = points(ladder_of(rungs="B16c2@full"), CPU)

    def estimated(run: RunSpec) -> int:
        return (20 * run.step.batch + (0 if run.step.optimizer == "sgd" else 1)) * MIB

    found = compared_run(point, 105 * MIB, estimated)
    assert found is not None and (found.step.batch, found.step.chunks, found.step.ckpt) == (2, 2, "full")
    assert compared_run(point, 50 * MIB, estimated) is None
    plain, full = points(ladder_of(rungs="B16c2@none,B16c2@full"), CPU)
    assert not is_compared(plain) and is_compared(full)
    [simulated] = points(ladder_of(rungs="B16c2@full"), CPU, simulated=True)
    assert not is_compared(simulated)


def test_a_mode_that_cannot_be_compared_says_so(tmp_path: Path) -> None:
    ladder = ladder_of(rungs="B2c1@full,B2c1@none")
    full, plain = points(ladder, CPU)
    site = Site(folder=tmp_path, environment=HERE, run=Compared(same=False), available_bytes=lambda: 1)
    asked = comparing(ladder, (full, plain), site, a_mib_each)  # type: ignore[arg-type]
    assert asked(Attempt(point=full), quiet) == {
        "same": None,
        "rung": "",
        "says": "not compared: no batch leaves room for both steps",
    }
    assert asked(Attempt(point=plain), quiet) == {}
    own = ladder_of(model="mine:make", entry="mine:make", rungs="B2c1@full", seq=None)
    [point] = points(own, CPU)
    asked = comparing(own, (point,), site, a_mib_each)  # type: ignore[arg-type]
    assert asked(Attempt(point=point), quiet)["says"] == "not compared: a step of your own has no plain twin here"


def quiet(text: str, kind: str) -> None:
    """Hears nothing."""


def test_rungs_of_one_mode_share_an_answer() -> None:
    first, other, mode = points(ladder_of(rungs="B4c2@full,B6c1@full,B4c2@every:2"), CPU)
    assert mode_of(first) == mode_of(other) != mode_of(mode)


def test_a_torn_line_among_the_answers_is_left_out(tmp_path: Path) -> None:
    [point] = points(ladder_of(rungs="B2c1@full"), CPU)
    assert isinstance(point.run, RunSpec)
    answer = {"run_id": point.run.run_id, "rung": "B2c1@full", "same": True, "says": "bitwise"}
    (tmp_path / PARITY_FILE).write_text(json.dumps(answer) + '\n{"run_id": "')
    comparisons = Comparisons(tmp_path, lambda run, rung: went_well(1))
    assert comparisons.of(point.run, "B2c1@full") == {"same": True, "rung": "B2c1@full", "says": "bitwise"}


def test_an_attempt_that_is_simulated_is_not_compared(tmp_path: Path) -> None:
    ladder = ladder_of(rungs="B2c1@full")
    found = points(ladder, CPU, simulated=True)
    site = Site(folder=tmp_path, environment=HERE, run=Compared(same=False))
    asked = comparing(ladder, found, site, a_mib_each)  # type: ignore[arg-type]
    assert asked(Attempt(point=found[0]), lambda text, kind: None) == {}
