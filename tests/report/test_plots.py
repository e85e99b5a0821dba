"""Pictures are made of any rows, failed ones included, and leave nothing global behind."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from rich_rows import HOSTILE, failed, hostile, ladder, rich
from samples import row_of

from memplan.analysis.recommend import recommend
from memplan.record import RungResult
from memplan.record.trace import Timeline
from memplan.report.figures import (
    CATEGORY_LOOKS,
    MOST_DRAWN,
    PHONE_INCHES,
    SHEET_INCHES,
    drawn,
    inline_svg,
    name_of,
    save,
    svg_text,
)
from memplan.report.figures_agreement import agreement_picture
from memplan.report.figures_peak import peak_picture, phases_picture
from memplan.report.figures_speed import front, name_points, speed_picture
from memplan.report.plots import pictures
from memplan.report.repeats import repeats_of
from memplan.report.timeline_plot import labelled, thinned
from memplan.units import GIB

FAILED = row_of(rung="B8c1@none", run_id="b", status="oom", peak_allocated_bytes=None, step_ns=(), estimated_bytes=None)
CASES = {
    "one": [row_of()],
    "gate": [row_of(gate_bytes=GIB), row_of(run_id="b", status="over_gate", gate_bytes=GIB, verdict="fail")],
    "failed": [FAILED],
    "mixed": [row_of(), FAILED, row_of(model="tiny-wide", rung="B2c1@full")],
    "none": [],
}


def words_of(figure: object) -> list[str]:
    """Everything that the legend of `figure` says."""
    return [text.get_text() for text in figure.legends[0].get_texts()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_a_picture_of_the_peak_is_drawn_of_any_rows(tmp_path: Path, rows: list[RungResult]) -> None:
    path = tmp_path / "peak.png"
    save(peak_picture(repeats_of(rows)).figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_what_there_is_nothing_to_draw_for_is_left_out_and_said() -> None:
    found, left_out = pictures(repeats_of([FAILED]))
    assert [picture.name for picture in found] == ["peak"] + ["phases"] * bool(FAILED.phase_peaks)
    assert "throughput against memory: no rung was timed" in left_out
    assert any("timeline.json" in line for line in left_out)


def test_the_bar_is_stacked_by_category_and_its_parts_add_up_to_the_peak() -> None:
    row = rich("B8c4@none", 69.4, 4.6)
    axes = peak_picture(repeats_of([row])).figure.axes[0]
    widths = [bar.get_width() for bar in axes.patches if bar.get_hatch() is not None or bar.get_facecolor()[3]]
    assert len(widths) >= 7
    ends = max(bar.get_x() + bar.get_width() for bar in axes.patches if bar.get_height() > 0.5)
    assert ends == pytest.approx(69.4, rel=1e-6)


def test_colours_and_hatches_tell_the_categories_apart_twice() -> None:
    looks = list(CATEGORY_LOOKS.values())
    assert len({color for color, _ in looks}) == len(looks)
    names = list(CATEGORY_LOOKS)
    for one, two in itertools.pairwise(names):  # neighbours of a stack
        assert CATEGORY_LOOKS[one] != CATEGORY_LOOKS[two]
        assert CATEGORY_LOOKS[one][1] != CATEGORY_LOOKS[two][1] or {one, two} == {"params", "buffers"}


def test_a_rung_that_died_shows_what_it_had_reached_as_a_lower_bound() -> None:
    picture = peak_picture(repeats_of([failed()]))
    assert "B16c4@none oom above 77.00 GiB" in picture.alt
    assert any(text.get_text() == "≥ 77.00 GiB" for text in picture.figure.axes[0].texts)
    assert "reached before it failed" in words_of(picture.figure)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row_of(source="simulated", estimated_bytes=None)], ["simulated"]),
        ([row_of(estimated_bytes=None), row_of(run_id="b", source="simulated", estimated_bytes=None)],
         ["measured or simulated"]),
        ([row_of(source="simulated", status="oom", verdict="fail")],
         ["simulated", "simulated, out of memory", "estimated"]),
        ([row_of(status="over_gate", verdict="fail")], ["measured", "measured, over the gate", "estimated"]),
    ],
)  # fmt: skip
def test_the_legend_says_which_witness_spoke(rows: list[RungResult], words: list[str]) -> None:
    assert words_of(peak_picture(repeats_of(rows)).figure) == words


def test_names_of_close_points_do_not_cover_one_another() -> None:
    from memplan.report.figures import sheet

    figure, axes = sheet(4.6)
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    name_points(figure, axes, [(5.0, 5.0, "B12c6@none"), (5.1, 5.1, "B12c6@full"), (5.0, 5.2, "B12c4@full")])
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == 3
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)


def test_the_front_holds_whom_nobody_beats_in_both() -> None:
    points = [(10.0, 1.0), (12.0, 3.0), (12.0, 2.0), (15.0, 2.5), (20.0, 4.0), (21.0, 4.0)]
    assert front(points) == [0, 1, 4]
    assert front([]) == []


def test_the_throughput_of_repeats_is_one_point_and_the_recommended_rung_is_named() -> None:
    rows = ladder()
    found = recommend(rows)
    assert found is not None
    picture = speed_picture(repeats_of(rows), found.row)
    assert picture is not None
    assert picture.alt.count("B12c6@full") == 1
    assert picture.alt.endswith(f"Recommended: {found.row.rung}.")
    assert {"Pareto front", "recommended", "over the gate, or failed"} <= set(words_of(picture.figure))
    assert "B16c4@none (oom)" in "".join(text.get_text() for text in picture.figure.axes[0].texts)


def test_witnesses_stand_side_by_side_with_their_errors() -> None:
    picture = agreement_picture(repeats_of([rich("B8c4@none", 60, 4.6)]))
    assert picture is not None
    assert "estimated -1.00 %, traced +0.20 %" in picture.alt
    assert words_of(picture.figure) == ["estimated", "traced", "measured"]
    simulated = rich("B8c4@none", 60, None, source="simulated", estimated_bytes=None)
    assert agreement_picture(repeats_of([simulated])) is None  # the trace has nobody to stand beside


def test_each_phase_has_a_mark_and_the_highest_is_named() -> None:
    picture = phases_picture(repeats_of([rich("B8c4@none", 60, 4.6)]))
    assert picture is not None
    assert "B8c4@none peaks in backward with 60.00 GiB" in picture.alt
    assert phases_picture(repeats_of([failed()])) is None


def test_more_rungs_than_fit_are_cut_to_the_worst_in_their_order() -> None:
    rows = [rich(f"B{number}c1@none", 40 + number / 10, 1.0) for number in range(1, MOST_DRAWN + 11)]
    rungs = drawn(repeats_of(rows))
    assert [rung.row.rung for rung in rungs] == [row.rung for row in rows[10:]]
    assert f"pictures show {MOST_DRAWN} of {MOST_DRAWN + 10} rungs" in " ".join(pictures(repeats_of(rows))[1])


def test_a_long_phase_is_named_before_a_short_one() -> None:
    """The loss is a sliver at the start of backward; its name would stand over backward's stretch."""
    phases = [(0, "forward"), (400, "loss"), (405, "backward"), (970, "optimizer")]
    assert labelled(phases, 1000) == [(0, "forward"), (405, "backward")]
    assert labelled([], 0) == []


