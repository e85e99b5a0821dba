"""Two results side by side: what each label takes, and that nothing is green by accident."""

import itertools
import time
from typing import Any

import pytest
from compared import EMPTY, one, repeated
from samples import row_of

from memplan.analysis.compare import compare
from memplan.analysis.comparison import LABELS
from memplan.analysis.verdict import notes, verdict
from memplan.record import RungResult
from memplan.report.compare_table import compare_table
from memplan.units import MIB


def test_the_same_rows_are_the_same() -> None:
    found = compare([row_of()], [row_of()])
    assert one(found).label == "same"
    assert one(found, "status").label == "same"
    assert found.exit_code == 0
    assert found.num_compared == 1
    assert verdict(found) == "Nothing is worse in 1 rung."


@pytest.mark.parametrize(
    ("before", "after", "label"),
    [
        ("ok", "oom", "broke"),
        ("ok", "over_gate", "broke"),
        ("ok", "thrash", "broke"),
        ("ok", "timeout", "broke"),
        ("ok", "error:kernel_limit", "broke"),
        ("oom", "ok", "fixed"),
        ("oom", "oom", "same"),
        ("oom", "numerics_fail", "ambiguous"),
        ("ok", "skipped:dominated_by B8c4@none", "insufficient"),
        ("ok", "dirty_device", "insufficient"),
        ("skipped:dominated_by B8c4@none", "ok", "new"),
    ],
)
def test_what_became_of_a_rung(before: str, after: str, label: str) -> None:
    other = row_of(run_id="b" * 12, rung="B2c1@none")
    found = compare([row_of(status=before), other], [row_of(status=after), other])
    assert one(found, "status", "B4c2@none").label == label
    assert found.exit_code == (label in ("broke", "insufficient")), "a rung that nobody tried is covered by nothing"


def test_a_rung_that_failed_before_and_is_not_tried_again_has_lost_nothing() -> None:
    other = row_of(run_id="b" * 12, rung="B2c1@none")
    found = compare([row_of(status="oom"), other], [row_of(status="skipped:dominated_by B8c4@none"), other])
    assert found.exit_code == 0


def test_one_repeat_that_fails_breaks_the_rung() -> None:
    base = [row_of(repeat=number) for number in (1, 2, 3)]
    new = [row_of(repeat=1), row_of(repeat=2, status="oom", error="out of memory"), row_of(repeat=3)]
    found = one(compare(base, new), "status")
    assert (found.label, found.new, found.why) == ("broke", "oom (1 of 3)", "out of memory")


def test_another_gate_is_no_regression() -> None:
    base = row_of(status="ok", gate_bytes=200 * MIB)
    new = row_of(status="over_gate", gate_bytes=50 * MIB)
    found = compare([base], [new])
    assert one(found, "status").label == "same"
    assert "another gate" in one(found, "status").why
    assert compare([base], [row_of(status="over_gate", gate_bytes=200 * MIB)]).exit_code == 1


def test_f38_an_improvement_makes_the_base_stale_and_fails_only_when_strict() -> None:
    found = compare([row_of()], [row_of(peak_allocated_bytes=60 * MIB)])
    assert one(found).label == "better"
    assert found.is_stale
    assert found.exit_code == 0
    assert any("The base is stale" in line for line in notes(found))
    assert compare([row_of()], [row_of(peak_allocated_bytes=60 * MIB)], strict=True).exit_code == 1
    assert not compare([row_of()], [row_of()]).is_stale


@pytest.mark.parametrize(
    ("base", "new", "said"),
    [
        ([], [row_of()], "BASE has no row"),
        ([row_of()], [], "NEW has no row"),
        (
            [row_of()],
            [row_of(status="error", peak_allocated_bytes=None)],
            "NEW measured nothing: its row ended with error.",
        ),
        ([row_of(status="killed")], [row_of()], "BASE measured nothing"),
        ([row_of()], [EMPTY], "NEW measured nothing: its row ended with ok and without a number."),
        ([EMPTY], [row_of()], "BASE measured nothing"),
        ([EMPTY], [EMPTY], "BASE measured nothing"),
    ],
)
def test_f40_nothing_measured_is_never_green(base: list[RungResult], new: list[RungResult], said: str) -> None:
    for allow_missing, strict in itertools.product((False, True), repeat=2):
        found = compare(
            base, new, base_name="BASE", new_name="NEW", allow_missing=allow_missing, strict=strict
        )  # fmt: skip
        assert found.exit_code == 3
        assert said in verdict(found)


