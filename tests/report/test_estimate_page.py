"""What the page of an estimate says, in each of its forms."""

import csv
import io
from typing import Any

import pytest

from memplan import api
from memplan.record import Estimate, Fit
from memplan.record.estimated import estimated_row
from memplan.report.estimate_page import estimate_json, estimate_page, named_phases
from memplan.report.render import render
from memplan.spec import Ladder
from memplan.spec.device import CPU, card
from memplan.units import format_bytes


def asked(rungs: str = "B2c1@full", *, gpu: str | None = "h100-80g", **values: Any) -> tuple[Estimate, Fit]:
    """What the formulas say of a small model, or of the one that is named."""
    question = Ladder.from_dict({"model": "tiny", "rungs": rungs} | values, name="asked", origin="a test")
    return api.estimate(question, CPU if gpu is None else card(gpu))


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_every_form_of_the_page_says_all_of_it(form: str) -> None:
    answer, fit = asked("B2c2@full", precision="bf16-mixed", freeze="embedding")
    page = estimate_page(answer, fit, form)
    for said in ("tiny (869,504 parameters", "B2c2@full, seq 128", "embedding frozen", "static together",
                 "the same by one token", "kept by a chunk", "peak: ", "active: ", "reserved: ", "process: ",
                 "under 78.46 GiB (h100-80g): fits", "largest batch: ", "recompute"):  # fmt: skip
        assert said in page, said
    assert page.count("<table>") == 2 * (form == "html")


def test_a_spreadsheet_says_of_which_model_its_rows_are() -> None:
    answer, fit = asked(gate="1MiB")
    rows = list(csv.DictReader(io.StringIO(render(named_phases(answer, fit), "csv"))))
    assert {(row["model"], row["device"], row["fits"], row["gate_bytes"]) for row in rows} == {
        ("tiny", "h100-80g", "False", str(1 << 20))
    }
    assert max(int(row["allocated_bytes"]) for row in rows) == answer.peak_allocated_bytes


def test_what_is_frozen_stands_in_json() -> None:
    assert estimate_json(*asked(freeze="embedding"))["frozen"] == ["embedding"]
    assert estimate_json(*asked())["frozen"] == []


def test_buckets_of_communication_stay_between_steps() -> None:
    answer, _ = asked("B2c1", parallel="ddp", world=4)
    alone, _ = asked("B2c1")
    assert answer.static.comm == answer.params_trainable * 4
    assert answer.static.total_bytes == alone.static.total_bytes + answer.static.comm


def test_what_the_allocator_is_likely_to_reserve_decides_what_surely_fits() -> None:
    """Qwen3-4B at batch 3 leaves 7 GiB of an H100, and more than that to fragments."""
    answer, fit = asked("B3c1@full", model="qwen3-4b")
    assert fit.limit_bytes is not None and answer.reserved.likely_bytes is not None
    assert answer.peak_allocated_bytes < fit.limit_bytes < answer.reserved.likely_bytes
    assert fit.fits is None and fit.max_batch == 3 and "max_batch" in fit.may_not_fit
    page = estimate_page(answer, fit)
    assert f"fragments take, {format_bytes(answer.reserved.likely_bytes)} reserved" in page
    assert "largest batch: 3 (may not fit) in 1 chunk" in page


def test_a_gate_leaves_no_size_open() -> None:
    _, fit = asked("B3c1@full", model="qwen3-4b", gate="72GiB")
    assert fit.fits is True and fit.may_not_fit == ()


def test_a_longest_sample_says_what_bounds_it() -> None:
    answer, fit = asked()
    assert f"{fit.max_seq:,} tokens, in steps of 64, as many as the model takes" in estimate_page(answer, fit)
    answer, fit = asked("B64c1", gate="1GiB")
    assert fit.max_seq and fit.max_seq < answer.run.model.decoder.max_positions - 64
    assert f"{fit.max_seq:,} tokens, in steps of 64" in estimate_page(answer, fit)
    assert "as long as" not in estimate_page(answer, fit)


def test_what_is_recomputed_is_compared_as_a_part_of_backward() -> None:
    answer, fit = asked("B2c1@full")
    data = estimate_json(answer, fit)
    larger = max(data["phases"][name]["allocated_bytes"] for name in ("recompute", "backward"))
    peaks = estimated_row(data)["phase_peaks"]
    assert peaks["backward"] == larger and "recompute" not in peaks
