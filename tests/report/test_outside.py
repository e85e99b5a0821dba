"""Text from outside, harmless in each medium."""

import pytest

from memplan.report.outside import for_markdown, for_plot, for_spreadsheet, visible, visible_lines
from memplan.report.render import render
from memplan.report.table import Column, Table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("B12c6@every:2 Größe 模型", "B12c6@every:2 Größe 模型"),
        ("a\tb\nc\u00a0d", "a b c d"),
        ("\x1b[31mred\x00", "\\x1b[31mred\\x00"),
        ("\u202egpj.exe\u2066\u200b", "\\u202egpj.exe\\u2066\\u200b"),
        ("\ud800\ufffe\u2028", "\\ud800\\ufffe\\u2028"),
    ],
)
def test_what_does_not_show_itself_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode()  # a lone half of a pair could not be


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert visible("B12c6" + "x" * 9990 + "@full", 30) == "B12c6" + "x" * 14 + "…" + "xxxxx@full"
    assert visible_lines("a\nb" + "c" * 100, 5) == "a\nbcc…"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("B4c2@every:2 over_gate 1.5e-3 (a-b) 5 %", "B4c2@every:2 over_gate 1.5e-3 (a-b) 5 %"),
        ("<script>&", "&lt;script&gt;&amp;"),
        ("[a](javascript:b) ![i](x)", "\\[a\\](javascript:b) !\\[i\\](x)"),
        ("*b* _c_ ~~d~~ `e` $f$ a|b", "\\*b\\* \\_c\\_ \\~\\~d\\~\\~ \\`e\\` \\$f\\$ a\\|b"),
        ("@team #12 x#1", "&#64;team &#35;12 x#1"),
        ("https://evil www.evil", "https&#58;//evil www&#46;evil"),
        ("a\n# heading", "a # heading"),
    ],
)
def test_markdown_shows_letters(text: str, written: str) -> None:
    assert for_markdown(text) == written


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1+cmd", "@SUM(A1)", "\t=1", "\r=1", " =1"])
def test_no_cell_is_a_formula(text: str) -> None:
    assert for_spreadsheet(text).startswith("'")
    table = Table(columns=(Column(key="a", header="a"),), rows=((text,), (-1.5,), (None,)))
    first, second, third = render(table, "csv").split("\n")[1:] + [""] * (3 - len(render(table, "csv").split("\n")[1:]))
    assert first.strip('"').startswith("'")
    assert second == "-1.5"  # a number stays one
    assert third in ("", '""')


def test_a_picture_takes_no_dollars_for_a_formula() -> None:
    assert for_plot("a$b$") == r"a\$b\$"


def test_a_number_that_is_none_is_never_zero() -> None:
    table = Table(
        columns=(Column(key="a", header="a", text=lambda value: f"{value:.2f}"),), rows=((float("nan"),), (1.0,))
    )
    assert table.texts() == [["-"], ["1.00"]]
    assert render(table, "json").count("null") == 1
    assert "NaN" not in render(table, "json") and "nan" not in render(table, "csv")


def test_a_folded_table_hides_nothing_more_of_its_parts() -> None:
    columns = (Column(key="a", header="a"), Column(key="b", header="b", hide_constant=True))
    folded = Table(columns=columns, rows=((1, 1), (2, 2))).folded()
    part = Table(columns=folded.columns, rows=folded.rows[:1]).folded()
    assert [column.key for column in part.columns] == ["a", "b"]


def test_html_escapes_and_marks_what_is_good_and_bad() -> None:
    columns = (Column(key="a", header="<b>", align="left"), Column(key="b", header="n"))
    text = render(Table(columns=columns, rows=(("pass", 1), ("<i>", 2), ("fail", 3)), footer=("x & y",)), "html")
    assert '<td class="green">pass</td><td class="number">1</td>' in text
    assert '<td class="red">fail</td>' in text
    assert "&lt;b&gt;" in text and "&lt;i&gt;" in text and "x &amp; y" in text
    assert "<i>" not in text
