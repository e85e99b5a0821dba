"""One row, one line, on disk before the next rung starts; and read back whatever happened to the file since."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError
from memplan.record.estimated import estimated_row, is_estimate, printed
from memplan.record.memory import SCHEMA_VERSION
from memplan.record.outcome import RungResult

ROWS_FILE = "ladder.jsonl"
"""The rows in a folder of results."""
_MARK = b"\xef\xbb\xbf"
"""What some editors put before the first line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was read."""

    rows: tuple[RungResult, ...]
    """The rows, the last line of each run and repeat counting."""
    warnings: tuple[str, ...] = ()
    """What was left out, a sentence each."""


def append_row(path: Path, row: RungResult) -> None:
    """Adds `row` to the jsonl file at `path` and waits until the disk has it. A torn last line is closed first.
    MemplanError where the disk does not take it."""
    line = json.dumps(row.to_dict()) + "\n"
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        what = f"{path} does not take the row of {row.rung}: {error.strerror}."
        raise MemplanError(what, "Make room there, and go on with --resume; earlier rows are safe.") from None


def read_rows(path: Path) -> tuple[RungResult, ...]:
    """Rows of the jsonl file at `path`, as `read_results` gives them."""
    return read_results(path).rows


def read_all(paths: Iterable[Path]) -> Results:
    """Rows of several files or folders in their order; a file that is named twice counts once."""
    files: dict[Path, Path] = {}
    for path in paths:
        files.setdefault(rows_file(path).resolve(), path)
    found = [read_results(path) for path in files.values()]
    return Results(
        rows=tuple(row for results in found for row in results.rows),
        warnings=tuple(line for results in found for line in results.warnings),
    )


def rows_file(path: Path) -> Path:
    """The file with the rows of `path`, a folder or that file itself; MemplanError where a folder has none."""
    if not path.is_dir():
        return path
    if (path / ROWS_FILE).is_file():
        return path / ROWS_FILE
    below = sorted(str(file.parent) for file in path.glob(f"*/{ROWS_FILE}"))
    hint = f"Folders in it have: {', '.join(below[:5])}." if below else "Type the folder that a ladder has made."
    raise MemplanError(f"{path} holds no {ROWS_FILE}.", hint)


def read_results(path: Path) -> Results:
    """Rows of the jsonl file at `path`, or of the one in the folder `path`; what `memplan estimate` printed as JSON is
    read as rows too.

    A line that was torn, by an interrupted write or a crashed disk, is left out and named. MemplanError when there is
    no such file, it is no ladder's, a whole line in it is no row, or a newer memplan wrote it.
    """
    file = rows_file(path)
    try:
        content = file.read_bytes().removeprefix(_MARK)
    except OSError as error:
        raise MemplanError(f"{file} cannot be read: {error.strerror}.") from None
    rows: dict[tuple[str, int], RungResult] = {}
    torn: list[int] = []
    lines = [json.dumps(estimate).encode() for estimate in printed(content)] or content.split(b"\n")
    foreign = False
    for number, line in enumerate(lines, 1):
        text = line.strip(b"\0 \t\r")
        if not text:
            if line.strip():  # zeros: blocks that a crashed disk never wrote
                torn.append(number)
            continue
        data = _parsed(text)
        if data is None:
            torn.append(number)
            foreign = foreign or not text.startswith(b"{")
            continue
        row = _row(data, f"{file}, line {number}")
        rows.pop(row.key, None)
        rows[row.key] = row
    if foreign and not rows:
        raise MemplanError(f"{file} is not a ladder's file: none of its lines is a row.", f"Its name is {ROWS_FILE}.")
    return Results(rows=tuple(rows.values()), warnings=(_torn(file, torn),) if torn else ())


def _parsed(text: bytes) -> dict[str, Any] | None:
    """The JSON object in `text`; None where there is none."""
    try:
        data = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _row(data: dict[str, Any], where: str) -> RungResult:
    version = data.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise MemplanError(
            f"{where} was written by a newer memplan: its version of rows is {version}, this one reads up to "
            f"{SCHEMA_VERSION}.",
            "Type: pip install --upgrade memplan",
        )
    try:
        return RungResult.from_dict(estimated_row(data) if is_estimate(data) else data)
    except ValueError as error:
        raise MemplanError(f"{where} is not a row of a ladder: {error}.") from None


def _torn(file: Path, numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
    lines, were = ("line", "was") if len(numbers) == 1 else ("lines", "were")
    return f"{file}: {lines} {shown} {were} torn, and left out."
