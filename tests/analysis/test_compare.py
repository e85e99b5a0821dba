"""Two results side by side: what each label takes, and that nothing is green by accident."""

import itertools
import time
from typing import Any

import pytest
from samples import row_of

from memplan.analysis.compare import Tolerance, compare
from memplan.analysis.comparison import LABELS, Comparison, Finding
from memplan.analysis.verdict import notes, verdict
from memplan.record import RungResult, WindowPeak
from memplan.report.compare_table import compare_table
from memplan.units import MIB

PARTS = {"params": 40 * MIB, "activations": 50 * MIB, "temps": 10 * MIB}
H100 = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 85899345920, "torch": "2.13.0+cu130",
        "driver": "580.1", "cuda": "13.0", "commit": "abc1234", "power_limit_w": 700.0}  # fmt: skip


EMPTY = row_of(peak_allocated_bytes=None, step_ns=())
"""Came to its end, as it says, and has no number."""


def one(found: Comparison, metric: str = "peak_allocated_bytes", name: str | None = None) -> Finding:
    """The finding of a metric, of one rung where there are several."""
    (finding,) = (one for one in found.findings if one.metric == metric and name in (None, one.name))
    return finding


def repeated(times_s: list[float], **values: Any) -> list[RungResult]:
    """A process for each median time."""
    return [row_of(repeat=number, step_ns=(int(time * 10**9),) * 5, **values) for number, time in enumerate(times_s, 1)]


def test_the_same_rows_are_the_same() -> None:
    found = compare([row_of()], [row_of()])
    assert one(found).label == "same"
    assert one(found, "status").label == "same"
    assert found.exit_code == 0
    assert found.num_compared == 1
    assert verdict(found) == "Nothing is worse in 1 rung."


@pytest.mark.parametrize(
    ("base", "new", "label"),
    [
        (100 * MIB, 102 * MIB, "same"),
        (100 * MIB, 102 * MIB + 1, "worse"),
        (100 * MIB, 98 * MIB, "same"),
        (100 * MIB, 98 * MIB - 1, "better"),
        (10_000 * MIB, 10_010 * MIB, "same"),
        (10_000 * MIB, 10_010 * MIB + 1, "worse"),
        (4000 * MIB, 4200 * MIB, "worse"),
    ],
)
def test_memory_is_exact_within_a_thousandth_or_two_mib(base: int, new: int, label: str) -> None:
    found = compare([row_of(peak_allocated_bytes=base)], [row_of(peak_allocated_bytes=new)])
    assert one(found).label == label
    assert found.exit_code == (label == "worse")


def test_a_worse_peak_names_the_category_that_grew() -> None:
    grown = PARTS | {"activations": 62 * MIB, "temps": 9 * MIB}
    found = compare(
        [row_of(breakdown=PARTS)], [row_of(breakdown=grown, peak_allocated_bytes=sum(grown.values()))]
    )  # fmt: skip
    assert one(found).why == "activations grew by 12.00 MiB"
    assert verdict(found) == "1 of 1 rung needs more memory: B4c2@none +11.00 MiB in activations."
    assert one(found, "category:activations").label == "worse"
    assert not one(found, "category:activations").counts


def test_without_categories_the_phase_is_named_and_a_peak_that_moved_says_so() -> None:
    phases = {"forward": 60 * MIB, "loss": 90 * MIB, "backward": 100 * MIB}
    moved = phases | {"loss": 120 * MIB}
    found = compare(
        [row_of(phase_peaks=phases)], [row_of(phase_peaks=moved, peak_allocated_bytes=120 * MIB)]
    )  # fmt: skip
    assert one(found).why == "by phase: loss grew by 30.00 MiB"
    assert one(found, "phase:loss").label == "worse"
    with_parts = compare(
        [row_of(phase_peaks=phases, breakdown=PARTS)],
        [row_of(phase_peaks=moved, breakdown=PARTS | {"logits": 20 * MIB}, peak_allocated_bytes=120 * MIB)],
    )
    assert one(with_parts).why == "logits grew by 20.00 MiB, and the peak moved from backward to loss"


def test_a_phase_or_category_that_grew_below_the_peak_is_no_verdict() -> None:
    found = compare(
        [row_of(phase_peaks={"forward": 60 * MIB, "backward": 100 * MIB})],
        [row_of(phase_peaks={"forward": 90 * MIB, "backward": 100 * MIB})],
    )
    assert one(found, "phase:forward").label == "moved"
    assert found.exit_code == 0
    shifted = PARTS | {"activations": 60 * MIB, "temps": 0}
    turned = compare([row_of(breakdown=PARTS)], [row_of(breakdown=shifted)])
    assert one(turned, "category:activations").label == one(turned, "category:temps").label == "moved"
    assert verdict(turned) == "Nothing is worse in 1 rung."


