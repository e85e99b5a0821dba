"""Published steps over the ledger, against the figures that were printed."""

from pathlib import Path

import pytest

from memplan import api
from memplan.spec.published import Published, read_published

FOLDER = Path(__file__).parents[2] / "ladders" / "published"
LAYER_FRAC = 0.001
"""Single layers and losses are met to their printed digits."""
STEP_FRAC = 0.005
"""Whole steps lack what the allocator leaves unsplit behind a large tensor."""
BY_QUESTION_FRAC = 0.015
"""Steps that a question describes are memplan's own."""


def bar(row: Published) -> float:
    """The largest error that a row may have."""
    if row.sizes is None:
        return BY_QUESTION_FRAC
    return LAYER_FRAC if row.name.startswith("LK-") else STEP_FRAC


ROWS = read_published(FOLDER)


def test_every_published_row_can_be_estimated() -> None:
    assert [row.name for row in ROWS if row.sizes is None and row.question is None] == []


@pytest.mark.parametrize("row", [row for row in ROWS if not row.compiled], ids=lambda row: row.name)
def test_a_published_peak_of_an_eager_step_is_estimated(row: Published) -> None:
    estimated = api.estimated_published(row)
    assert estimated is not None
    assert abs(estimated / row.figure_bytes - 1) <= bar(row)


@pytest.mark.parametrize("row", [row for row in ROWS if row.compiled], ids=lambda row: row.name)
def test_the_estimate_of_a_compiled_step_is_an_upper_bound(row: Published) -> None:
    estimated = api.estimated_published(row)
    assert estimated is not None
    assert estimated >= row.figure_bytes
