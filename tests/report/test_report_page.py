"""The page of a ladder: one file, no request, readable everywhere, and harmless whatever the rows say."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich_rows import HOSTILE, hostile, ladder
from samples import row_of

from memplan.errors import MemplanError, NothingMeasuredError
from memplan.record import append_row, read_results
from memplan.record.trace import Timeline
from memplan.report.page import report_folder, write_page
from memplan.report.render import render
from memplan.report.timeline_plot import StepStory, read_story
from memplan.units import MIB

REPORTS = Path(__file__).parents[2] / "reports"
STORY = StepStory(
    title="tiny B4c2@full",
    device="h100-80g",
    peak_allocated_bytes=3 * MIB,
    phase="backward",
    gate_bytes=4 * MIB,
    gate_name="gate",
    timeline=Timeline(
        bytes_by_category={"params": (MIB, MIB, MIB), "activations": (0, 2 * MIB, 0)},
        phases=((0, "forward"), (1, "backward")),
    ),
)
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Notes elements, attributes and words, and whether every element is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a whole ladder, with a timeline beside its rows."""
    folder = tmp_path_factory.mktemp("ladder")
    for row in ladder():
        append_row(folder / "ladder.jsonl", row)
    with (folder / "ladder.jsonl").open("a") as file:
        file.write('{"rung": "B1')  # the climb was killed here
    (folder / "timeline.json").write_text(json.dumps(STORY.to_dict()))
    report_folder(folder)
    return folder


def page_of(folder: Path) -> Reader:
    """The page in `folder`, well-formed."""
    reader = Reader((folder / "report.html").read_text(encoding="utf-8"))
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    return reader


def test_the_page_is_whole(folder: Path) -> None:
    names = ("peak", "throughput", "agreement", "phases", "timeline")
    made = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    made |= {"report.html", "table.md", "table.csv", "summary.json"}
    assert {path.name for path in folder.iterdir()} == made | {"ladder.jsonl", "timeline.json"}
    assert len((folder / "table.csv").read_text().splitlines()) == 8  # 7 rungs: repeats are one line


def test_the_page_says_everything_from_the_verdict_to_the_command(folder: Path) -> None:
    words = page_of(folder).words
    for said in (
        "4 of 7 rungs hold the gate of 71.00 GiB on allocated bytes; 2 do not; 1 came to no verdict (measured).",
        "Use B8c4@none",
        "B16c8@none was skipped: dominated_by B16c4@none",
        "asked for in vain: 2.00 GiB",
        "allocated until then: 77.00 GiB, so that more is needed",
        "decoder.blocks.*.mlp",
        "The GPU throttled while steps were timed.",
        "NVIDIA H100 80GB HBM3",
        "memplan ladder B16c4@none,B12c6@none,B12c6@full,B8c4@none,B8c4@full,B6c3@full --model molmo2-4b --gate 71GiB",
        "3.20 GiB over the gate",
        "torn",
    ):
        assert said in words, said