def test_what_is_left_between_two_steps_is_a_leak() -> None:
    between = {"params": 40 * MIB, "optimizer": 80 * MIB}
    found = compare(
        [row_of(between_steps=between)], [row_of(between_steps=between | {"activations": 12 * MIB})]
    )  # fmt: skip
    assert one(found, "between_steps_bytes").label == "worse"
    assert one(found, "between_steps_bytes").why == "activations grew by 12.00 MiB"
    assert found.exit_code == 1
    assert "leaves more behind between two steps: B4c2@none +12.00 MiB in activations" in verdict(found)


def test_a_peak_that_rests_on_a_leak_names_what_is_left_between_steps() -> None:
    """At the peak of the next step a forgotten activation is no activation any more, but something else that lives."""
    between = {"params": 40 * MIB}
    base = row_of(breakdown=PARTS | {"other": 0}, between_steps=between)
    leaking = between | {"activations": 12 * MIB}
    new = row_of(
        breakdown=PARTS | {"other": 12 * MIB}, between_steps=leaking, peak_allocated_bytes=112 * MIB
    )  # fmt: skip
    found = compare([base], [new])
    assert one(found).why == "other grew by 12.00 MiB; between two steps activations grew by 12.00 MiB"
    assert one(found, "category:other").label == "worse"
    assert verdict(found) == (
        "1 of 1 rung needs more memory: B4c2@none +12.00 MiB in other (activations left from the step before)."
    )
    same = row_of(breakdown=PARTS | {"activations": 62 * MIB}, between_steps=leaking, peak_allocated_bytes=112 * MIB)
    assert verdict(compare([row_of(breakdown=PARTS, between_steps=between)], [same])) == (
        "1 of 1 rung needs more memory: B4c2@none +12.00 MiB in activations (left from the step before)."
    )


def test_the_sentence_tells_the_change_of_the_peak_and_names_other_bytes() -> None:
    def simulated(reserved: int, **peak: int) -> RungResult:
        return row_of(source="simulated", peak_reserved_bytes=reserved * MIB, step_ns=(), **peak)

    reserved = compare([simulated(200)], [simulated(300)])
    assert verdict(reserved) == "1 of 1 rung needs more memory: B4c2@none +100.00 MiB reserved."
    both = compare([simulated(200)], [simulated(300, peak_allocated_bytes=110 * MIB)])
    assert verdict(both) == "1 of 1 rung needs more memory: B4c2@none +10.00 MiB."


def test_without_categories_a_leak_is_read_from_the_counters() -> None:
    sides = [
        [row_of(windows={"measured": WindowPeak(allocated_bytes=100 * MIB, live_bytes=live * MIB)})]
        for live in (40, 52)
    ]
    assert one(compare(*sides), "between_steps_bytes").label == "worse"


def test_of_several_repeats_the_largest_peak_counts() -> None:
    base = [row_of(repeat=number, peak_allocated_bytes=size * MIB) for number, size in ((1, 90), (2, 100))]
    new = [row_of(repeat=number, peak_allocated_bytes=size * MIB) for number, size in ((1, 95), (2, 99))]
    assert one(compare(base, new)).label == "same"
    assert (one(compare(base, new)).base, one(compare(base, new)).new) == (100 * MIB, 99 * MIB)


@pytest.mark.parametrize(
    ("more", "gate_on", "source", "label", "exit_code"),
    [
        (50, "allocated", "measured", "same", 0),
        (300, "allocated", "measured", "moved", 0),
        (300, "reserved", "measured", "worse", 1),
        (50, "reserved", "measured", "same", 0),
        (50, "allocated", "simulated", "worse", 1),
    ],
)
def test_reserved_bytes_have_a_wider_tolerance_and_count_where_they_are_gated_or_replayed(
    more: int, gate_on: str, source: str, label: str, exit_code: int
) -> None:
    sides = [
        [row_of(peak_reserved_bytes=size * MIB, gate_on=gate_on, source=source)] for size in (1000, 1000 + more)
    ]  # fmt: skip
    found = compare(*sides)
    assert one(found, "peak_reserved_bytes").label == label
    assert found.exit_code == exit_code


