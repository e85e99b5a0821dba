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


Bytes = Callable[[int], int | None]


def seek(
    real: Bytes, formula: Bytes, traced: Bytes = lambda batch: None, *, gate: int = 100, chunks: int = 1, first: int = 0
) -> tuple[list[int], int]:
    """Batches that a search climbs where `real` bytes are measured (None: out of memory), `formula` and `traced` were
    believed, and `first` was the formulas' largest; and the largest that passed."""
    ladder = ladder_of(rungs=f"B{chunks}c{chunks}", gate=str(gate))
    [start] = points(ladder, CPU)

    def at(batch: int) -> Point:
        return with_batch(ladder, start, batch)

    search = largest_batch(
        gate,
        first=start,
        predicted=first or max((batch for batch in range(0, 2000, chunks) if (formula(batch) or 0) <= gate), default=0),
        estimated=lambda point: formula(point.rung.batch),
        traced=lambda point: traced(point.rung.batch),
        at=at,
    )
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
            source="measured",
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
    """Whatever the formulas leave out, what a sample adds they know, and the first peak tells the rest."""
    draw = random.Random(chunks)
    for _ in range(50):
        static, sample, left_out = draw.randint(0, 500), draw.randint(1, 60), draw.randint(-100, 200)
        gate = static + left_out + sample * draw.randint(chunks, 300) + draw.randint(0, sample - 1)

        def formula(batch: int, static: int = static, sample: int = sample) -> int:
            return static + sample * batch

        def real(batch: int, more: int = left_out, of: Callable[[int], int] = formula) -> int:
            return of(batch) + more

        climbed, passed = seek(real, formula, gate=gate, chunks=chunks)
        assert len(climbed) <= MOST_RUNGS
        assert passed == (gate - static - left_out) // sample // chunks * chunks, (climbed, static, sample, gate)
        climbed, found = seek(real, formula, traced=real, gate=gate, chunks=chunks)
        assert found == passed and len(climbed) == 2, "the trace knows what the formulas leave out"


def test_f43_a_formula_that_is_far_off_is_corrected_by_what_was_measured() -> None:
    climbed, passed = seek(lambda batch: 10 * batch + 60, lambda batch: 10 * batch)
    assert (climbed, passed) == ([10, 4, 5], 4)
    climbed, passed = seek(lambda batch: 10 * batch - 60, lambda batch: 10 * batch)
    assert (climbed, passed) == ([10, 16, 17], 16)
    climbed, passed = seek(lambda batch: 25 * batch, lambda batch: 10 * batch)
    assert len(climbed) == MOST_RUNGS and passed <= 4, "what was not measured is not said to pass"


def test_out_of_memory_without_a_number_goes_halfway_back() -> None:
    assert seek(lambda batch: None if batch > 3 else 10, lambda batch: 10 * batch) == ([10, 5, 2], 2)


def test_a_search_where_nothing_fits_says_so() -> None:
    assert seek(lambda batch: 1000, lambda batch: 1000 + batch) == ([1], 0)


def test_only_a_smaller_batch_or_an_earlier_repeat_dominates() -> None:
    ladder = ladder_of(rungs="B4c1,B2c1")
    larger, smaller = (Attempt(point=point) for point in points(ladder, CPU))
    values: dict[str, Any] = {"run_id": "x", "source": "measured", "model": "tiny", "step": {}}
    row = RungResult(rung="B", status="oom", **values)
    assert dominating(larger, [(smaller, row)]) is row
    assert dominating(smaller, [(larger, row)]) is None
    assert dominating(larger, [(larger, row)]) is row
