"""Baselines as files: where they go, what git sees of them, and which one is taken."""

import json
from pathlib import Path
from typing import Any

import pytest
from samples import row_of

from memplan.analysis.baseline import baselines, doubts, find, machine_slug, refreshed, save, write
from memplan.analysis.compare import compare
from memplan.errors import MemplanError, NotComparableError, NothingMeasuredError
from memplan.record import RungResult, read_rows
from memplan.units import MIB

H100 = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "torch": "2.13.0+cu130", "driver": "580.1"}


def on(environment: dict[str, Any], **values: Any) -> RungResult:
    return row_of(environment=environment, **values)


def test_a_machine_is_named_readably_and_the_rest_is_in_six_letters() -> None:
    assert machine_slug([on(H100)]).startswith("nvidia-h100-80gb-hbm3_torch-2.13.0-cu130_")
    assert machine_slug([row_of()]).startswith("cpu-abacus_torch-2.13.0_")
    traced = on({"device": "h100-80g", "torch": "2.13.1+cpu", "cpu": "Abacus"}, source="simulated")
    assert machine_slug([traced]).startswith("simulated-h100-80g_torch-2.13_")
    elsewhere = on({"device": "h100-80g", "torch": "2.13.0+cu130", "cpu": "Other"}, source="simulated")
    assert machine_slug([traced]) == machine_slug([elsewhere]), "a trace does not depend on its host"


@pytest.mark.parametrize(
    ("facts", "same"),
    [
        ({"commit": "def5678"}, True),
        ({"machine_id": "0123"}, True),
        ({"settings": {"CUDA_VISIBLE_DEVICES": "1"}}, True),
        ({"driver": "590"}, False),
        ({"gpu": "NVIDIA A100"}, False),
        ({"torch": "2.14.0"}, False),
        ({"settings": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}, False),
    ],
)
def test_f37_the_letters_change_with_what_matters_and_with_nothing_else(facts: dict[str, Any], same: bool) -> None:
    assert (machine_slug([on(H100)]) == machine_slug([on(H100 | facts)])) == same


def test_a_name_from_outside_is_a_plain_folder() -> None:
    slug = machine_slug([on(H100 | {"gpu": "../../etc/<script>\n" + "x" * 500})])
    assert "/" not in slug and ".." not in slug and "<" not in slug
    assert len(slug) < 120


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    rows = [row_of(), row_of(repeat=2), row_of(run_id="b" * 12, rung="B2c1@none")]
    baseline, _ = save("main", rows, tmp_path)
    assert baseline.path == tmp_path / machine_slug(rows) / "main.jsonl"
    assert sorted(read_rows(baseline.path), key=lambda row: row.key) == sorted(rows, key=lambda row: row.key)
    assert [(found.name, found.machine) for found in baselines(tmp_path)] == [("main", baseline.machine)]


def test_git_sees_one_changed_line_for_one_changed_row_whatever_the_order(tmp_path: Path) -> None:
    rows = [row_of(), row_of(run_id="b" * 12, rung="B2c1@none"), row_of(run_id="c" * 12, rung="B8c1@none")]
    write(tmp_path / "before.jsonl", rows)
    shuffled = [rows[2], rows[0], RungResult.from_dict(rows[1].to_dict() | {"peak_allocated_bytes": 7})]
    write(tmp_path / "after.jsonl", shuffled)
    before, after = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("before", "after"))
    assert len(before) == len(after) == 3
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    assert all(list(json.loads(line)) == sorted(json.loads(line)) for line in after)


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    save("main", [row_of()], tmp_path)
    with pytest.raises(MemplanError, match=r"already.*--replace"):
        save("main", [row_of(peak_allocated_bytes=7)], tmp_path)
    baseline, _ = save("main", [row_of(peak_allocated_bytes=7)], tmp_path, replace=True)
    assert read_rows(baseline.path)[0].peak_allocated_bytes == 7