def test_f40_a_rung_without_a_number_beside_others_with_one_is_covered_by_nothing() -> None:
    other = row_of(run_id="b" * 12, rung="B2c1@none")
    lost = compare([row_of(), other], [EMPTY, other])
    assert (one(lost, "status", "B4c2@none").label, lost.exit_code) == ("missing", 1)
    assert one(lost, "status", "B4c2@none").why == "neither a peak nor a time now, though it came to its end"
    for new in (row_of(), EMPTY):
        found = compare([EMPTY, other], [new, other])
        assert (one(found, "status", "B4c2@none").label, found.exit_code) == ("incomparable", 1)
    timed = repeated([1.0, 1.0, 1.0], peak_allocated_bytes=None)
    unpeaked = compare(repeated([1.0, 1.0, 1.0]), timed)
    assert (one(unpeaked).label, one(unpeaked, "step_ns").label, unpeaked.exit_code) == ("missing", "same", 1)
    assert compare(timed, timed).exit_code == 0, "times alone are a measurement"


def test_two_results_without_a_rung_in_common_are_not_comparable() -> None:
    found = compare([row_of()], [row_of(run_id="b" * 12, rung="B2c1@none")])
    assert found.exit_code == 4
    assert verdict(found) == "Not comparable: the two have no rung in common."


def test_f40_a_rung_that_is_gone_fails_unless_it_may_be() -> None:
    gone = row_of(run_id="b" * 12, rung="B2c1@none")
    found = compare([row_of(), gone], [row_of()])
    assert one(found, "status", "B2c1@none").label == "missing"
    assert found.uncovered == ("B2c1@none",)
    assert found.exit_code == 1
    assert verdict(found) == "1 of 2 rungs is held against nothing: B2c1@none."
    allowed = compare([row_of(), gone], [row_of()], allow_missing=True)
    assert allowed.exit_code == 0
    assert any("Missing (allowed): B2c1@none" in line for line in notes(allowed))
    added = compare([row_of()], [row_of(), gone])
    assert one(added, "status", "B2c1@none").label == "new"
    assert added.exit_code == 0


def test_what_is_the_same_by_a_floor_alone_says_so() -> None:
    found = one(compare([row_of()], [row_of(peak_allocated_bytes=102 * MIB)]))
    assert (found.label, found.why) == ("same", "a change of up to 2.00 MiB is none")
    assert one(compare([row_of()], [row_of(peak_allocated_bytes=100 * MIB + 5)])).why == ""
    times = one(compare(repeated([0.002] * 5), repeated([0.0023] * 5)), "step_ns")
    assert (times.label, times.why) == ("same", "5 processes before, 5 now; a change of up to 500.00 us is none")


def test_what_is_ambiguous_says_what_it_hides() -> None:
    found = one(compare(repeated([1.0, 0.6, 1.4, 0.9, 1.2]), repeated([1.1, 0.7, 1.5, 0.95, 1.3])), "step_ns")
    low, high = found.interval or (0.0, 0.0)
    said = f"the change lies between {100 * low:+.1f} % and {100 * high:+.1f} %: one of 5.0 % cannot be told"
    assert found.label == "ambiguous" and said in found.why


def test_a_rung_over_its_gate_came_to_its_end() -> None:
    found = compare([row_of()], [row_of(status="over_gate")])
    assert verdict(found) == "1 of 1 rung is over the gate now: B4c2@none ok before, over_gate now."


