"""Pictures are made of any rows, failed ones included, and leave nothing global behind."""

import subprocess
import sys
from pathlib import Path

import pytest
from samples import row_of

from memplan.record import RungResult
from memplan.report.page import write_page
from memplan.report.plots import peak_plot, throughput_plot
from memplan.report.timeline_plot import labelled
from memplan.units import GIB

FAILED = row_of(rung="B8c1@none", run_id="b", status="oom", peak_allocated_bytes=None, step_ns=(), estimated_bytes=None)
CASES = {
    "one": [row_of()],
    "gate": [row_of(gate_bytes=GIB), row_of(status="over_gate", gate_bytes=GIB, peak_allocated_bytes=2 * GIB)],
    "failed": [FAILED],
    "mixed": [row_of(), FAILED, row_of(model="tiny-wide", rung="B2c1@full")],
    "none": [],
}


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_both_pictures_are_drawn(tmp_path: Path, rows: list[RungResult]) -> None:
    for draw in (peak_plot, throughput_plot):
        path = tmp_path / f"{draw.__name__}.png"
        draw(rows, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_names_of_close_points_do_not_cover_one_another() -> None:
    from memplan.report.plots import _figure, _name_points

    figure, axes = _figure(4.6)
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    _name_points(figure, axes, [(5.0, 5.0, "B12c6@none"), (5.1, 5.1, "B12c6@full"), (5.0, 5.2, "B12c4@full")])
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == 3
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row_of(source="simulated")], ["simulated"]),
        ([row_of(), row_of(source="simulated")], ["measured or simulated"]),
        ([row_of(source="simulated", status="oom")], ["simulated", "simulated, out of memory"]),
        ([row_of(status="over_gate")], ["measured", "measured, over the gate"]),
    ],
)
def test_the_legend_says_which_witness_spoke(rows: list[RungResult], words: list[str]) -> None:
    from memplan.report.plots import _figure, _legend

    for kind in ("bar", "point"):
        figure, _ = _figure(4.6)
        _legend(figure, rows, (kind,))
        assert [text.get_text() for text in figure.legends[0].get_texts()] == words


def test_a_long_phase_is_named_before_a_short_one() -> None:
    """The loss is a sliver at the start of backward; its name would stand over backward's stretch."""
    phases = [(0, "forward"), (400, "loss"), (405, "backward"), (970, "optimizer")]
    assert labelled(phases, 1000) == [(0, "forward"), (405, "backward")]
    assert labelled([], 0) == []


def test_the_page_is_whole(tmp_path: Path) -> None:
    write_page([row_of(), FAILED], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peak.png", "table.csv", "table.md", "throughput.png"]
    assert (tmp_path / "table.md").read_text().startswith("| rung |")
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 3


def test_pyplot_is_never_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from memplan.report.plots import peak_plot; "
        f"peak_plot([], Path({str(tmp_path / 'x.png')!r})); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