@pytest.mark.parametrize("name", ["", "../main", "a/b", ".hidden", "main.jsonl", "x" * 101, "a\nb", "main.refreshed"])
def test_a_name_that_is_no_files_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match="cannot name a baseline"):
        save(name, [row_of()], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_f40_nothing_measured_is_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(NothingMeasuredError):
        save("main", [row_of(status="error"), row_of(run_id="b" * 12, status="skipped:no room")], tmp_path)
    with pytest.raises(NothingMeasuredError):
        save("main", [], tmp_path)


def test_rows_of_two_machines_are_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match="2 kinds of machine"):
        save("main", [row_of(), on(H100, run_id="b" * 12)], tmp_path)


def test_a_weak_base_for_times_is_said_to_be_one() -> None:
    few = doubts([row_of()])
    assert len(few) == 1 and "fewer than 3 processes" in few[0]
    wild = doubts([row_of(repeat=number, step_ns=(time * 10**9,)) for number, time in enumerate((10, 13, 9), 1)])
    assert len(wild) == 1 and "spread by up to 40 %" in wild[0]
    assert doubts([row_of(repeat=number, step_ns=(10**9 + number,)) for number in (1, 2, 3)]) == []
    assert doubts([row_of(step_ns=())]) == []


def test_f37_the_baseline_of_the_same_machine_is_taken(tmp_path: Path) -> None:
    save("main", [row_of()], tmp_path)
    save("main", [on(H100)], tmp_path)
    assert find("main", [on(H100 | {"commit": "def"})], tmp_path).rows == (on(H100),)
    assert find("main", [row_of()], tmp_path).rows == (row_of(),)
    newer_driver = find("main", [on(H100 | {"driver": "590"})], tmp_path)
    assert newer_driver.rows == (on(H100),), "bytes can be compared, times will be said not to be"


def test_f37_where_none_fits_it_says_which_there_are_and_how_to_record_one(tmp_path: Path) -> None:
    baseline, _ = save("main", [on(H100)], tmp_path)
    with pytest.raises(NotComparableError) as refused:
        find("main", [row_of()], tmp_path)
    assert baseline.machine in str(refused.value)
    assert "device cuda before, cpu now" in str(refused.value)
    assert "memplan baseline save main DIR" in str(refused.value)
    assert refused.value.exit_code == 4
    assert find("main", [row_of()], tmp_path, across=True).rows == (on(H100),)


def test_a_name_that_is_unknown_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match=r"no file, folder or baseline main.*has none.*baseline save main DIR"):
        find("main", [row_of()], tmp_path)
    save("main", [row_of()], tmp_path)
    with pytest.raises(MemplanError, match="Did you mean main"):
        find("mian", [row_of()], tmp_path)


def test_f38_a_refreshed_base_takes_what_improved_and_never_what_got_worse(tmp_path: Path) -> None:
    names = {name: {"run_id": name * 12, "rung": f"B{number}c1@none"} for number, name in enumerate("abcd", 1)}
    base = [row_of(**names[name]) for name in "abc"]
    new = [
        row_of(**names["a"], peak_allocated_bytes=50 * MIB),
        row_of(**names["b"], peak_allocated_bytes=150 * MIB),
        row_of(**names["d"]),
    ]
    rows = {row.run_id[0]: row for row in refreshed(compare(base, new))}
    assert {name: (row.peak_allocated_bytes or 0) // MIB for name, row in rows.items()} == {
        "a": 50,  # better
        "b": 100,  # worse: as it was
        "c": 100,  # gone: as it was
        "d": 100,  # new
    }


def test_a_refreshed_file_is_no_baseline_of_its_own(tmp_path: Path) -> None:
    baseline, _ = save("main", [row_of()], tmp_path)
    write(baseline.path.with_name("main.refreshed.jsonl"), [row_of()])
    assert [found.name for found in baselines(tmp_path)] == ["main"]
