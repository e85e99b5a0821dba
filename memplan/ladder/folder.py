"""Where a climb's results go: never over somebody else's."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from memplan.errors import MemplanError
from memplan.record.store import ROWS_FILE

RESULT_FILES = (ROWS_FILE, "table.md", "table.csv", "summary.json", "report.html")
"""What a climb writes beside pictures."""


def open_folder(out: Path | None, name: str, *, resume: bool, reports: Path, today: date | None = None) -> Path:
    """The folder for this climb, there and writable; MemplanError when it is not, or when it holds
    results and `resume` is off.

    Without `out` it is `<name>_<yyyymmdd>` in `reports`, with `-2`, `-3`, ... behind it when that one is taken; with
    `resume` it is the latest of these.
    """
    if out is None:
        found = _latest(reports, name) if resume else None
        out = found or _fresh(reports / f"{name}_{today or date.today():%Y%m%d}")
    elif not resume and holds_results(out):
        raise MemplanError(f"{out} already holds results.", "Type --resume to go on with them, or another --out.")
    probe = out / ".probe"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise MemplanError(
            f"{out} cannot be written: {error.strerror}.", "Type --out with a folder of yours."
        ) from None
    return out


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """While the folder is this climb's alone; MemplanError when another climb is at work in it. The claim ends with the
    process, however that ends. Where the file system knows no locks nothing is claimed."""
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MemplanError(
                f"Another ladder is climbing into {folder}.", "Wait for it, or type another --out."
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(number)


def holds_results(folder: Path) -> bool:
    """Whether a climb has written into `folder`."""
    return any((folder / name).exists() for name in RESULT_FILES)


def _fresh(folder: Path) -> Path:
    number, candidate = 1, folder
    while holds_results(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _latest(reports: Path, name: str) -> Path | None:
    pattern = re.compile(re.escape(name) + r"_(\d{8})(?:-(\d+))?")
    found = []
    for folder in reports.glob("*"):
        match = pattern.fullmatch(folder.name)
        if match and (folder / ROWS_FILE).exists():
            found.append((match[1], int(match[2] or 1), folder))
    return max(found)[2] if found else None
