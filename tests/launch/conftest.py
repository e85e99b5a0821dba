"""For all tests of processes: whatever they do, nothing is left of it."""

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memplan.launch.process import Outcome, run_worker

HERE = Path(__file__).parent


def children() -> set[str]:
    """This process's children, zombies included, as `pid state`."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.parent.name, stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[1]) == os.getpid():
            found.add(f"{pid} {rest[0]}")
    return found


def num_open_files() -> int:
    """Files that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def inheriting(mark: str) -> list[str]:
    """Processes that live with `mark` in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found.append(environ.parent.name)
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files. Afterwards it is empty, and no process, zombie, thread or open file is left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MEMPLAN_TEST", mark)
    threads, before, files = threading.active_count(), children(), num_open_files()
    yield folder
    assert list(folder.iterdir()) == []
    assert children() - before == set()
    deadline = time.monotonic() + 5  # who was killed is gone a moment later
    while inheriting(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert inheriting(mark) == []
    assert threading.active_count() == threads
    assert num_open_files() == files


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs one of the misbehaving workers."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def go(deed: str, timeout_s: float = 60, **options: Any) -> Outcome:
        job = {"deed": deed, "pids": str(tmp_path / "pids")}
        return run_worker(job, **{"timeout_s": timeout_s, "log": tmp_path / "log", "module": "workers"} | options)

    return go
