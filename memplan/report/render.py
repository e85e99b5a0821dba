"""One table, six looks: for a terminal, for a log, Markdown, a page, csv, json and jsonl."""

import html
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from memplan.errors import MemplanError, near_names
from memplan.report.outside import CELL_CHARS, LINE_CHARS, for_markdown, for_spreadsheet, visible
from memplan.report.table import Table

STYLE = Path(__file__).with_name("templates") / "style.css"
"""How pages look."""
FORMS = ("table", "json", "jsonl", "md", "csv", "html")
WRAP_FROM = 32
"""Characters from which a cell may be wrapped. On a terminal a table that does not fit even so is printed plain."""
STATUS_STYLES = {
    "pass": "green",
    "ok": "green",
    "same": "green",
    "fail": "red",
    "over_gate": "red",
    "oom": "red",
    "error": "red",
    "differs": "red",
    "missing": "red",
    "timeout": "yellow",
    "killed": "yellow",
    "inconclusive": "yellow",
    "better": "green",
    "fixed": "green",
    "worse": "red",
    "broke": "red",
    "ambiguous": "yellow",
    "insufficient": "yellow",
    "incomparable": "yellow",
}
"""Colour of a cell by its text."""


def render(table: Table, form: str = "table", *, rich: bool = False) -> str:
    """`table` as text in one of `FORMS`, without the last line break; `rich` draws and colours it for a terminal."""
    check_form(form)
    if form == "json":
        return json.dumps(table.records(), indent=2)
    if form == "jsonl":
        return "\n".join(json.dumps(record) for record in table.records())
    if form == "csv":
        return _csv(table)
    folded = table.folded()
    if form == "md":
        return _markdown(folded)
    if form == "html":
        return _page(folded)
    return _rich(folded) if rich else _plain(folded)


def render_all(tables: Sequence[Table], form: str) -> str:
    """Several tables one below the other, as Markdown or as one page."""
    if form == "html":
        return _page(*(table.folded() for table in tables))
    return "\n\n".join(render(table, form) for table in tables)


def check_form(form: str, also: Sequence[str] = ()) -> None:
    """MemplanError when there is no such form, `also` counted among them."""
    known = (*FORMS, *also)
    if form not in known:
        raise MemplanError(f"Unknown output {form!r}.", near_names(form, known))


def wants_rich() -> bool:
    """Whether standard output is a terminal whose user has not asked for plain text."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _plain(table: Table) -> str:
    headers, texts = table.headers(), _visible(table.texts())
    widths = [max(len(line[index]) for line in [headers, *texts]) for index in range(len(headers))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if column.align == "left" else cell.rjust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    body = [line(headers), "  ".join("-" * width for width in widths), *(line(cells) for cells in texts)]
    title = [visible(table.title, LINE_CHARS), ""] if table.title else []
    return "\n".join([*title, *body, *_spaced(_lines(table))])


def _markdown(table: Table) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("---" if column.align == "left" else "--:" for column in table.columns) + "|"
    texts = [[for_markdown(visible(cell, CELL_CHARS)) for cell in cells] for cells in table.texts()]
    body = [line([header.replace("|", "\\|") for header in table.headers()]), rule, *(line(cells) for cells in texts)]
    title = [f"**{for_markdown(table.title)}**", ""] if table.title else []
    return "\n".join([*title, *body, *_spaced(tuple(for_markdown(text) for text in table.footer), "<br>")])


def _page(*tables: Table) -> str:
    """A whole page of `tables` that asks nobody for anything."""
    title = html.escape(visible(tables[0].title, CELL_CHARS) or "memplan")
    body = "\n".join(html_table(table) for table in tables)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<div class="wide rungs" tabindex="0" role="region" aria-label="{title}">
{body}
</div>
</body>
</html>"""


def html_table(table: Table) -> str:
    """The element of `table`, folded already, and its lines below; a cell whose text has a colour is of the class of
    that name."""

    def cell(text: str, align: str) -> str:
        known = ("number" * (align == "right"), "long" * (len(text) > WRAP_FROM), STATUS_STYLES.get(text, ""))
        kinds = [kind for kind in known if kind]
        shown = html.escape(visible(text, CELL_CHARS))
        return f'<td class="{" ".join(kinds)}">{shown}</td>' if kinds else f"<td>{shown}</td>"

    aligned = [column.align for column in table.columns]
    heads = "".join(
        f'<th scope="col"{" class=number" if align == "right" else ""}>{html.escape(visible(header, CELL_CHARS))}</th>'
        for header, align in zip(table.headers(), aligned, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(cell(text, align) for text, align in zip(cells, aligned, strict=True))}</tr>\n"
        for cells in table.texts()
    )
    caption = f"<caption>{html.escape(visible(table.title))}</caption>\n" if table.title else ""
    lines = "".join(f"<li>{html.escape(line)}</li>\n" for line in _lines(table))
    below = f'\n<ul class="below">\n{lines}</ul>' if lines else ""
    return f"<table>\n{caption}<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>{below}"


def _csv(table: Table) -> str:
    import csv

    file = io.StringIO()
    writer = csv.DictWriter(file, [column.key for column in table.columns], lineterminator="\n")
    writer.writeheader()
    for record in table.records():
        writer.writerow(
            {key: for_spreadsheet(value) if isinstance(value, str) else value for key, value in record.items()}
        )
    return file.getvalue().rstrip("\n")


def _rich(table: Table) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    headers, texts = table.headers(), _visible(table.texts())
    widths = [max(len(line[index]) for line in [headers, *texts]) for index in range(len(headers))]
    least = [min(width, WRAP_FROM) for width in widths]
    if sum(least) + 2 * len(least) > console.width:
        return _plain(table)
    title = Text(visible(table.title, LINE_CHARS)) if table.title else None
    drawn = RichTable(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column, header, width, least_width in zip(table.columns, headers, widths, least, strict=True):
        drawn.add_column(Text(header), justify=column.align, no_wrap=width <= WRAP_FROM, min_width=least_width)
    for cells in texts:
        drawn.add_row(*(Text(cell, style=STATUS_STYLES.get(cell, "")) for cell in cells))
    with console.capture() as capture:
        console.print(drawn)
        for text in _lines(table):
            console.print(Text(text, style="dim"))
    return capture.get().rstrip("\n")


def _visible(texts: list[list[str]]) -> list[list[str]]:
    return [[visible(cell, CELL_CHARS) for cell in cells] for cells in texts]


def _lines(table: Table) -> tuple[str, ...]:
    return tuple(visible(line, LINE_CHARS) for line in table.footer)


def _spaced(footer: tuple[str, ...], ending: str = "") -> list[str]:
    return ["", *(line + ending for line in footer[:-1]), footer[-1]] if footer else []
