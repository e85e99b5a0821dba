"""The folder of a climb: tables, pictures and a page, made from its rows alone."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memplan.analysis.recommend import recommend
from memplan.errors import NothingMeasuredError
from memplan.record import RungResult, read_results
from memplan.record.memory import SCHEMA_VERSION
from memplan.report.figures import PHONE_INCHES, inline_svg, save, svg_text
from memplan.report.html import html_page
from memplan.report.ladder_table import ladder_table, provenance
from memplan.report.plots import pictures
from memplan.report.render import render
from memplan.report.repeats import repeats_of
from memplan.report.table import Table
from memplan.report.timeline_plot import TIMELINE_FILE, StepStory, read_story
from memplan.report.verdict import commands, left_out, verdict_of


def report_folder(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes the page of the rows in `folder`, or in a jsonl file, into `out`, or beside them; the files. MemplanError
    where there are no rows."""
    results = read_results(folder)
    if not results.rows:
        raise NothingMeasuredError(f"{folder} has no rows.")
    beside = folder.parent if folder.is_file() else folder
    out = out or beside
    out.mkdir(parents=True, exist_ok=True)
    story_file = beside / TIMELINE_FILE
    story = read_story(story_file) if story_file.exists() else None
    return write_page(results.rows, out, story=story, warnings=results.warnings)


def write_page(
    rows: Sequence[RungResult], folder: Path, *, story: StepStory | None = None, warnings: Sequence[str] = ()
) -> list[Path]:
    """Writes `report.html`, `table.md`, `table.csv`, `summary.json` and each picture as PNG and SVG into `folder`; the
    files. Pictures for which there is nothing to draw are left out, and the page says why."""
    rungs, recommended = repeats_of(rows), recommend(rows)
    table = ladder_table(rows, footer=provenance(rows))
    use = None if recommended is None else recommended.row
    drawn, without = pictures(rungs, recommended=use, story=story)
    narrow, _ = pictures(rungs, recommended=use, story=story, inches=PHONE_INCHES)
    verdict, missed = verdict_of(rungs, recommended), [*warnings, *left_out(rungs, without)]
    texts = {"table.md": render(table, "md"), "table.csv": render(table, "csv")}
    shown = []
    for picture, small in zip(drawn, narrow, strict=True):
        svg = svg_text(picture)
        texts[f"{picture.name}.svg"] = svg
        small = dataclasses.replace(small, name=f"{small.name}-narrow")
        shown.append((picture, inline_svg(picture, svg), inline_svg(small, svg_text(small))))
    texts["report.html"] = html_page(rows, rungs, verdict=verdict, left_out=missed, pictures=shown)
    texts["summary.json"] = json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "verdict": list(verdict.sentences),
            "tone": verdict.tone,
            "recommended": None if recommended is None else {"rung": recommended.row.rung,
                                                             "run_id": recommended.row.run_id,
                                                             "why": recommended.sentence},
            "rungs": _records(table, [rung.row.run_id for rung in rungs]),
            "left_out": missed,
            "commands": commands(rows),
        },
        indent=2,
    )  # fmt: skip
    if story is not None:
        texts[TIMELINE_FILE] = json.dumps(story.to_dict())
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    for picture in drawn:
        save(picture.figure, folder / f"{picture.name}.png")
    return [folder / name for name in sorted([*texts, *(f"{picture.name}.png" for picture in drawn)])]


def _records(table: Table, run_ids: Sequence[str]) -> list[dict[str, Any]]:
    return [{"run_id": run_id} | record for run_id, record in zip(run_ids, table.records(), strict=True)]