def test_a_simulated_ladder_is_compared_without_a_gpu_and_what_does_not_fit_too() -> None:
    base = row_of(source="simulated", status="oom", traced_bytes=100 * MIB, step_ns=(), error="needs 100 MiB")
    new = row_of(source="simulated", status="oom", traced_bytes=130 * MIB, peak_allocated_bytes=130 * MIB, step_ns=())
    found = compare([base], [new])
    assert one(found).label == "worse"
    assert found.exit_code == 1
    assert not [finding for finding in found.findings if finding.metric in ("step_ns", "traced_bytes")]


def test_a_prediction_counts_where_there_is_nothing_else() -> None:
    died = {"status": "oom", "peak_allocated_bytes": None}
    sides = [[row_of(estimated_bytes=size * MIB, **died)] for size in (100, 130)]
    assert one(compare(*sides), "estimated_bytes").counts
    assert compare(*sides).exit_code == 1
    beside = [[row_of(estimated_bytes=size * MIB)] for size in (100, 130)]
    assert not one(compare(*beside), "estimated_bytes").counts
    assert compare(*beside).exit_code == 0
    said = "Predicted memory grew, which is no verdict beside what was measured: B4c2@none +30.00 MiB estimated."
    assert said in notes(compare(*beside))


def test_a_prediction_that_moves_is_a_verdict_where_nothing_ran() -> None:
    sides = [[row_of(source="simulated", step_ns=(), estimated_bytes=size * MIB)] for size in (100, 130)]
    assert compare(*sides).exit_code == 1
    assert verdict(compare(*sides)) == "1 of 1 rung needs more memory: B4c2@none +30.00 MiB estimated."
    assert compare(*reversed(sides)).exit_code == 0


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


def test_times_of_one_process_are_never_a_verdict() -> None:
    found = compare([row_of(step_ns=(10**9,) * 100)], [row_of(step_ns=(2 * 10**9,) * 100)])
    assert one(found, "step_ns").label == "insufficient"
    assert "1 process before, 1 now: times need 3 a side" in one(found, "step_ns").why
    assert found.exit_code == 0
    assert "Not judged for want of numbers: B4c2@none." in notes(found)


def test_f35_steps_of_one_process_that_agree_do_not_stand_for_processes() -> None:
    """Within 0.1 % inside each process, 26 % between them: identical code on a shared machine."""
    base = repeated([1.00, 1.26, 1.10, 0.98, 1.20])
    new = repeated([1.22, 1.05, 1.27, 1.01, 1.15])
    steady = [row.step_ns for row in (*base, *new)]
    assert all(max(times) / min(times) < 1.001 for times in steady)
    found = compare(base, new)
    assert one(found, "step_ns").label == "ambiguous"
    assert found.exit_code == 0
    assert compare(base, new, strict=True).exit_code == 1


def test_a_slower_step_is_judged_once_and_shown_as_samples_a_second_too() -> None:
    found = compare(repeated([1.0, 1.01, 1.02, 1.0, 1.01]), repeated([1.2, 1.21, 1.22, 1.2, 1.21]))
    assert (one(found, "step_ns").label, one(found, "samples_per_s").label) == ("worse", "worse")
    assert one(found, "step_ns").counts and not one(found, "samples_per_s").counts
    low, high = one(found, "step_ns").interval or (0, 0)
    assert 0.17 < low < (one(found, "step_ns").change or 0) < high < 0.23
    assert (one(found, "step_ns").num_base, one(found, "step_ns").num_new) == (5, 5)
    assert found.exit_code == 1
    assert verdict(found).startswith("1 of 1 rung is slower: B4c2@none +19.")


def test_f36_the_least_effect_is_a_share_or_a_time() -> None:
    short = compare(repeated([0.002] * 5), repeated([0.0023] * 5))
    assert one(short, "step_ns").label == "same", "0.3 ms are noise, though they are 15 %"
    long = compare(repeated([2.0] * 5), repeated([2.3] * 5))
    assert one(long, "step_ns").label == "worse"
    assert one(
        compare(repeated([2.0] * 5), repeated([2.3] * 5), tolerance=Tolerance(time_frac=0.2)), "step_ns"
    ).label == ("same")


