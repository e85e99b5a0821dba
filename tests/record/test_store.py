"""The file of rows: what was written is read, whatever happened to the last line."""

import json
from pathlib import Path

import pytest
from samples import row_of

from memplan.errors import MemplanError
from memplan.record import append_row, read_rows


def test_rows_come_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    rows = (row_of(), row_of(run_id="b" * 12, status="oom", error="Über"))
    for row in rows:
        append_row(path, row)
    assert read_rows(path) == rows


def test_the_last_line_of_a_run_counts(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    for row in (row_of(status="timeout"), row_of(run_id="b" * 12), row_of(status="ok")):
        append_row(path, row)
    assert [(row.run_id[0], row.status) for row in read_rows(path)] == [("b", "ok"), ("a", "ok")]


def test_a_torn_line_is_left_out_and_the_next_row_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    append_row(path, row_of())
    with path.open("ab") as file:
        file.write(b'{"rung": "B2c1\xff')
    assert read_rows(path) == (row_of(),)
    append_row(path, row_of(run_id="b" * 12))
    assert [row.run_id[0] for row in read_rows(path)] == ["a", "b"]


def test_keys_of_later_versions_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    data = row_of().to_dict() | {"invented_later": 1}
    data["windows"]["first_step"]["invented_later"] = 2
    path.write_text(json.dumps(data) + "\n")
    assert read_rows(path) == (row_of(),)


def test_what_is_no_row_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    path.write_text('{"schema_version": 1}\n')
    with pytest.raises(MemplanError, match="line 1 is not a row"):
        read_rows(path)
    with pytest.raises(MemplanError, match="cannot be read"):
        read_rows(tmp_path / "nowhere.jsonl")


def test_derived_numbers() -> None:
    row = row_of()
    assert row.samples_per_s == 4 * 2 / 4
    assert row.median_step_ns == 2 * 10**9
    assert row_of(step_ns=(1, 5, 9)).median_step_ns == 5
    assert row_of(step_ns=()).median_step_ns is None
    assert row_of(step_ns=()).samples_per_s is None