def test_the_page_asks_for_nothing_and_runs_nothing(folder: Path) -> None:
    reader = page_of(folder)
    assert not {"script", "iframe", "object", "embed", "img", "a", "form", "base"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    links = [value for name, value in reader.attributes if name in ("src", "href", "xlink:href", "action", "data")]
    assert all(link.startswith(("#", "data:")) for link in links)
    page = (folder / "report.html").read_text()
    assert "default-src 'none'" in page and "@import" not in page
    assert all(url.startswith("#") for url in re.findall(r"url\((.*?)\)", page))


def test_each_picture_has_words_and_follows_the_colours_of_the_page(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    pictures = re.findall(r'<svg [^>]*aria-label="([^"]+)"', page)
    assert len(pictures) == 10 and all(len(words) > 40 for words in pictures)  # a wide and a narrow one of each
    assert page.count('role="img"') == 10
    assert "prefers-color-scheme: dark" in page and "@media print" in page and "width=device-width" in page
    inside = "".join(re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL))
    assert "fill: #222222" not in inside and "var(--ink)" in inside  # words of a picture turn light in the dark


def test_a_phone_shows_rung_peak_headroom_and_verdict_first_and_narrow_pictures(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    heads = re.findall(r"<th [^>]*>([^<]*)</th>", page)
    assert heads[:5] == ["rung", "peak", "headroom", "verdict", "status"]
    wide, narrow = (re.search(rf'<svg id="{name}"[^>]*viewBox="0 0 ([\d.]+)', page) for name in ("peak", "peak-narrow"))
    assert wide is not None and narrow is not None
    assert float(narrow[1]) < 0.6 * float(wide[1])
    assert ".phone { display: none; }" in page and "max-width: 40rem" in page


def test_rungs_of_several_models_are_told_apart_in_the_first_column(tmp_path: Path) -> None:
    write_page([row_of(), row_of(model="tiny-wide", run_id="b")], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<tr><td>([^<]*)</td>", page)[:2] == [
        f"{model} {row_of().rung}" for model in ("tiny", "tiny-wide")
    ]


def test_repeats_are_one_line_of_medians(folder: Path) -> None:
    [line] = [line for line in csv.DictReader((folder / "table.csv").open()) if line["rung"] == "B12c6@full"]
    assert line["repeats"] == "3" and line["status"] == "ok"
    speeds = sorted(row.samples_per_s or 0 for row in ladder() if row.rung == "B12c6@full")
    assert float(line["samples_per_s"]) == pytest.approx(speeds[1])


def test_the_summary_for_scripts_is_plain_json(folder: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads((folder / "summary.json").read_text(), parse_constant=refuse)
    assert found["recommended"]["rung"] == "B8c4@none"
    assert [rung["verdict"] for rung in found["rungs"]].count("pass") == 4
    assert found["rungs"][0]["peak_allocated_bytes"] is None  # it failed: not 0


@pytest.mark.parametrize(
    "name", [HOSTILE, "x" * 10_000, "=A1*$a$ `b` | \u202e" + "שלום" * 9], ids=["markup", "long", "formula"]
)
def test_a_hostile_name_stays_harmless_in_every_file(tmp_path: Path, name: str) -> None:
    write_page(hostile(name), tmp_path)
    reader = page_of(tmp_path)
    assert not {"script", "img", "a", "iframe"} & set(reader.tags)
    for path in tmp_path.iterdir():
        if path.suffix != ".png":
            text = path.read_text(encoding="utf-8")
            assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text), path.name
    for row in csv.reader((tmp_path / "table.csv").open()):
        assert not any(cell.startswith(("=", "@", "+")) for cell in row)
    markdown = (tmp_path / "table.md").read_text()
    assert "<script" not in markdown and "<img" not in markdown and "](javascript" not in markdown.replace("\\]", "")
    assert len((tmp_path / "report.html").read_text()) < 500_000


def test_a_lone_half_of_a_pair_can_be_written(tmp_path: Path) -> None:
    write_page([row_of(rung="\ud800", error="\udfff")], tmp_path)
    assert "\\ud800" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("rows_file", sorted(REPORTS.glob("*/ladder.jsonl")), ids=lambda path: path.parent.name)
def test_every_ladder_that_is_kept_renders(rows_file: Path, tmp_path: Path) -> None:
    from memplan.report.html import html_page
    from memplan.report.ladder_table import ladder_table
    from memplan.report.plots import pictures
    from memplan.report.repeats import repeats_of
    from memplan.report.verdict import verdict_of

    rows = read_results(rows_file).rows
    rungs = repeats_of(rows)
    drawn, left_out = pictures(rungs)
    page = html_page(rows, rungs, verdict=verdict_of(rungs), left_out=left_out, pictures=[])
    assert {picture.name for picture in drawn} >= {"peak", "phases"}
    assert Reader(page).open == []
    assert len(render(ladder_table(rows), "csv").splitlines()) == len(rungs) + 1


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match="holds no ladder"):
        report_folder(tmp_path)
    with pytest.raises((MemplanError, NothingMeasuredError)):
        (tmp_path / "ladder.jsonl").write_text("")
        report_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ladder.jsonl"]


def test_a_story_survives_its_file_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(STORY.to_dict()))
    assert read_story(path) == STORY
    for text in ("{", "[]", '{"timeline": 3}', "{}"):
        path.write_text(text)
        with pytest.raises(MemplanError, match="not the timeline of a step"):
            read_story(path)