@pytest.mark.parametrize(
    ("disturbance", "why"),
    [
        ({"telemetry": {"throttled": ["power cap", "heat (hardware)"]}}, "slowed down (heat (hardware))"),
        ({"telemetry": {"others": [{"pid": 7}]}}, "other processes used the GPU"),
        (
            {"windows": {"measured": WindowPeak(allocated_bytes=100 * MIB, others_bytes=5 * MIB)}},
            "other processes used the GPU",
        ),
        (
            {"windows": {"measured": WindowPeak(allocated_bytes=100 * MIB, steady=False, num_device_allocs=3)}},
            "still asked the driver for memory",
        ),
        ({"status": "thrash"}, "it ended with thrash"),
    ],
)
def test_times_of_a_disturbed_process_are_left_out_and_its_memory_is_not(disturbance: dict[str, Any], why: str) -> None:
    base = repeated([1.0, 1.01, 1.02])
    new = repeated([2.0, 2.01, 2.02], peak_allocated_bytes=120 * MIB, **disturbance)
    found = compare(base, new)
    assert one(found, "step_ns").label == "insufficient"
    assert why in one(found, "step_ns").why
    assert one(found).label == "worse"


@pytest.mark.parametrize(
    "usual",
    [
        {"telemetry": {"throttled": ["power cap"]}},  # a busy GPU draws what it may
        {"windows": {"measured": WindowPeak(allocated_bytes=100 * MIB, steady=False, num_device_allocs=0)}},
    ],
)
def test_what_is_usual_disturbs_no_times(usual: dict[str, Any]) -> None:
    base, new = repeated([1.0, 1.01, 1.02], **usual), repeated([2.0, 2.01, 2.02], **usual)
    assert one(compare(base, new), "step_ns").label == "worse"


def test_a_slower_clock_is_not_slower_code() -> None:
    base = repeated([1.0, 1.01, 1.02, 1.0, 1.01], telemetry={"sm_clock_mhz": {"min": 9, "median": 1980, "max": 1990}})
    new = repeated([1.1, 1.11, 1.12, 1.1, 1.11], telemetry={"sm_clock_mhz": 1800})
    found = one(compare(base, new), "step_ns")
    assert found.label == "ambiguous"
    assert "1980 MHz before and 1800 MHz now" in found.why
    same_clock = repeated([1.1, 1.11, 1.12, 1.1, 1.11], telemetry={"sm_clock_mhz": 1980})
    assert one(compare(base, same_clock), "step_ns").label == "worse"


def on(row: RungResult, **facts: Any) -> RungResult:
    """`row` in the environment of an H100, with some facts changed."""
    return RungResult.from_dict(row.to_dict() | {"environment": H100 | facts})


@pytest.mark.parametrize(
    ("facts", "memory", "speed"),
    [
        ({}, True, True),
        ({"commit": "def5678", "machine_id": "other"}, True, True),
        ({"driver": "590.2"}, True, False),
        ({"power_limit_w": 500.0}, True, False),
        ({"torch": "2.14.0+cu130"}, False, False),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, False, False),
        ({"cuda": "12.8"}, False, False),
        ({"mig": "on"}, True, True),  # nobody told before
        ({"settings": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}, False, False),
        ({"settings": {"CUDA_VISIBLE_DEVICES": "3"}}, True, True),
        ({"settings": {"OMP_NUM_THREADS": "1"}}, True, False),
        ({"cpu": "Abacus 9000"}, True, True),
    ],
)
def test_f37_another_machine_or_library_is_incomparable_and_named(
    facts: dict[str, Any], memory: bool, speed: bool
) -> None:
    base = [on(row) for row in repeated([1.0, 1.01, 1.02])]
    new = [on(row, **facts) for row in repeated([1.0, 1.01, 1.02])]
    found = compare(base, new)
    assert (one(found).label != "incomparable") == memory
    assert (one(found, "step_ns").label != "incomparable") == speed
    assert found.exit_code == (0 if memory else 4)
    for key in () if memory and speed else (next(iter(facts.get("settings", facts))),):
        assert key in found.different
        assert any(key in line for line in notes(found)), notes(found)
    if not memory:
        assert verdict(found).startswith("Not comparable: ")
        assert not [finding for finding in found.findings if finding.metric == "status"]


def test_f37_across_compares_bytes_whatever_the_machine_and_times_whatever_the_software() -> None:
    base = [on(row) for row in repeated([1.0, 1.01, 1.02])]
    newer = [on(row, torch="2.14.0", driver="590") for row in repeated([1.3, 1.31, 1.32])]
    assert compare(base, newer).exit_code == 4
    found = compare(base, newer, across=True)
    assert (one(found).label, one(found, "step_ns").label) == ("same", "worse")
    assert set(found.different) == {"torch", "driver"}
    other = [on(row, gpu="NVIDIA A100-SXM4-80GB") for row in repeated([1.3, 1.31, 1.32])]
    crossed = compare(base, other, across=True)
    assert (one(crossed).label, one(crossed, "step_ns").label) == ("same", "incomparable")


