"""Memory of two results side by side: judged exactly, and what grew is named."""

import pytest
from compared import PARTS, one
from samples import row_of

from memplan.analysis.compare import compare
from memplan.analysis.verdict import notes, verdict
from memplan.record import RungResult, WindowPeak
from memplan.units import MIB


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
