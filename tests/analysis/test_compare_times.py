"""Times of two results side by side: judged over processes, never over the steps of one."""

from typing import Any

import pytest
from compared import one, repeated
from samples import row_of

from memplan.analysis.compare import Tolerance, compare
from memplan.analysis.verdict import notes, verdict
from memplan.record import WindowPeak
from memplan.units import MIB


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
