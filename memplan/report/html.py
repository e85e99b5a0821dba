"""A ladder as one page that needs nothing else: no script, no request, light and dark, for screens and for print."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memplan
from memplan.record import RungResult
from memplan.report.failures import failure_lines
from memplan.report.figures import Picture
from memplan.report.ladder_columns import NAMES, SPEED
from memplan.report.ladder_table import labels, ladder_table, provenance
from memplan.report.outside import LINE_CHARS, visible, visible_lines
from memplan.report.render import html_table
from memplan.report.repeats import Repeats
from memplan.report.table import Column, Table
from memplan.report.trace_page import tensor_table
from memplan.report.verdict import NAME_CHARS, Verdict, commands
from memplan.units import format_bytes

TEMPLATES = Path(__file__).with_name("templates")
"""Folder of the page's template."""
FIRST = ("rung", "peak_allocated_bytes", "headroom_bytes", "verdict", "status")
"""Columns of memory that a phone shows without scrolling."""
LABELLED = ("model", "loss")
"""Columns that the page says in the rung's name."""
MOST_FAILURES = 30
"""Rungs whose failure is told at length."""
TEXT_CHARS = 6000
"""Characters of an error's full text."""
MOST_ENVIRONMENTS = 4
"""Machines that stand side by side."""


def html_page(
    rows: Sequence[RungResult],
    rungs: Sequence[Repeats],
    *,
    verdict: Verdict,
    left_out: Sequence[str],
    pictures: Sequence[tuple[Picture, str, str]],
) -> str:
    """The page. `pictures` come with their SVG elements, a wide and a narrow one, which are trusted; everything else
    is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    engine = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    table = ladder_table(rows, footer=provenance(rows), errors=False).folded()
    keys = {column.key for column in table.columns}
    timed = "step_ns" in keys
    label = labels(rows)
    table = _named(table, [label(rung.row) for rung in rungs])
    memory = table.only(keys - {*LABELLED, *(SPEED if timed else ())}).led_by(FIRST)
    speed = table.only(keys & {*NAMES, *SPEED} - {*LABELLED})
    models = ", ".join(dict.fromkeys(row.model for row in rows)) or "no rows"
    failures, more = _failures(rungs)
    return engine.get_template("report.html.j2").render(
        version=memplan.__version__,
        title=f"Memory of {visible(models, 2 * NAME_CHARS)}",
        verdict=verdict.sentences,
        tone=verdict.tone,
        memory=Markup(html_table(memory)),
        speed=Markup(html_table(speed)) if timed else "",
        lines=[visible(line, LINE_CHARS) for line in table.footer],
        pictures=[
            {"title": one.title, "caption": one.caption, "wide": Markup(wide), "narrow": Markup(narrow)}
            for one, wide, narrow in pictures
        ],
        failures=failures,
        left_out=[*left_out, *more],
        environment=Markup(html_table(environment_table(rows))),
        commands=commands(rows) or ["memplan ladder"],
        num_rows=len(rows),
    )


def _named(table: Table, names: Sequence[str]) -> Table:
    """A ladder's `table` with other names in its first column."""
    rows = tuple((name, *values[1:]) for name, values in zip(names, table.rows, strict=True))
    return dataclasses.replace(table, rows=rows)


def environment_table(rows: Sequence[RungResult]) -> Table:
    """Machine, versions and settings, a column for each set of them among `rows`."""
    found: list[dict[str, Any]] = []
    for row in rows:
        facts = {key: value for key, value in row.environment.items() if key != "note"}
        if facts and facts not in found:
            found.append(facts)
    shown = found[:MOST_ENVIRONMENTS]
    keys = list(dict.fromkeys(key for facts in shown for key in facts))
    columns = (
        Column(key="what", header="what", align="left"),
        *(Column(key=str(number), header=f"machine {number}", align="left") for number in range(1, len(shown) + 1)),
    )
    lines = [f"{len(found) - len(shown)} more are in ladder.jsonl"] * (len(found) > len(shown))
    values = tuple((visible(key, 60), *(_fact(key, facts.get(key)) for facts in shown)) for key in keys)
    return Table(columns=columns, rows=values, footer=tuple(lines))


def _fact(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return ", ".join(f"{name}={_fact(str(name), each) or 'none'}" for name, each in value.items()) or None
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value) or None
    if isinstance(value, int) and key.endswith("_bytes"):
        return format_bytes(value)
    return str(value)


def _failures(rungs: Sequence[Repeats]) -> tuple[list[dict[str, Any]], list[str]]:
    """What to tell of each rung that failed, and a sentence where there are too many."""
    from markupsafe import Markup

    rows = [row for rung in rungs for row in rung.rows if row.kind not in ("ok", "skipped")]
    told, label = [], labels(rows)
    for row in rows[:MOST_FAILURES]:
        failure = row.failure
        alive = () if failure is None else failure.alive
        repeat = f", repeat {row.repeat}" if row.repeat > 1 else ""
        told.append(
            {
                "name": visible(label(row), 2 * NAME_CHARS) + repeat,
                "status": visible(row.status, NAME_CHARS),
                "lines": failure_lines(row),
                "alive": Markup(html_table(tensor_table(alive, "alive then").folded())) if alive else "",
                "text": visible_lines(failure.text, TEXT_CHARS) if failure is not None and failure.text else "",
            }
        )
    more = len(rows) - len(told)
    return told, [f"{more} more failures: their errors stand in table.md"] if more > 0 else []