def test_what_is_ambiguous_asks_for_more_repeats_of_just_those_rungs(tmp_path: Any) -> None:
    command = "memplan ladder {} --model tiny --seq 64 --repeat 3 --device cpu"
    wild = {name: command.format(name) for name in ("B4c2@none", "B2c1@none")}
    sides = [
        [
            row
            for number, (name, typed) in enumerate(wild.items())
            for row in repeated(times, rung=name, run_id=str(number) * 12, command=typed)
        ]
        + repeated([1.0, 1.0, 1.0], rung="B1c1@none", run_id="c" * 12, command=command.format("B1c1@none"))
        for times in ([1.0, 1.3, 0.8], [1.1, 0.9, 1.2])
    ]
    base, new = tmp_path / "the base", tmp_path / "new"
    new.mkdir()
    found = compare(*sides, base_name=str(base), new_name=str(new))
    options = "--model tiny --seq 64 --device cpu --repeat 7"
    assert found.commands == (
        f"memplan ladder B4c2@none,B2c1@none {options} --resume  # base, on commit abc1234",
        f"memplan ladder B4c2@none,B2c1@none {options} --out {new} --resume  # new",
    )
    (once,) = compare(*sides, base_name="base.jsonl", new_name="new.jsonl").commands
    assert once == f"memplan ladder B4c2@none,B2c1@none {options} --resume  # base, on commit abc1234 and new"
    (said,) = (line for line in notes(found) if "AMBIGUOUS" in line)
    assert "B4c2@none" in said and "B2c1@none" in said and "B1c1" not in said


def test_sides_that_were_timed_apart_are_said_to_be() -> None:
    base = [
        RungResult.from_dict(row.to_dict() | {"started_at": f"2026-11-01T10:0{row.repeat}:00+00:00"})
        for row in repeated([1.0, 1.01, 1.02])
    ]
    new = [
        RungResult.from_dict(row.to_dict() | {"started_at": f"2026-11-01T11:0{row.repeat}:00+00:00"})
        for row in repeated([1.3, 1.31, 1.32])
    ]
    assert any("by turns" in line for line in compare(base, new).warnings)
    turns = [RungResult.from_dict(row.to_dict() | {"started_at": base[0].started_at}) for row in new]
    assert not compare(base, turns).warnings


def test_the_worst_comes_first_and_every_label_has_its_place() -> None:
    rows = {
        "worse": (row_of(), row_of(peak_allocated_bytes=200 * MIB)),
        "broke": (row_of(), row_of(status="oom")),
        "better": (row_of(), row_of(peak_allocated_bytes=50 * MIB)),
        "missing": (row_of(), None),
        "new": (None, row_of()),
    }
    sides: tuple[list[RungResult], list[RungResult]] = ([], [])
    for number, pair in enumerate(rows.values()):
        for side, row in zip(sides, pair, strict=True):
            if row is not None:
                named = {"run_id": str(number) * 12, "rung": f"B{number + 1}c1@none"}
                side.append(RungResult.from_dict(row.to_dict() | named))
    found = compare(*sides)
    ranks = [LABELS.index(finding.label) for finding in found.counted]
    assert ranks == sorted(ranks)
    assert {finding.label for finding in found.counted} >= rows.keys()
    assert found.exit_code == 1
    assert verdict(found).startswith(
        "1 of 5 rungs does not come to its end any more: B2c1@none ok before, oom now; 1 of"
    )


def test_comparing_turned_around_turns_the_labels_around() -> None:
    turned = {"worse": "better", "better": "worse", "broke": "fixed", "fixed": "broke"}
    died = {"run_id": "b" * 12, "rung": "B2c1@none"}
    base = [row_of(), row_of(status="oom", **died)]
    new = [row_of(peak_allocated_bytes=150 * MIB), row_of(**died)]
    there, back = compare(base, new), compare(new, base)
    labels = {(finding.name, finding.metric): finding.label for finding in there.counted}
    for finding in back.counted:
        label = labels[finding.name, finding.metric]
        assert finding.label == turned.get(label, label)
    assert {"worse", "fixed", "same"} <= set(labels.values())


def test_many_rungs_take_time_in_proportion() -> None:
    def sides(count: int) -> list[list[RungResult]]:
        return [
            [row_of(rung=f"B{number}c1@none", run_id=f"{side}{number}") for number in range(1, count)] for side in "ab"
        ]

    def seconds(count: int) -> float:
        rows = sides(count)
        start = time.process_time()
        compare_table(compare(*rows))
        return time.process_time() - start

    few, many = (min(seconds(count) for _ in range(3)) for count in (300, 1200))
    assert many < 10 * few + 0.05, "16 times as long where every row looks at every other"
