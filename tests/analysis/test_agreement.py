"""Estimate against measurement: errors by hand, the worst first, nothing unmeasured in the statistic."""

import pytest
from samples import row_of

from memplan.analysis import agreement
from memplan.report.ladder_table import agreement_table
from memplan.report.render import render


def test_errors_are_sorted_and_summed_up() -> None:
    rows = [
        row_of(rung="B1c1@none", estimated_bytes=1000, peak_allocated_bytes=1000),
        row_of(rung="B2c1@none", estimated_bytes=970, peak_allocated_bytes=1000),
        row_of(rung="B3c1@none", estimated_bytes=1010, peak_allocated_bytes=1000, status="over_gate"),
        row_of(rung="B4c1@none", status="killed"),
        row_of(rung="B5c1@none", status="oom", peak_allocated_bytes=None),
        row_of(rung="B6c1@none", estimated_bytes=None),
    ]
    found = agreement(rows)
    assert [pair.row.rung for pair in found.pairs] == ["B2c1@none", "B3c1@none", "B1c1@none"]
    assert found.num_without == 3
    assert found.largest_frac == pytest.approx(0.03)
    assert found.median_frac == pytest.approx(0.01)
    assert (found.exit_code(0.031), found.exit_code(0.029)) == (0, 1)
    text = render(agreement_table(found), "md")
    assert "3 rows: largest error 3.00 %, median 1.00 %" in text
    assert "3 rows without both numbers are left out" in text
    assert text.index("B2c1") < text.index("B3c1") < text.index("B1c1")


def test_nothing_measured_is_no_agreement() -> None:
    assert agreement([]).exit_code(0.02) == 3
    assert agreement([row_of(status="error")]).exit_code(0.02) == 3