def test_a_long_story_is_thinned_and_keeps_its_peak() -> None:
    story = Timeline(
        bytes_by_category={"params": (1,) * 1000, "logits": (*([0] * 777), 9, *([0] * 222))},
        phases=((0, "forward"), (770, "loss")),
    )
    short = thinned(story, 100)
    assert len(short.bytes_by_category["params"]) == 100
    assert short.bytes_by_category["logits"][77] == 9
    assert short.phases == ((0, "forward"), (77, "loss"))
    assert thinned(short, 100) is short


def test_a_name_that_is_a_formula_is_drawn_letter_by_letter() -> None:
    rungs = repeats_of([row_of(rung="a$x^{2}$b"), row_of(run_id="b", rung="$\\frac{broken$")])
    picture = peak_picture(rungs)
    svg = svg_text(picture)
    assert "a$x^{2}$b" in svg and "$\\frac{broken$" in svg
    assert len(name_of(repeats_of([row_of(rung="x" * 10_000)])[0], [])) <= 36


def test_hostile_names_stay_words_in_a_picture_of_the_page() -> None:
    from xml.etree import ElementTree

    picture = peak_picture(repeats_of(hostile(HOSTILE)))
    svg = inline_svg(picture, svg_text(picture))
    root = ElementTree.fromstring(svg)  # well-formed: no control character, nothing broken out
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg", "g", "path", "defs", "style", "clipPath", "rect", "use", "text", "pattern",
    }  # fmt: skip
    assert "\u202e" not in svg and "<script" not in svg


def test_the_same_rows_give_the_same_svg_and_leave_settings_alone() -> None:
    from matplotlib import rcParams

    before = dict(rcParams)
    rungs = repeats_of([row_of()])
    assert svg_text(peak_picture(rungs)) == svg_text(peak_picture(rungs))
    assert dict(rcParams) == before


def test_pyplot_is_never_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from memplan.report.plots import pictures; "
        "from memplan.report.figures import save; "
        f"save(pictures([])[0][0].figure, Path({str(tmp_path / 'x.png')!r})); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inches", [SHEET_INCHES, PHONE_INCHES])
def test_rungs_that_all_failed_or_need_nothing_are_drawn_without_a_warning(inches: float) -> None:
    """A number of 0 bytes leaves an axis without a length."""
    for rows in (
        [FAILED],
        [failed(estimated_bytes=0, failure=None, gate_bytes=None)],
        [row_of(peak_allocated_bytes=0)],
    ):
        for picture in pictures(repeats_of(rows), inches=inches)[0]:
            assert svg_text(picture)


def test_a_narrow_picture_has_its_names_and_numbers_inside() -> None:
    """Letters of a phone's picture are as large as on paper, so that nothing has room beside the bars."""
    rungs = repeats_of([*ladder(), row_of(rung="B1c1@" + "x" * 99, run_id="long")])
    for picture in pictures(rungs, inches=PHONE_INCHES)[0]:
        figure = picture.figure
        figure.draw_without_rendering()
        renderer = figure.canvas.get_renderer()
        words = [text for text in figure.axes[0].texts if picture.name != "throughput"]
        boxes = [text.get_window_extent(renderer) for text in words] + [figure.legends[0].get_window_extent(renderer)]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width + 1 for box in boxes), picture.name
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes[1:], 2)), picture.name


def test_a_legend_of_every_entry_stays_on_the_sheet() -> None:
    every = dict.fromkeys(CATEGORY_LOOKS, GIB)
    rows = [rich("B4c1@none", 9, 1.0, breakdown=every, peak_allocated_bytes=9 * GIB), failed()]
    rows.append(rich("B8c1@none", 80, 1.0, breakdown={}, gate_on="reserved"))
    figure = peak_picture(repeats_of(rows)).figure
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent(figure.canvas.get_renderer())
    assert len(words_of(figure)) >= 13
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width
