"""The last sentence of a climb: only what was measured and passed, and why."""

from typing import Any

from samples import row_of

from memplan.analysis import brackets, recommend
from memplan.record import RungResult
from memplan.units import GIB


def rung(name: str, seconds: float, peak: int, **values: Any) -> RungResult:
    batch, _, ckpt = name.removeprefix("B").partition("c1@")
    step = {"batch": int(batch), "chunks": 1, "ckpt": ckpt, "seq": 64, "loss": "full", "precision": "fp32"}
    known: dict[str, Any] = {"verdict": "pass", "gate_bytes": 70 * GIB, "step_ns": (int(seconds * 10**9),) * 3}
    return row_of(rung=name, run_id=name, step=step, peak_allocated_bytes=peak * GIB, **known | values)


def test_the_fastest_that_passed_with_the_next_and_the_headroom() -> None:
    rows = [
        rung("B8c1@full", 2, 40),
        rung("B4c1@none", 0.8, 60),
        rung("B8c1@none", 1, 80, verdict="fail", status="over_gate"),
    ]
    found = recommend(rows)
    assert found is not None and found.row is rows[1]
    assert found.sentence == (
        "use B4c1@none: 5 samples/s, 25.00 % faster than the next, B8c1@full (one process each; --repeat 5 "
        "tells speed from noise), peak 60.00 GiB, 10.00 GiB under the gate"
    )


def test_of_equals_the_one_that_needs_less() -> None:
    rows = [rung("B4c1@none", 1, 60), rung("B4c1@full", 1.005, 40)]
    found = recommend(rows)
    assert found is not None
    assert found.sentence.startswith("use B4c1@full: 3.98 samples/s, as fast as B4c1@none with 20.00 GiB less memory")


def test_steps_that_overlap_tell_nothing_apart() -> None:
    noisy = rung("B4c1@none", 0.8, 60, step_ns=(6 * 10**8, 8 * 10**8, 11 * 10**8))
    found = recommend([noisy, rung("B4c1@full", 1, 40)])
    assert found is not None
    assert "not told apart from the next, B4c1@full, by so few steps (--repeat 5 tells more)" in found.sentence


def test_what_to_know_stands_in_the_sentence_too() -> None:
    found = recommend([rung("B4c1@none", 1, 60, warnings=("4.00 MiB more stay alive after each step",))])
    assert found is not None
    assert found.sentence.endswith("10.00 GiB under the gate, but beware: 4.00 MiB more stay alive after each step")


def test_repeats_count_by_their_median_and_all_must_pass() -> None:
    slow = [rung("B4c1@none", seconds, 60, repeat=number) for number, seconds in enumerate((1, 1, 9), 1)]
    found = recommend([*slow, rung("B4c1@full", 2, 40)])
    assert found is not None and found.row.rung == "B4c1@none"
    failed = rung("B4c1@none", 1, 80, repeat=4, verdict="fail", status="over_gate")
    found = recommend([*slow, failed, rung("B4c1@full", 2, 40)])
    assert found is not None and found.row.rung == "B4c1@full"


def test_f17_nothing_is_recommended_that_was_not_measured() -> None:
    assert recommend([rung("B4c1@none", 1, 60, source="simulated")]) is None
    assert recommend([rung("B4c1@none", 1, 60, step_ns=())]) is None
    assert recommend([rung("B4c1@none", 1, 80, verdict="fail", status="over_gate")]) is None
    assert recommend([rung("B4c1@none", 1, 60, status="thrash", verdict="fail")]) is None


def test_a_rung_that_passed_by_its_trace_alone_makes_no_measured_one_the_only_one_that_passed() -> None:
    found = recommend([rung("B4c1@none", 1, 60), rung("B4c1@full", 1, 40, source="simulated")])
    assert found is not None and ", the only measured rung that passed, " in found.sentence


def test_f17_a_search_says_what_it_tried_on_both_sides() -> None:
    passed, failed = rung("B8c1@none", 1, 60), rung("B9c1@none", 1, 71, verdict="fail", status="over_gate")
    assert brackets([passed, failed]) == ("B8c1@none is the largest that passes; B9c1@none does not",)
    far = rung("B12c1@none", 1, 71, verdict="fail", status="oom")
    assert brackets([passed, far]) == ("B8c1@none passes and B12c1@none does not; what lies between was not tried",)
    assert brackets([passed]) == ("B8c1@none passes; a larger batch was not tried",)
    assert brackets([failed]) == ("@none: no batch passed; B9c1@none is too large",)


def test_f18_the_headroom_stands_beside_the_recommendation() -> None:
    """Training fragments and meets longer samples; what is left under the gate is said."""
    found = recommend([rung("B4c1@none", 1, 69)])
    assert found is not None and found.sentence.endswith("peak 69.00 GiB, 1.00 GiB under the gate")
