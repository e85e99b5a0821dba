"""Which rows of two results may be held against one another: of one question, one machine, one set of libraries."""

from typing import Any

import pytest
from compared import on, one, repeated
from samples import row_of

from memplan.analysis.compare import compare
from memplan.analysis.verdict import notes, verdict
from memplan.record import RungResult
from memplan.units import MIB


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
