"""What goes on, on standard error: a live table on a terminal, plain lines in a log."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from memplan.record import Note, RungResult
from memplan.units import format_bytes, format_ns

MOST_LIVE = 20
"""Lines of the live table; the rungs around the one under way are shown."""


class Progress:
    """Says `[2/4] B2c1@none warmup ...` in a log; on a terminal keeps one table of all rungs up to date."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._live: Any = None
        self._lines: dict[str, tuple[str, str, str]] = {}
        self._at, self._left = "", ""

    def expect(self, rungs: Sequence[tuple[str, int | None]]) -> None:
        """Rungs that will be climbed, in order, with what the formulas say of each."""
        for name, estimated_bytes in rungs:
            self._lines[name] = ("", "" if estimated_bytes is None else f"~{format_bytes(estimated_bytes)}", "")

    def say(self, note: Note) -> None:
        """Shows what a rung does, or how it ended. A log leaves timed steps out."""
        if self._file.isatty():
            self._show(note)
        elif note.kind != "step":
            going = note.kind != "end"
            left = f", {about(note.left_s)} left" if note.kind == "end" and note.left_s else ""
            self._write(f"[{note.number}/{note.total}] {note.rung} {note.text}{' ...' if going else ''}{left}\n")

    def done(self) -> None:
        """Leaves the table as it stands."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, note: Note) -> None:
        from rich.live import Live

        _, peak, step = self._lines.get(note.rung, ("", "", ""))
        if note.row is not None:
            peak, step = ended(note.row) if note.row.peak_allocated_bytes is not None else (peak, "")
        text = note.row.status if note.row is not None else note.text + ("" if note.kind == "end" else " ...")
        self._lines[note.rung] = (text, peak, step)
        self._at = note.rung
        self._left = f"[{note.number}/{note.total}]" + (f", {about(note.left_s)} left" if note.left_s else "")
        if self._live is None:
            from rich.console import Console

            self._live = Live(console=Console(file=self._file), auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, caption=Text(self._left), caption_justify="left")
        for header in ("rung", "", "peak", "step"):
            table.add_column(header, justify="left" if header in ("rung", "") else "right", no_wrap=True)
        names = list(self._lines)
        first = max(0, min(names.index(self._at) - MOST_LIVE // 2, len(names) - MOST_LIVE))
        for name in names[first : first + MOST_LIVE]:
            table.add_row(*(Text(word) for word in (name, *self._lines[name])))
        return table

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # where nobody can hear it, the climb goes on
            self._file.write(text)
            self._file.flush()


def ended(row: RungResult) -> tuple[str, str]:
    """Peak and time of a step of a row."""
    peak = "" if row.peak_allocated_bytes is None else format_bytes(row.peak_allocated_bytes)
    return peak, "" if row.median_step_ns is None else format_ns(row.median_step_ns)


def about(seconds: float) -> str:
    """A stretch of time in round words: `40 s`, `3 min`, `2 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
