"""One table, five looks."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterator

import pytest
from samples import row_of

from memplan.errors import MemplanError
from memplan.record import RungResult
from memplan.report.ladder_columns import peak_phase
from memplan.report.ladder_table import labels, ladder_table, provenance
from memplan.report.render import FORMS, render
from memplan.report.table import Column, Table
from memplan.units import MIB

TABLE = Table(
    columns=(
        Column(key="rung", header="rung", align="left"),
        Column(key="model", header="model", align="left", hide_constant=True),
        Column(key="peak_bytes", header="peak", unit="MiB", text=lambda value: f"{value / MIB:.1f}"),
    ),
    rows=(("B4|c2", "tiny", 3 * MIB), ("B2c1", "tiny", None)),
    footer=("below",),
)


def test_plain_text_lines_up_and_folds_what_never_varies() -> None:
    assert render(TABLE) == "\n".join(
        [
            "rung   peak [MiB]",
            "-----  ----------",
            "B4|c2         3.0",
            "B2c1            -",
            "",
            "model tiny",
            "below",
        ]
    )


def test_a_column_that_varies_stays() -> None:
    varied = Table(columns=TABLE.columns, rows=(("a", "tiny", 1), ("b", "wide", 1)))
    assert [column.key for column in varied.folded().columns] == ["rung", "model", "peak_bytes"]


def test_markdown_escapes_and_aligns() -> None:
    assert render(TABLE, "md").splitlines() == [
        "| rung | peak [MiB] |",
        "|---|--:|",
        "| B4\\|c2 | 3.0 |",
        "| B2c1 | - |",
        "",
        "model tiny<br>",
        "below",
    ]


def test_machines_get_all_columns_and_raw_values() -> None:
    assert json.loads(render(TABLE, "json")) == TABLE.records()
    assert [json.loads(line) for line in render(TABLE, "jsonl").splitlines()] == TABLE.records()
    first, second = csv.DictReader(io.StringIO(render(TABLE, "csv")))
    assert first == {"rung": "B4|c2", "model": "tiny", "peak_bytes": str(3 * MIB)}
    assert second["peak_bytes"] == ""


def test_html_is_a_whole_page_of_the_table() -> None:
    page = render(dataclasses.replace(TABLE, title="<Rungs>"), "html")
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>")
    for said in ('charset="utf-8"', "width=device-width", "<title>&lt;Rungs&gt;</title>", "prefers-color-scheme: dark"):
        assert said in page
    assert page.count("<table>") == page.count("</table>") == 1 and "<td>B4|c2</td>" in page


def test_rich_draws_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = render(TABLE, rich=True)
    assert "B4|c2" in text and "3.0" in text and "model tiny" in text


def test_a_terminal_that_is_too_narrow_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    assert render(TABLE, rich=True) == render(TABLE)


def test_a_long_cell_is_wrapped_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    columns = (Column(key="name", header="name", align="left"), Column(key="source", header="source", align="left"))
    lines = render(Table(columns=columns, rows=(("a-name-of-some-length", "word " * 20),)), rich=True).splitlines()
    assert any("a-name-of-some-length" in line for line in lines)
    assert sum("word" in line for line in lines) > 2


def test_an_empty_table_renders_in_every_form() -> None:
    for form in FORMS:
        render(Table(columns=TABLE.columns, rows=()), form)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(MemplanError, match="Unknown output 'mkd'"):
        render(TABLE, "mkd")


def test_the_ladder_table_compares_and_never_shows_a_missing_number_as_zero() -> None:
    failed = row_of(rung="B8c1@none", run_id="b", status="timeout", error="not done after 9 s", verdict="inconclusive")
    passed = row_of(gate_bytes=200 * MIB, verdict="pass")
    table = ladder_table([passed, failed], footer=provenance([passed, failed]))
    first, second = table.records()
    assert (first["headroom_bytes"], first["error_frac"]) == (100 * MIB, pytest.approx(-0.01))
    assert (first["step_ns"], first["samples_per_s"], first["peak_phase"]) == (2 * 10**9, 2.0, "backward")
    assert second["peak_allocated_bytes"] is None  # the windows before it died had a peak, the rung itself has none
    assert second["error_frac"] is None and second["headroom_bytes"] is None
    text = render(table)
    assert "B8c1@none: timeout: not done after 9 s" in text
    assert "gate 200.00 MiB on allocated bytes" in text
    assert "measured, cpu (Abacus), torch 2.13.0, commit abc1234" in text
    assert "model tiny, seq 64, loss full, precision fp32, optimizer adamw" in text


def test_a_gate_on_reserved_bytes_gives_headroom_over_reserved_bytes() -> None:
    row = row_of(gate_bytes=200 * MIB, gate_on="reserved", peak_reserved_bytes=150 * MIB)
    assert ladder_table([row]).records()[0]["headroom_bytes"] == 50 * MIB


def test_one_kernel_is_said_below_and_two_stand_in_the_table() -> None:
    failed = row_of(run_id="b", status="oom", attention={})
    one = [row_of(attention={"flash": 8}), row_of(run_id="c", attention={"flash": 4}), failed]
    assert "attention kernels flash\n" in render(ladder_table(one)) and "flash 8" not in render(ladder_table(one))
    assert "flash 8" in render(ladder_table(one), "csv")
    assert "flash 8" in render(ladder_table([*one, row_of(run_id="d", attention={"math": 4})]))


def test_what_names_all_rungs_looks_through_them_once() -> None:
    """With a look at every row for each row a ladder of thousands would take minutes."""

    class Counted(list[RungResult]):
        looks = 0

        def __iter__(self) -> Iterator[RungResult]:
            self.looks += 1
            return super().__iter__()

    rows = Counted(row_of(run_id=str(number), model=f"m{number % 2}") for number in range(50))
    label = labels(rows)
    looks = rows.looks
    assert [label(row) for row in list.__iter__(rows)][:2] == [f"m{number} {rows[number].rung}" for number in (0, 1)]
    assert rows.looks == looks <= 2


def test_each_machine_is_named_once() -> None:
    gpu = row_of(environment={"device": "cuda", "gpu": "H100", "driver": "570"})
    assert provenance([row_of(), row_of(), gpu]) == (
        "measured, cpu (Abacus), torch 2.13.0, commit abc1234",
        "measured, H100, driver 570",
    )


def test_the_peak_phase_is_the_largest() -> None:
    assert peak_phase(row_of()) == "backward"
    assert peak_phase(row_of(phase_peaks={})) is None
