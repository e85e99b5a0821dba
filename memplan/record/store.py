"""One row, one line, on disk before the next rung starts."""

import json
import os
from pathlib import Path

from memplan.errors import MemplanError
from memplan.record.outcome import RungResult


def append_row(path: Path, row: RungResult) -> None:
    """Adds `row` to the jsonl file at `path` and waits until the disk has it. A torn last line is closed first."""
    line = json.dumps(row.to_dict()) + "\n"
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> tuple[RungResult, ...]:
    """Rows of the jsonl file at `path`, the last line of each run and repeat counting; a torn line is left out.

    MemplanError when there is no such file or a whole line is no row of a ladder.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MemplanError(f"{path} cannot be read: {error.strerror}.") from None
    rows: dict[tuple[str, int], RungResult] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        try:
            row = RungResult.from_dict(data)
        except (TypeError, AttributeError, KeyError):
            raise MemplanError(f"{path}, line {number} is not a row of a ladder.") from None
        rows.pop(row.key, None)
        rows[row.key] = row
    return tuple(rows.values())