def test_f37_the_same_question_on_another_card_has_another_identity_and_is_still_recognised() -> None:
    base = [on(row_of(run_id="a" * 12))]
    other = [on(row_of(run_id="b" * 12), gpu="NVIDIA H200", gpu_memory_bytes=150_000_000_000)]
    found = compare(base, other)
    assert one(found).label == "incomparable"
    assert "gpu NVIDIA H100 80GB HBM3 before, NVIDIA H200 now" in one(found).why
    assert one(compare(base, other, across=True)).label == "same"
    newer_driver = [on(row_of(run_id="b" * 12), driver="590.2", gpu_memory_bytes=85_000_000_000)]
    assert one(compare(base, newer_driver)).label == "same", "a driver that keeps more for itself changes no tensor"


def test_a_trace_depends_on_torchs_minor_version_and_not_on_the_host() -> None:
    def simulated(**facts: Any) -> list[RungResult]:
        return [row_of(source="simulated", step_ns=(), environment={"device": "h100-80g", "cpu": "Abacus"} | facts)]

    base = simulated(torch="2.13.0+cpu")
    assert one(compare(base, simulated(torch="2.13.1+cu130", cpu="Other", num_cpus=4))).label == "same"
    assert one(compare(base, simulated(torch="2.14.0+cpu"))).label == "incomparable"
    assert one(compare(base, simulated(torch="2.14.0+cpu"), across=True)).label == "same"


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


def test_f41_another_step_under_the_same_name_is_incomparable_and_the_fields_are_named() -> None:
    step = row_of().step
    base = row_of()
    new = row_of(run_id="b" * 12, step=step | {"seq": 128, "lora": "16"}, peak_allocated_bytes=10 * MIB)
    found = compare([base], [new])
    assert one(found, "status").label == "incomparable"
    assert one(found, "status").why == "seq 64 before, 128 now; lora unset before, 16 now"
    assert found.exit_code == 4
    kept = row_of(run_id="c" * 12, rung="B2c1@none")
    partly = compare([base, kept], [new, kept])
    assert partly.exit_code == 1, "nothing holds the rung any more"
    assert compare([base, kept], [new, kept], allow_missing=True).exit_code == 0


def test_f41_rows_of_one_run_that_tell_different_steps_or_models_are_incomparable() -> None:
    for change, said in (
        ({"step": row_of().step | {"seq": 128}}, "seq 64 before, 128 now"),
        ({"model": "other"}, "model tiny before, other now"),
    ):
        found = compare([row_of()], [row_of(**change)])
        assert (one(found, "status").label, found.exit_code) == ("incomparable", 4)
        assert verdict(found) == f"Not comparable: {said}."


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


def test_f41_the_models_own_facts_are_part_of_the_question() -> None:
    found = compare([row_of(run_id="a" * 12)], [row_of(run_id="b" * 12)])
    assert one(found, "status").label == "incomparable"
    assert one(found, "status").why == f"the model's own facts differ: they make run {'a' * 12} before, {'b' * 12} now"


def test_f41_a_field_that_an_older_row_lacks_is_no_difference() -> None:
    newer = row_of(step=row_of().step | {"workload": "lm", "dropout": 0.0, "rows": "full"}, run_id="b" * 12)
    found = compare([row_of(run_id="a" * 12)], [newer])
    assert "facts differ" in one(found, "status").why, "not its step"


def test_rungs_of_one_name_are_matched_by_their_question_and_named_apart() -> None:
    step = row_of().step
    full, chunked = row_of(), row_of(run_id="b" * 12, step=step | {"loss": "chunked:4"})
    found = compare([full, chunked], [chunked, full])
    assert {finding.name for finding in found.findings} == {"B4c2@none loss full", "B4c2@none loss chunked:4"}
    assert found.exit_code == 0
    third = row_of(run_id="c" * 12, step=step | {"loss": "chunked:4", "precision": "bf16"})
    moved = compare([full, chunked], [full, third])
    assert one(moved, "status", "B4c2@none loss chunked:4 precision bf16").why == "precision fp32 before, bf16 now"


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
