"""The trend of a rung: what comes first, and where a step is marked."""

from pathlib import Path
from typing import Any

import pytest
from samples import row_of

from memplan.analysis.history import Climbed, history
from memplan.record import RungResult
from memplan.units import MIB


def climbed(day: int | None, *rows: RungResult, name: str = "") -> Climbed:
    """A result of a day in November, its commit named after it."""
    dated = [
        RungResult.from_dict(
            row.to_dict()
            | {"started_at": day and f"2026-11-{day:02}T10:00:00+00:00"}
            | {"environment": row.environment | {"commit": f"c{day}"}}
        )
        for row in rows
    ]
    return Climbed(path=Path(name or f"reports/{day}"), rows=tuple(dated))


def peaks(*sizes: int) -> list[Climbed]:
    return [climbed(day, row_of(peak_allocated_bytes=size * MIB)) for day, size in enumerate(sizes, 1)]


def test_each_moment_is_held_against_the_one_before() -> None:
    moments = history(peaks(100, 101, 130, 130, 90))
    assert [(moment.peak_change_bytes or 0) // MIB for moment in moments] == [0, 1, 29, 0, -40]
    assert [moment.marks for moment in moments] == [(), (), ("memory worse",), (), ("memory better",)]
    assert [moment.commit for moment in moments] == ["c1", "c2", "c3", "c4", "c5"]


def test_a_creep_of_small_changes_is_a_step_once_it_is_beyond_the_tolerance() -> None:
    moments = history(peaks(100, 101, 102, 103, 104, 105, 106))
    assert [moment.marks for moment in moments] == [(), (), (), ("memory worse",), (), (), ("memory worse",)]
    assert [(moment.peak_change_bytes or 0) // MIB for moment in moments] == [0, 1, 1, 1, 1, 1, 1]


def test_they_come_by_when_they_began_whatever_the_order_of_the_folders() -> None:
    shuffled = [peaks(100, 101, 130)[place] for place in (2, 0, 1)]
    assert [moment.at[8:10] for moment in history(shuffled)] == ["01", "02", "03"]


def test_a_zone_of_the_clock_does_not_move_a_moment() -> None:
    late = climbed(None, row_of(started_at="2026-11-02T01:00:00+05:00"))  # the 1st, 20:00 in UTC
    early = climbed(1, row_of())
    moments = history([Climbed(path=late.path, rows=(row_of(started_at="2026-11-02T01:00:00+05:00"),)), early])
    assert [moment.at for moment in moments] == ["2026-11-01T10:00:00+00:00", "2026-11-01T20:00:00+00:00"]


def test_rows_that_do_not_say_when_stay_behind_what_they_were_given_after() -> None:
    undated = [climbed(None, row_of(), name=name) for name in "ba"]
    moments = history([climbed(3, row_of()), climbed(1, row_of()), *undated, climbed(2, row_of())])
    assert [str(moment.path) for moment in moments] == ["reports/1", "b", "a", "reports/2", "reports/3"]
    assert [moment.at for moment in moments[1:3]] == ["unknown", "unknown"]
    assert [moment.place for moment in moments] == [0, 1, 2, 3, 4]


def test_a_rung_that_was_left_out_once_goes_on_from_its_last_moment() -> None:
    other = {"run_id": "b" * 12, "rung": "B2c1@none"}
    moments = history([
        climbed(1, row_of(), row_of(**other)),
        climbed(2, row_of(**other)),
        climbed(3, row_of(peak_allocated_bytes=150 * MIB), row_of(**other)),
    ])  # fmt: skip
    line = [moment for moment in moments if moment.run_id == "a" * 12]
    assert [moment.marks for moment in line] == [(), ("memory worse",)]


@pytest.mark.parametrize(
    ("values", "mark"),
    [({"status": "oom", "peak_allocated_bytes": None}, "broke"), ({"status": "over_gate"}, "broke")],
)
def test_a_rung_that_broke_and_was_fixed_is_marked(values: dict[str, Any], mark: str) -> None:
    moments = history([climbed(1, row_of()), climbed(2, row_of(**values)), climbed(3, row_of())])
    assert [moment.marks for moment in moments] == [(), (mark,), ("fixed",)]


def test_f35_times_are_a_step_in_the_trend_only_over_processes() -> None:
    def timed(day: int, *times: float) -> Climbed:
        rows = [row_of(repeat=number, step_ns=(int(time * 10**9),) * 50) for number, time in enumerate(times, 1)]
        return climbed(day, *rows)

    alone = history([timed(1, 1.0), timed(2, 1.5)])
    assert alone[1].step_change == pytest.approx(0.5)
    assert alone[1].marks == ()
    repeated = history([timed(1, 1.0, 1.01, 1.02), timed(2, 1.5, 1.51, 1.52)])
    assert repeated[1].marks == ("speed worse",)
    assert repeated[1].num_processes == 3


def test_f37_a_moment_on_another_machine_is_no_step() -> None:
    moved = row_of(peak_allocated_bytes=150 * MIB, environment={"torch": "2.14.0", "cpu": "Abacus", "device": "cpu"})
    moments = history([climbed(1, row_of()), climbed(2, moved)])
    assert moments[1].marks == ("elsewhere: torch 2.13.0 before, 2.14.0 now",)


def test_f37_a_step_is_marked_though_another_machine_came_in_between() -> None:
    away = row_of(environment={"torch": "2.14.0", "cpu": "Abacus", "device": "cpu"})
    moments = history([climbed(1, row_of()), climbed(2, away), climbed(3, row_of(status="oom"))])
    assert moments[2].marks == ("elsewhere: torch 2.14.0 before, 2.13.0 now", "broke")
