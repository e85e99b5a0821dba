"""What goes on, on standard error: one live line on a terminal, plain lines in a log."""

import sys
from typing import TextIO

LIVE = "\r\x1b[2K"
"""Back to the line's start, and clear it."""


class Progress:
    """Says `[2/4] B2c1@none warmup ...`."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._live = self._file.isatty()

    def say(self, number: int, total: int, rung: str, text: str, kind: str) -> None:
        """Shows what rung `number` of `total` does.

        `kind` is `end` for what stays, `phase` for what goes on, and `step` for what goes on within it, which a log
        leaves out.
        """
        line = f"[{number}/{total}] {rung} {text}" + ("" if kind == "end" else " ...")
        if self._live:
            self._write(LIVE + line + ("\n" if kind == "end" else ""))
        elif kind != "step":
            self._write(line + "\n")

    def done(self) -> None:
        """Clears the live line."""
        if self._live:
            self._write(LIVE)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
