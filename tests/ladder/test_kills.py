"""Parent or child killed at any moment: what was measured stays, `--resume` brings the rest, and nothing is left."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memplan.record import FINAL, RungResult, read_rows

HERE = Path(__file__).parent
NUM_MOMENTS = 50
NUM_BY_DEFAULT = 4
MOMENTS = [pytest.param(seed, marks=pytest.mark.slow if seed >= NUM_BY_DEFAULT else ()) for seed in range(NUM_MOMENTS)]


def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """The climb in a process of its own, temporary files of it and its workers in a folder beside the results."""
    scratch = folder.with_name("scratch")
    scratch.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(scratch)}
    command = [sys.executable, str(HERE / "climber.py"), str(folder), *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(folder: Path, *words: str) -> list[tuple[str, int, str, int | None]]:
    """What the file says after a climb that nobody disturbs."""
    process = start(folder, *words)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said.decode()
    return facts(read_rows(folder / "ladder.jsonl"))


def facts(rows: tuple[RungResult, ...]) -> list[tuple[str, int, str, int | None]]:
    return sorted((row.rung, row.repeat, row.status, row.peak_allocated_bytes) for row in rows)


def workers(scratch: Path) -> list[int]:
    """Processes that work for a climb whose temporary files are in `scratch`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                works = b"rung_worker" in (entry / "cmdline").read_bytes()
                if works and f"TMPDIR={scratch}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, int, str, int | None]], float]:
    """The rows of a climb that nobody disturbs, and how long it takes."""
    folder = tmp_path_factory.mktemp("undisturbed") / "rows"
    began = time.monotonic()
    rows = finish(folder)
    return rows, time.monotonic() - began


@pytest.mark.skipif(not Path("/proc").exists(), reason="children are found in /proc")
@pytest.mark.parametrize("seed", MOMENTS)
def test_a_kill_at_any_moment_loses_nothing(
    tmp_path: Path, seed: int, undisturbed: tuple[list[tuple[str, int, str, int | None]], float]
) -> None:
    rows, lasts_s = undisturbed
    draw = random.Random(seed)
    folder, scratch = tmp_path / "rows", tmp_path / "scratch"
    climb = start(folder)
    time.sleep(draw.uniform(0.1, lasts_s))
    if draw.random() < 0.5:
        climb.kill()
    else:
        for pid in workers(scratch):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    climb.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while workers(scratch) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not workers(scratch)
    measured = folder / "ladder.jsonl"
    before = facts(tuple(row for row in read_rows(measured) if row.kind in FINAL)) if measured.exists() else []

    after = finish(folder, "--resume")
    assert [row[:2] for row in after] == [row[:2] for row in rows]
    for here, there in zip(after, rows, strict=True):
        # what a repeat has shown while the first was killed is not thrown away when the first shows it too
        shown = there[2].startswith("skipped:dominated_by") and here[2] == "over_gate"
        assert here == there or shown
    lines = [json.loads(line) for line in measured.read_text().splitlines() if line.strip()]
    final = [(line["rung"], line["repeat"]) for line in lines if line["status"] in FINAL]
    assert len(final) == len(set(final)), "a rung that was done was measured again"
    assert set(before) <= set(after)
    assert list(scratch.iterdir()) == []
