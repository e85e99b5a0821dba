"""Summaries are as large as their reader takes, and say what they leave out."""

import re

import pytest
from rich_rows import HOSTILE, failed, hostile, ladder, rich
from samples import row_of

from memplan.analysis.comparison import Comparison, Finding
from memplan.report.summary import (
    COMMENT_BYTES,
    STEP_SUMMARY_BYTES,
    UNFOLDED,
    bounded,
    comparison_summary,
    ladder_summary,
)
from memplan.report.table import Column, Table
from memplan.units import MIB

KIB_64, ONE_MIB = 64 * 1024, 1024 * 1024


def many(count: int) -> list:  # type: ignore[type-arg]
    """A ladder of many rungs, the last of which fails."""
    rows = [rich(f"B{number}c1@none", 10 + number / 1000, 1.0, error="e" * 700) for number in range(1, count)]
    return [*rows, failed()]


def test_f51_a_summary_too_large_for_github_is_cut_worst_first_and_says_so() -> None:
    rows = many(1500)
    whole = ladder_summary(rows, 10**9)
    assert len(whole.encode()) > ONE_MIB > STEP_SUMMARY_BYTES  # uncut GitHub would show nothing at all
    for limit, most in ((STEP_SUMMARY_BYTES, ONE_MIB), (COMMENT_BYTES, KIB_64)):
        text = ladder_summary(rows, limit)
        assert len(text.encode()) <= limit < most
        [said] = [line for line in text.split("\n") if " left out, " in line]
        rows_left, lines_left = (re.search(rf"(\d+) {what}", said) for what in ("of 1500 rows", "lines"))
        shown = [line for line in text.split("\n") if line.startswith("| B")]
        assert len(shown) + int(rows_left[1] if rows_left else 0) == 1500
        assert lines_left and text.count("\n- ") + int(lines_left[1]) == whole.count("\n- ")
        assert shown[0].startswith("| B16c4@none |")  # the worst is there whatever the limit
        assert text.startswith("1499 of 1500 rungs hold the gate")


@pytest.mark.parametrize("limit", [1000, 5000, 20_000])
def test_f51_no_limit_is_passed_however_small(limit: int) -> None:
    for rows in (many(60), hostile(HOSTILE), hostile("é" * 10_000)):
        text = ladder_summary(rows, limit)
        assert len(text.encode()) <= limit
        assert text.count("<details>") == text.count("</details>")


def test_a_small_ladder_is_shown_whole() -> None:
    text = ladder_summary(ladder())
    assert "left out" not in text and "<details>" not in text
    assert text.count("\n| B") == 7
    assert "- B8c4@none: The GPU throttled while steps were timed." in text


def test_rows_beyond_the_first_are_folded_behind_a_blank_line() -> None:
    table = Table(columns=(Column(key="a", header="a"),), rows=tuple((number,) for number in range(UNFOLDED + 5)))
    text = bounded(["Fine."], table, STEP_SUMMARY_BYTES)
    assert "<details><summary>5 more rows</summary>\n\n| a |\n" in text  # GitHub reads a table only after a blank line
    assert text.endswith("| 24 |\n\n</details>\n")


def test_a_comparison_begins_with_its_verdict_and_its_worst_finding() -> None:
    found = [
        Finding(
            rung=f"B{number}", name=f"B{number}", model="tiny", run_id=str(number), source="measured",
            metric="peak_allocated_bytes", label="worse" if number == 0 else "same", unit="bytes", base=MIB,
            new=MIB * (2 if number == 0 else 1), change=1.0 if number == 0 else 0.0, num_base=1, num_new=1,
        )
        for number in range(2000)
    ]  # fmt: skip
    both = (row_of(),)
    comparison = Comparison(findings=tuple(found), base_name="a", new_name="b", base_rows=both, new_rows=both)
    text = comparison_summary(comparison, COMMENT_BYTES)
    assert len(text.encode()) <= COMMENT_BYTES
    assert text.startswith("1 of 2000 rungs needs more memory: B0 +1.00 MiB.")
    first = next(line for line in text.split("\n") if line.startswith("| B"))
    assert first.startswith("| B0 | peak | worse |")
    assert "rows left out" in text
