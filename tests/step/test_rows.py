"""Padded and packed rows: who sees whom, which tokens make a loss, and what the masks cost."""

import dataclasses
from typing import Any

import pytest
import torch
from samples import asked, measured_peak, run_of

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.models.batch import IGNORED, Batch
from memplan.spec.rows import Rows
from memplan.step.builder import TrainStep, build_step
from memplan.step.parity import compare

CPU = torch.device("cpu")


def step_of(rows: str, **step: Any) -> TrainStep:
    return build_step(run_of("tiny", **({"batch": 2, "seq": 24} | step), rows=rows), CPU)


def hidden_of(step: TrainStep, start: int, end: int) -> torch.Tensor:
    """Hidden states of the tokens from `start` to `end` of each row, as if nothing else were there."""
    part: Batch = dataclasses.replace(step.batch, tokens=step.batch.tokens[:, start:end], segments=None)
    with torch.no_grad():
        return step.model(part)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("rows", "ends"), [("packed:3", [8, 16, 24]), ("packed:5", [4, 9, 14, 19, 24]), ("padded:0.5", [12])]
)
def test_each_document_is_encoded_as_if_it_were_alone(rows: str, ends: list[int], attention: str) -> None:
    step = step_of(rows, attention=attention)
    with torch.no_grad():
        hidden = step.model(step.batch)
    assert hidden.isfinite().all()
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        torch.testing.assert_close(hidden[:, start:end], hidden_of(step, start, end), rtol=0, atol=2e-5)
    whole = hidden_of(step, 0, 24)
    torch.testing.assert_close(hidden[:, : ends[0]], whole[:, : ends[0]], rtol=0, atol=2e-5)
    assert (hidden[:, ends[0] :] - whole[:, ends[0] :]).abs().max() > 0.01


def test_no_document_learns_the_next_ones_first_token_and_padding_nothing() -> None:
    assert [at for at, label in enumerate(step_of("packed:3").batch.labels[0]) if label == IGNORED] == [7, 15, 23]
    padded = step_of("padded:0.5")
    assert [at for at, label in enumerate(padded.batch.labels[1]) if label != IGNORED] == list(range(11))
    assert padded.num_targets == 2 * 11
    assert padded.batch.segments is not None
    assert padded.batch.segments[0].tolist() == [1] * 12 + [0] * 12
    assert step_of("full").batch.segments is None


@pytest.mark.parametrize("rows", ["packed:3", "padded:0.25"])
def test_levers_leave_such_rows_alone(rows: str) -> None:
    for levers in ({"ckpt": "full"}, {"chunks": 2, "loss": "valid-rows"}):
        assert compare(run_of("tiny", batch=2, seq=24, rows=rows, **levers), CPU).same


@pytest.mark.parametrize("levers", [{"rows": "packed:4"}, {"rows": "padded:0.25", "ckpt": "full"}])
def test_the_mask_is_traced_to_the_byte(levers: dict[str, str]) -> None:
    """A number a token in the batch; [B, 1, S, S] of fp32 are kept for backward by SDPA."""
    run, full = (asked("tiny", "B2c1", **({"seq": 64, "precision": "fp32"} | more)) for more in (levers, {}))
    assert simulate(run).steps.steady.peak_allocated_bytes == measured_peak(run)
    sheets = [simulate(one).steps.steady for one in (run, full)]
    assert sheets[0].breakdown.other - sheets[1].breakdown.other == 2 * 64 * 8


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("ragged", "Unknown rows 'ragged'"),
        ("full:2", "Unknown rows 'full:2'"),
        ("padded", "fraction above 0 and below 1"),
        ("padded:1", "fraction above 0 and below 1"),
        ("padded:nan", "fraction above 0 and below 1"),
        ("packed:0", "whole number N of 1 or more"),
        ("packed:x", "whole number N of 1 or more"),
        ("packed:24", "has no next token to learn"),
        ("padded:0.99", "has no next token to learn"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows: str, said: str) -> None:
    with pytest.raises(MemplanError, match=said):
        run_of("tiny", seq=24, rows=rows)


def test_models_and_workloads_with_masks_of_their_own_are_refused() -> None:
    with pytest.raises(MemplanError, match="fills its rows itself"):
        run_of("tiny-molmo2", images=1, rows="packed:2")
    with pytest.raises(MemplanError, match="makes its masks itself"):
        run_of("tiny-molmo2", rows="packed:2")
    with pytest.raises(MemplanError, match="makes its masks itself"):
        run_of("tiny-gemma", rows="padded:0.5")


def test_documents_fill_a_row_that_they_do_not_divide() -> None:
    rows = Rows.parse("packed:3")
    assert rows.ends(10) == [3, 6, 10]
    assert rows.segments(10) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert rows.targets(10) == [0, 1, 3, 4, 6, 7, 8]
    assert Rows.parse("full").targets(3) == [0, 1, 2]


def test_full_rows_keep_a_runs_identity() -> None:
    run = run_of()
    facts = run.to_dict()
    del facts["step"]["rows"]
    assert run.from_dict(facts).run_id == run.run_id != run_of(rows="packed:2").run_id
