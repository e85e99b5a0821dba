"""The file of rows: what was written is read, whatever happened to the last line."""

import json
from pathlib import Path
from typing import Any

import pytest
from samples import row_of

from memplan.errors import MemplanError
from memplan.record import append_row, read_rows
from memplan.record.memory import SCHEMA_VERSION
from memplan.record.store import Results, read_all, read_results


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


def test_whatever_tears_a_line_the_other_rows_come_back_and_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    whole = json.dumps(row_of().to_dict(), ensure_ascii=False).encode()
    accented = json.dumps(row_of(error="größer").to_dict(), ensure_ascii=False).encode()
    torn = {
        "cut at the end": whole[: len(whole) // 2],
        "cut in a letter of two bytes": accented[: accented.index("ö".encode()) + 1],
        "zeros of a crashed disk": b"\0" * 512,
        "a tail whose head was lost": whole[len(whole) // 2 :],
        "a number of 5,000 digits": b'{"repeat": ' + b"9" * 5000 + b"}",
        "nested too deep": b"[" * 100_000,
    }
    other = json.dumps(row_of(run_id="b" * 12).to_dict()).encode()
    for what, line in torn.items():
        path.write_bytes(whole + b"\n" + line + b"\n" + other)
        found = read_results(path)
        assert [row.run_id[0] for row in found.rows] == ["a", "b"], what
        assert found.warnings == (f"{path}: line 2 was torn, and left out.",), what


def test_a_file_with_nothing_but_a_torn_row_is_a_climb_that_has_just_begun(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    for content in (b"", b"\n\n", b'{"schema_ver', b"\0" * 64, b"\0\0" + b'{"schema_version": 1, "rung": "B'):
        path.write_bytes(content)
        assert read_rows(path) == (), content


def test_zeros_before_a_whole_row_do_not_lose_it(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    path.write_bytes(b"\0" * 16 + json.dumps(row_of().to_dict()).encode() + b"\r\n")
    assert read_results(path) == Results(rows=(row_of(),))


@pytest.mark.parametrize(
    "content",
    [b"rung,peak\nB4c2,17\n", b"\x89PNG\r\n\x1a\n\0\0", b"[1, 2]\n", "rungs: Größe\n".encode("latin-1")],
    ids=["csv", "picture", "list", "latin-1"],
)
def test_a_foreign_file_is_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    path.write_bytes(content)
    with pytest.raises(MemplanError, match="is not a ladder's file") as refused:
        read_results(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rung": 3}, "rung is 3, not a text"),
        ({"step": "B4"}, 'step is "B4", not an object'),
        ({"step": {"batch": "4"}}, 'step.batch is "4", not a whole number above zero'),
        ({"windows": [1]}, "windows is [1], not an object"),
        ({"windows": {"measured": {"allocated_bytes": -1}}}, "windows.measured.allocated_bytes is -1, below zero"),
        ({"windows": {"measured": {}}}, "it has no windows.measured.allocated_bytes"),
        ({"step_ns": 5}, "step_ns is 5, not a list"),
        ({"step_ns": "abc"}, 'step_ns is "abc", not a list'),
        ({"step_ns": ["abc"]}, 'step_ns is "abc", not a whole number'),
        ({"step_ns": [5, 0]}, "step_ns is 0, not above zero"),
        ({"step_ns": [-5]}, "step_ns is -5, below zero"),
        ({"run_id": None}, "run_id is null, not a text"),
        ({"peak_allocated_bytes": "12"}, 'peak_allocated_bytes is "12", not a whole number'),
        ({"peak_allocated_bytes": float("nan")}, "peak_allocated_bytes is NaN, not a whole number"),
        ({"peak_allocated_bytes": 1.5}, "peak_allocated_bytes is 1.5, not a whole number"),
        ({"peak_allocated_bytes": True}, "peak_allocated_bytes is true, not a whole number"),
        ({"peak_allocated_bytes": 10**40}, f"peak_allocated_bytes is {10**40}, more than there is"),
        ({"peak_flops": float("inf")}, "peak_flops is Infinity"),
        ({"environment": "x"}, 'environment is "x", not an object'),
        ({"environment": {"settings": [1]}}, "environment.settings is [1], not an object"),
        ({"breakdown": {"params": "many"}}, 'breakdown.params is "many", not a whole number'),
        ({"breakdown": {"a\n\u202eb": 0.5}}, r"breakdown.a\n\u202eb is 0.5, not a whole number"),
        ({"failure": {"window": "build", "alive": [{"num_bytes": 3}]}}, "it has no failure.alive.category"),
        ({"loss": ["none"]}, 'loss is "none", not a number'),
    ],
)
def test_a_row_with_a_value_that_none_can_have_is_refused_by_file_line_and_key(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "ladder.jsonl"
    good = row_of(loss=(float("nan"),), grad_norm=float("inf"), windows={}).to_dict()  # training that diverged is a row
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change))
    with pytest.raises(MemplanError) as refused:
        read_all([path])
    assert str(refused.value) == f"{path}, line 2 is not a row of a ladder: {said}."


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row_of().to_dict()).encode())
    assert read_results(path) == Results(rows=(row_of(),))


def test_a_newer_version_is_refused_with_what_to_type(tmp_path: Path) -> None:
    path = tmp_path / "ladder.jsonl"
    path.write_text(json.dumps(row_of().to_dict() | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(MemplanError, match=r"newer memplan.*pip install --upgrade"):
        read_results(path)


def test_a_folder_is_read_by_its_file_and_one_without_says_where_others_are(tmp_path: Path) -> None:
    (tmp_path / "climb").mkdir()
    append_row(tmp_path / "climb" / "ladder.jsonl", row_of())
    assert read_results(tmp_path / "climb").rows == (row_of(),)
    with pytest.raises(MemplanError, match=r"holds no ladder.jsonl.*climb"):
        read_results(tmp_path)


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    append_row(tmp_path / "ladder.jsonl", row_of())
    (tmp_path / "again.jsonl").symlink_to("ladder.jsonl")
    found = read_all([tmp_path, tmp_path / "ladder.jsonl", tmp_path / "." / "ladder.jsonl", tmp_path / "again.jsonl"])
    assert found.rows == (row_of(),)


OLD = sorted((Path(__file__).parents[2] / "reports").glob("*/ladder.jsonl"))


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.parent.name)
def test_every_row_that_was_ever_published_still_loads(path: Path) -> None:
    found = read_results(path)
    assert len(found.rows) == len(path.read_text().splitlines()), "a line a row, none repeated"
    assert found.warnings == ()
    assert any(row.whole_peak_bytes for row in found.rows)


def test_the_shapes_of_published_rows_differ() -> None:
    """Else the test above would prove little."""
    shapes = {(len(row), len(row["step"])) for path in OLD for row in map(json.loads, path.read_text().splitlines())}
    assert len(shapes) >= 2
