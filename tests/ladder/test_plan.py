"""What is climbed next: the order, what is skipped, repeats, the search for the largest batch."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from climbing import Processes, go, ladder_of, went_well

from memplan.ladder.plan import MOST_RUNGS, Attempt, dominating, largest_batch, ordered, rehearsed
from memplan.ladder.points import Point, points, with_batch
from memplan.launch.process import Outcome
from memplan.record import RungResult
from memplan.spec.device import CPU
from memplan.units import GIB, MIB

OOM = Outcome(status="oom", error="no memory", events=())
FAR_OVER = went_well(GIB)


def test_what_needs_least_comes_first_and_what_nobody_knows_last() -> None:
    found = points(ladder_of(rungs="B4c2,B2c1,B3c1,B1c1"), CPU)
    known = {4: 40, 2: 20, 3: None, 1: 30}
    attempts = ordered(found, lambda point: known[point.rung.batch])
    assert [one.point.rung.batch for one in attempts] == [2, 1, 4, 3]


def test_f34_repeats_come_in_rounds_every_second_one_backwards() -> None:
    found = points(ladder_of(rungs="B3c1,B2c1,B1c1"), CPU)
    attempts = ordered(found, lambda point: point.rung.batch, repeat=3)
    assert [(one.repeat, one.point.rung.batch) for one in attempts] == [
        *((1, 1), (1, 2), (1, 3)),
        *((2, 3), (2, 2), (2, 1)),
        *((3, 1), (3, 2), (3, 3)),
    ]


def test_repeats_are_rows_of_their_own(tmp_path: Path) -> None:
    processes = Processes()
    climbed = go(tmp_path, processes, repeat=2)
    assert processes.started == ["B2c1", "B4c2", "B4c2", "B2c1"]
    assert sorted((row.rung, row.repeat) for row in climbed.rows) == [
        *(("B2c1@none", 1), ("B2c1@none", 2)),
        *(("B4c2@none", 1), ("B4c2@none", 2)),
    ]
    more = Processes()
    go(tmp_path, more, repeat=3, resume=True)
    assert more.started == ["B2c1", "B4c2"]


def test_f09_what_a_smaller_batch_has_shown_is_not_tried(tmp_path: Path) -> None:
    processes = Processes(B2c1=OOM)
    climbed = go(tmp_path, processes, rungs="B8c1,B4c1,B2c1,B1c1")
    assert processes.started == ["B1c1", "B2c1"]
    assert [row.status for row in climbed.rows[2:]] == ["skipped:dominated_by B2c1@none"] * 2
    assert climbed.rows[3].error == "not started: B2c1@none ran out of memory"
    assert climbed.rows[3].verdict == "inconclusive"


def test_f09_out_of_memory_is_remembered_on_this_device_alone(tmp_path: Path) -> None:
    go(tmp_path, Processes(B4c2=OOM))
    again, elsewhere, asked = Processes(), Processes(), Processes()
    go(tmp_path, again, resume=True)
    assert again.started == []
    go(tmp_path, asked, resume=True, options={"retry": ("oom",)})
    assert asked.started == ["B4c2"]
    go(tmp_path, elsewhere, resume=True, here={"device": "cpu", "torch": "2.14.0"})
    assert elsewhere.started == ["B2c1", "B4c2"]


def test_f52_nothing_is_concluded_along_chunks_modes_or_other_failures(tmp_path: Path) -> None:
    """More chunks need less as a rule, and not always: only the batch is trusted."""
    processes = Processes(B2c1=OOM)
    go(tmp_path, processes, rungs="B2c1,B4c2,B4c4,B4c1@full")
    assert sorted(processes.started) == ["B2c1", "B4c1", "B4c2", "B4c4"]
    for number, status in enumerate(("error:kernel_limit", "oom_suspect", "killed", "timeout")):
        folder = tmp_path / str(number)
        folder.mkdir()
        failed = Processes(B2c1=Outcome(status=status, error="x", events=()))
        go(folder, failed, rungs="B4c1,B2c1")
        assert failed.started == ["B2c1", "B4c1"], status


def test_a_failed_rung_is_not_repeated(tmp_path: Path) -> None:
    processes = Processes(B4c2=FAR_OVER)
    climbed = go(tmp_path, processes, repeat=2)
    assert processes.started == ["B2c1", "B4c2", "B2c1"]
    [skipped] = [row for row in climbed.rows if row.kind == "skipped"]
    assert skipped.error == "not started: B4c2@none, repeat 1 is over the gate with 1.00 GiB"


def test_a_plan_is_rehearsed_by_the_estimate() -> None:
    ladder = ladder_of(rungs="B12c1,B11c1,B2c1")
    attempts = ordered(points(ladder, CPU), lambda point: point.rung.batch * 10 * MIB)
    assert [(one.rung, one.fate) for one in rehearsed(attempts, ladder)] == [
        ("B2c1@none", "climbed"),
        ("B11c1@none", "climbed; over the gate by the estimate"),
        ("B12c1@none", "skipped if B11c1@none is over the gate"),
    ]


def seek(
    real: Callable[[int], int | None], formula: Callable[[int], int], *, gate: int = 100, chunks: int = 1
) -> tuple[list[int], int]:
    """Batches that a search climbs where `real` bytes are measured (None: out of memory) and `formula` was believed,
    and the largest that passed."""
    ladder = ladder_of(rungs=f"B{chunks}c{chunks}", gate=str(gate))
    [first] = points(ladder, CPU)

    def at(batch: int) -> Point:
        return with_batch(ladder, first, batch)

    def predicted(point: Point, limit: int) -> int:
        batches = (batch for batch in range(chunks, 10_000, chunks))
        largest = 0
        for batch in batches:
            if formula(batch) > limit:
                break
            largest = batch
        return largest

    search = largest_batch(first, gate, predicted=predicted, estimated=lambda point: formula(point.rung.batch), at=at)
    climbed, passed = [], 0
    row: RungResult | None = None
    while True:
        try:
            attempt: Attempt = next(search) if row is None else search.send(row)
        except StopIteration:
            return climbed, passed
        batch = attempt.point.rung.batch
        climbed.append(batch)
        peak = real(batch)
        status = "oom" if peak is None else "ok" if peak <= gate else "over_gate"
        row = RungResult(
            rung=str(attempt.point.rung),
            run_id="x",
            status=status,
            source="simulated",
            model="tiny",
            step={"batch": batch},
            peak_allocated_bytes=peak,
            verdict="pass" if status == "ok" else "fail",
        )
        passed = max(passed, batch) if status == "ok" else passed


def test_a_search_with_the_right_formula_takes_two_rungs() -> None:
    assert seek(lambda batch: 10 * batch + 5, lambda batch: 10 * batch + 5) == ([9, 10], 9)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_search_finds_the_largest_batch_of_random_shapes(chunks: int) -> None:
    draw = random.Random(chunks)
    for _ in range(50):
        static, sample = draw.randint(0, 500), draw.randint(1, 60)
        gate = static + sample * draw.randint(chunks, 300) + draw.randint(0, sample - 1)
        off = draw.uniform(0.99, 1.01)

        def real(batch: int, static: int = static, sample: int = sample) -> int:
            return static + sample * batch

        def formula(batch: int, off: float = off) -> int:
            return int(real(batch) * off)

        climbed, passed = seek(real, formula, gate=gate, chunks=chunks)
        assert len(climbed) <= MOST_RUNGS
        assert passed in ((gate - static) // sample // chunks * chunks, max(climbed)), (static, sample, gate, off)


def test_f43_a_formula_that_is_far_off_is_corrected_by_what_was_measured() -> None:
    climbed, passed = seek(lambda batch: 25 * batch, lambda batch: 10 * batch)
    assert climbed == [10, 4, 5] and passed == 4
    climbed, passed = seek(lambda batch: 10 * batch, lambda batch: 25 * batch)
    assert climbed == [4, 10, 11] and passed == 10
    assert seek(lambda batch: None if batch > 3 else 10, lambda batch: 10 * batch)[1] <= 3


def test_a_search_where_nothing_fits_says_so() -> None:
    climbed, passed = seek(lambda batch: 1000, lambda batch: 1000)
    assert (climbed, passed) == ([1], 0)


def test_only_a_smaller_batch_or_an_earlier_repeat_dominates() -> None:
    ladder = ladder_of(rungs="B4c1,B2c1")
    larger, smaller = (Attempt(point=point) for point in points(ladder, CPU))
    values: dict[str, Any] = {"run_id": "x", "source": "measured", "model": "tiny", "step": {}}
    row = RungResult(rung="B", status="oom", **values)
    assert dominating(larger, [(smaller, row)]) is row
    assert dominating(smaller, [(larger, row)]) is None
    assert dominating(larger, [(larger, row)]) is row
