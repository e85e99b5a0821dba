"""Witnesses against published figures: errors by hand, the worst first, upper bounds apart."""

from pathlib import Path

import pytest

from memplan.analysis.published import PublishedPair, worst_first
from memplan.report.published_table import published_table
from memplan.report.render import render
from memplan.spec.device import card
from memplan.spec.published import Published


def pair(
    name: str,
    traced: int | None,
    estimated: int | None = None,
    *,
    compiled: bool = False,
    longest: bool = False,
    rounding: int = 0,
) -> PublishedPair:
    row = Published(
        name=name,
        source="a page",
        figure_bytes=1000,
        rounding_bytes=rounding,
        reads="allocated",
        window="steady",
        compiled=compiled,
        longest=longest,
        device=card("a100-80g"),
        step=(Path("step.py"), "make"),
        arguments={},
        question=None,
        sizes=None,
        above_start=False,
    )
    return PublishedPair(row=row, traced_bytes=traced, estimated_bytes=estimated)


def test_errors_are_sorted_and_upper_bounds_come_last() -> None:
    pairs = worst_first([pair("A", 1001), pair("B", 1300, compiled=True), pair("C", 980, 1100)])
    assert [found.row.name for found in pairs] == ["C", "A", "B"]
    assert pairs[0].traced_error_frac == pytest.approx(-0.02)
    assert pairs[0].estimated_error_frac == pytest.approx(0.1)
    assert pairs[1].estimated_error_frac is None
    text = render(published_table(pairs), "md")
    assert "trace of 2 exact rows: largest error 2.00 %, median 1.05 %" in text
    assert "estimate of 1 exact rows: largest error 10.00 %, median 10.00 %" in text
    assert "upper bound" in text


def test_a_row_that_is_not_traced_is_judged_by_the_estimate() -> None:
    pairs = worst_first([pair("A", 1010, 1500), pair("B", None, 1030), pair("C", None, 990, compiled=True)])
    assert [found.row.name for found in pairs] == ["B", "A", "C"]
    assert pairs[0].traced_error_frac is None
    assert [found.holds(0.02) for found in pairs] == [False, True, True]
    assert not pair("D", None, 970, compiled=True).holds(0.02)
    assert pair("E", None, 1500, longest=True).holds(0.02)
    text = render(published_table(pairs), "md")
    assert "rows without a trace are judged by the estimate" in text
    assert "trace of 1 exact rows: largest error 1.00 %" in text


def test_an_upper_bound_holds_above_the_figure_only() -> None:
    assert [pair("A", traced).holds(0.02) for traced in (979, 981, 1019, 1021)] == [False, True, True, False]
    assert [pair("A", traced, compiled=True).holds(0.02) for traced in (979, 981, 1500)] == [False, True, True]


def test_a_witness_that_prints_as_the_figure_holds() -> None:
    assert [pair("A", traced, rounding=50).holds(0.02) for traced in (949, 951, 1049, 1051)] == [
        False,
        True,
        True,
        False,
    ]
