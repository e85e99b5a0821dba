"""The device between two rungs."""

from collections.abc import Sequence
from pathlib import Path

from climbing import Processes, go
from samples import row_of

from memplan.ladder.guard import Guard
from memplan.launch.process import Outcome
from memplan.units import GIB

BROKEN = Outcome(status="error", error="an illegal memory access", events=())


def guard_of(
    *, others: Sequence[str] = (), frees: bool = True, healthy: bool = True, allow_shared: bool = False
) -> Guard:
    used = iter([2 * GIB, 5 * GIB, 5 * GIB, 5 * GIB])
    return Guard(
        used_bytes=lambda: next(used, 5 * GIB),
        foreign=lambda: others,
        settled=lambda before: frees,
        sick=lambda: None if healthy else "error: no kernel image",
        allow_shared=allow_shared,
    )


def test_f28_a_device_that_others_use_is_left_alone(tmp_path: Path) -> None:
    processes = Processes()
    climbed = go(tmp_path, processes, options={"guard": guard_of(others=("python 4711, 3.00 GiB",))})
    assert processes.started == []
    assert [row.status for row in climbed.rows] == ["dirty_device", "dirty_device"]
    assert "python 4711, 3.00 GiB" in str(climbed.rows[0].error) and "--allow-shared" in str(climbed.rows[0].error)
    assert climbed.exit_code == 3
    again = Processes()
    go(tmp_path, again, resume=True, options={"guard": guard_of(others=("python 4711",), allow_shared=True)})
    assert again.started == ["B2c1", "B4c2"]


def test_f27_memory_that_a_rung_leaves_behind_ends_the_climb(tmp_path: Path) -> None:
    processes = Processes()
    climbed = go(tmp_path, processes, options={"guard": guard_of(frees=False)})
    assert processes.started == ["B2c1"]
    assert (
        climbed.stopped
        == "B2c1@none is gone, but its memory is not: 3.00 GiB more than before are in use on the device"
    )
    assert [row.status for row in climbed.rows] == ["ok", "dirty_device"]


def test_f07_two_failed_health_checks_end_the_climb(tmp_path: Path) -> None:
    processes = Processes(B2c1=BROKEN, B4c2=BROKEN, B6c1=BROKEN)
    climbed = go(tmp_path, processes, rungs="B2c1,B4c2,B6c1", options={"guard": guard_of(healthy=False)})
    assert processes.started == ["B2c1", "B4c2"]
    assert climbed.stopped == "the device fails a small product 2 times in a row: error: no kernel image"
    assert [row.status for row in climbed.rows] == ["error", "error", "dirty_device"]


def test_f07_a_failed_rung_on_a_healthy_device_is_its_own_affair(tmp_path: Path) -> None:
    processes = Processes(B2c1=BROKEN)
    climbed = go(tmp_path, processes, options={"guard": guard_of()})
    assert processes.started == ["B2c1", "B4c2"]
    assert climbed.stopped == ""


def test_what_ran_well_needs_no_health_check() -> None:
    def never() -> str | None:
        raise AssertionError

    guard = Guard(used_bytes=lambda: None, foreign=lambda: (), settled=lambda before: True, sick=never)
    assert guard.before() == ""
    assert guard.after(row_of()) == ""
