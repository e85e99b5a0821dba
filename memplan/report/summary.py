"""Markdown of a size that its reader takes: the worst first, the rest folded, and said how much was left out."""

from collections.abc import Iterable, Sequence

from memplan.analysis.comparison import Comparison
from memplan.analysis.recommend import recommend
from memplan.analysis.verdict import verdict
from memplan.record import RungResult
from memplan.report.compare_table import compare_table
from memplan.report.ladder_table import ladder_table, provenance
from memplan.report.outside import for_markdown
from memplan.report.render import render
from memplan.report.repeats import repeats_of, worst_first
from memplan.report.table import Table
from memplan.report.verdict import verdict_of

STEP_SUMMARY_BYTES = 1_000_000
"""Size of a step's summary. GitHub refuses one above 1 MiB as a whole, so that nothing of it is shown."""
COMMENT_BYTES = 65_000
"""Size of a comment on a pull request, which GitHub refuses above 65,536 characters."""
UNFOLDED = 20
"""Rows that are seen without unfolding."""
_LAST_BYTES = 400
"""Kept free for the sentences that say what is left out."""


def ladder_summary(rows: Sequence[RungResult], limit_bytes: int = STEP_SUMMARY_BYTES) -> str:
    """The rungs of a ladder, the worst first."""
    rungs = worst_first(repeats_of(rows))
    table = ladder_table([row for rung in rungs for row in rung.rows], footer=provenance(rows))
    return bounded(verdict_of(rungs, recommend(rows)).sentences, table, limit_bytes)


def comparison_summary(found: Comparison, limit_bytes: int = STEP_SUMMARY_BYTES) -> str:
    """The findings of a comparison, the worst first."""
    return bounded([verdict(found)], compare_table(found), limit_bytes)


def bounded(sentences: Sequence[str], table: Table, limit_bytes: int) -> str:
    """`sentences`, then the first rows of `table`, the lines below it, and its other rows folded; as much as
    `limit_bytes` of UTF-8 have room for."""
    lines = render(Table(columns=table.columns, rows=table.rows), "md").split("\n")
    head, body = lines[:2], lines[2 : 2 + len(table.rows)]
    below = [for_markdown(line) for line in table.folded().footer]
    room = _Room(limit_bytes - _LAST_BYTES)
    said = room.take(for_markdown(sentence) for sentence in sentences)
    room.take(head)
    seen = room.take(body[:UNFOLDED])
    notes = room.part(3).take(f"- {line}" for line in below)
    room.spend(notes)
    folded = room.take(body[len(seen) :]) if len(seen) == min(UNFOLDED, len(body)) and room.take(head) else []
    text = ["\n\n".join(said), "", *head, *seen, ""]
    if notes:
        text += [*notes, ""]
    if folded:
        text += [f"<details><summary>{len(folded)} more rows</summary>", "", *head, *folded, "", "</details>", ""]
    rows_out, lines_out = len(body) - len(seen) - len(folded), len(below) - len(notes)
    if rows_out or lines_out:
        what = [f"{rows_out} of {len(body)} rows"] * (rows_out > 0) + [f"{lines_out} lines"] * (lines_out > 0)
        why = f"the summary may hold {limit_bytes:,} bytes. Type the same with -o json for all."
        text += [f"{' and '.join(what)} left out, the best ones: {why}", ""]
    return "\n".join(text).rstrip("\n") + "\n"


class _Room:
    """Bytes that may still be written."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = num_bytes

    def part(self, parts: int) -> "_Room":
        """One of so many parts of it."""
        return _Room(self._bytes // parts)

    def spend(self, lines: Sequence[str]) -> None:
        """Counts `lines` as written."""
        self._bytes -= sum(_size(line) for line in lines)

    def take(self, lines: Iterable[str]) -> list[str]:
        """The first of `lines` that there is room for, counted as written."""
        taken: list[str] = []
        for line in lines:
            if _size(line) > self._bytes:
                break
            self._bytes -= _size(line)
            taken.append(line)
        return taken


def _size(line: str) -> int:
    return len(line.encode()) + 2
