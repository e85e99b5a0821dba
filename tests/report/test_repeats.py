"""Repeats of a rung as one line, and what a reader is told first."""

from rich_rows import failed, ladder, rich
from samples import row_of

from memplan.record import RungResult
from memplan.report.ladder_columns import LEAST_FOR_PERCENTILES, spread_ns
from memplan.report.ladder_table import ladder_table
from memplan.report.render import render
from memplan.report.repeats import repeats_of, worst_first
from memplan.report.verdict import commands, left_out, verdict_of
from memplan.units import GIB


def again(number: int, **values: object) -> RungResult:
    """One more process of the same rung."""
    return row_of(repeat=number, **values)


def test_a_line_is_the_median_of_separate_processes() -> None:
    times = {1: 10**9, 2: 3 * 10**9, 3: 2 * 10**9}
    [rung] = repeats_of([again(number, step_ns=(ns,) * 3) for number, ns in times.items()])
    assert rung.step_ns == 2 * 10**9
    assert rung.samples_per_s == 2.0
    assert [row.repeat for row in rung.rows] == [1, 2, 3]
    [record] = ladder_table(list(rung.rows)).records()
    assert record["repeats"] == 3


def test_repeats_that_end_differently_show_every_status_and_the_worst_verdict_counts() -> None:
    rows = [
        again(1, gate_bytes=GIB, verdict="pass"),
        again(2, gate_bytes=GIB, verdict="pass"),
        again(3, gate_bytes=GIB, verdict="fail", status="oom", peak_allocated_bytes=None),
    ]
    [rung] = repeats_of(rows)
    assert rung.status == "ok ×2, oom ×1"
    assert rung.verdict == "fail ×1, pass ×2"
    assert rung.worst_verdict == "fail"
    assert rung.peak_bytes == rows[0].peak_allocated_bytes  # of those that came to their end
    assert verdict_of([rung]).tone == "bad"
    assert any("1 of 3 repeats" in line for line in left_out([rung], []))


def test_failed_rungs_come_first_and_the_fullest_before_the_emptiest() -> None:
    rungs = worst_first(repeats_of(ladder()))
    assert [rung.row.rung for rung in rungs] == [
        "B12c6@none", "B16c4@none", "B16c8@none", "B8c4@none", "B12c6@full", "B8c4@full", "B6c3@full",
    ]  # fmt: skip


def test_a_verdict_is_never_good_where_nothing_was_measured() -> None:
    assert verdict_of([]).tone == "open"
    died = repeats_of([failed(status="killed", verdict="inconclusive", gate_bytes=None)])
    found = verdict_of(died)
    assert found.tone == "open"
    assert found.sentences[0] == "Nothing was measured: 1 rung ended without a peak (killed 1)."
    assert verdict_of(repeats_of([failed()])).tone == "bad"  # out of memory says something of the rung


def test_a_ladder_without_a_gate_says_so() -> None:
    found = verdict_of(repeats_of([row_of()]))
    assert found.sentences[0] == "1 of 1 rung came to its end (measured); there was no gate to hold."


def test_one_command_runs_all_rungs_of_the_same_options() -> None:
    rows = [row_of(command=f"memplan ladder {rung} --gate 1GiB") for rung in ("B4c2", "B2c1", "B4c2")]
    rows += [row_of(command="memplan ladder B1c1 --gate 2GiB"), row_of(command="other"), row_of()]
    assert commands(rows) == ["memplan ladder B4c2,B2c1 --gate 1GiB", "memplan ladder B1c1 --gate 2GiB", "other"]


def test_fewer_than_five_steps_have_no_percentiles() -> None:
    few, enough = (row_of(step_ns=tuple(range(1, 1 + count))) for count in (LEAST_FOR_PERCENTILES - 1, 6))
    assert spread_ns(few) is None
    low, high = spread_ns(enough) or (0, 0)
    assert low < high
    assert "percentiles of step times: 4 were timed, and fewer than 5 have none" in left_out(repeats_of([few]), [])


def test_the_table_of_a_gpu_has_every_column_and_that_of_a_cpu_hides_them() -> None:
    headers = render(ladder_table(ladder()), "md").split("\n")[0]
    shown = (
        "tokens/s",
        "MFU",
        "HFU",
        "SM clock [MHz]",
        "throttled",
        "failed in",
        "traced",
        "warnings",
    )
    for header in shown:
        assert f"| {header} |" in headers, header
    plain = render(ladder_table([row_of()]), "md").split("\n")[0]
    assert not any(f"| {header} |" in plain for header in shown[1:])


def test_warnings_of_repeats_are_said_once() -> None:
    rows = [rich("B8c4@full", 60, 4.0, repeat=number, warnings=("hot",)) for number in (1, 2)]
    assert [line for line in ladder_table(rows).footer if "hot" in line] == ["B8c4@full: hot"]
