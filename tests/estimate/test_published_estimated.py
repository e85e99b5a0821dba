"""Published steps over the ledger, against the figures that were printed."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from memplan import api
from memplan.spec.published import Published, read_published
from memplan.units import MIB

FOLDER = Path(__file__).parents[2] / "ladders" / "published"
LAYER_FRAC = 2.0**-24
"""Single layers and losses of Liger-Kernel are met to their last digit, printed by way of float32."""
UNSPLIT_BYTES = {"LK-015": MIB // 4}
"""What the allocator leaves unsplit there, after all that the script ran before: tests/trace/test_published.py."""
STEP_FRAC = 0.005
"""Whole steps lack what the allocator leaves unsplit behind a large tensor."""
BY_QUESTION_FRAC = 0.015
"""Steps that a question describes are memplan's own."""


def bar(row: Published) -> float:
    """The largest error that a row may have."""
    if row.sizes is None:
        return BY_QUESTION_FRAC
    if row.name.startswith("CE-"):
        return row.rounding_bytes / row.figure_bytes
    return UNSPLIT_BYTES.get(row.name, 0) / row.figure_bytes + LAYER_FRAC if row.name.startswith("LK-") else STEP_FRAC


ROWS = read_published(FOLDER)
SLOW = {"LG-013", "LG-017", "LG-023", "LG-029", "LG-035", "LG-037", "LG-039"}
"""Large ones, of which smaller ones of the same kind stay."""


def params(rows: Iterable[Published]) -> list[Any]:
    """The rows, each under its name."""
    return [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name in SLOW)) for row in rows]


def test_every_published_row_can_be_estimated() -> None:
    assert [row.name for row in ROWS if row.sizes is None and row.question is None] == []


@pytest.mark.parametrize("row", params(row for row in ROWS if not row.is_bounded))
def test_a_published_peak_is_estimated(row: Published) -> None:
    estimated = api.estimated_published(row)
    assert estimated is not None
    assert abs(estimated / row.figure_bytes - 1) <= bar(row)


@pytest.mark.parametrize("row", params(row for row in ROWS if row.is_bounded))
def test_an_estimate_that_is_held_as_an_upper_bound_is_one(row: Published) -> None:
    estimated = api.estimated_published(row)
    assert estimated is not None
    assert estimated >= row.figure_bytes


@pytest.mark.parametrize("row", params(row for row in ROWS if row.longest))
def test_a_figure_over_samples_of_unknown_lengths_lies_above_the_shortest(row: Published) -> None:
    shortest = dataclasses.replace(row, arguments=row.arguments | {"seq": 2})
    estimated = api.estimated_published(shortest)
    assert estimated is not None
    assert estimated <= row.figure_bytes
