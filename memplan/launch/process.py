"""The parent's half: starts a worker, listens to its events, and says how it ended, whatever it did.

The worker leads a process group of its own, so that its children end with it; it reads a pipe that closes when the
parent is gone, so that it never outlives the parent. Results come through a file of JSON lines, never out of the log.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from memplan.errors import MemplanError

POLL_S = 0.1
"""Seconds between two looks at the worker; the parent sleeps meanwhile."""
GRACE_S = 3.0
"""Seconds between asking a worker to end and making it end."""
LOG_TAIL_BYTES = 8192
"""How much of a log's end is searched for the line that explains a failure."""
WORKER = "memplan.launch.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a worker ended and everything it said before."""

    status: str
    """`ok`, `oom`, `timeout`, `killed` or `error`."""
    error: str | None
    """What went wrong, in one line; None for `ok`."""
    events: tuple[dict[str, Any], ...]
    """Its events in order, the last `end` one included."""
    failure: dict[str, Any] | None = None
    """What it said of the moment of its failure, as `memplan.record.Failure`."""
    poisoned: bool = False
    """Whether the device's context may be of no use any more, so that the device should be tried."""
    telemetry: dict[str, Any] = field(default_factory=dict)
    """What a watch saw meanwhile: `windows` by name, `timed`; empty without one."""


def run_worker(
    job: dict[str, Any],
    *,
    timeout_s: float,
    log: Path,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    module: str = WORKER,
) -> Outcome:
    """The outcome of `python -m MODULE JOB EVENTS` in a fresh process; its own output goes to `log`.

    Whatever happens here, KeyboardInterrupt included, neither the process nor its children nor a temporary file is
    left. MemplanError when no process can be started.
    """
    with tempfile.TemporaryDirectory(prefix="memplan-") as folder:
        job_path, events_path = Path(folder) / "job.json", Path(folder) / "events.jsonl"
        job_path.write_text(json.dumps(job), encoding="utf-8")
        events_path.touch()
        kills_before = num_host_kills()
        with log.open("wb") as log_file, events_path.open("rb") as events_file:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(job_path), str(events_path)],
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError as error:
                raise MemplanError(f"No process could be started: {error.strerror}.") from None
            reader = EventReader(events_file)
            try:
                in_time = _follow(process, reader, on_event, time.monotonic() + timeout_s)
            finally:
                _end(process)
            for event in reader.read():
                on_event(event)
        if not in_time:
            reached = next((str(event["phase"]) for event in reversed(reader.events) if "phase" in event), "the start")
            why = f"not done after {timeout_s:g} s, in {reached}; --timeout gives it longer"
            return Outcome(status="timeout", error=why, events=tuple(reader.events))
        host_kills = num_host_kills() - kills_before
        status, said = judge_end(process.returncode, reader.events, last_line(log), host_kills)
        return Outcome(status=status, error=said, events=tuple(reader.events))


class EventReader:
    """Reads the JSON lines that another process appends; half a line waits for its other half."""

    def __init__(self, file: BinaryIO) -> None:
        self.events: list[dict[str, Any]] = []
        self._file = file
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Events that have come since the last call. What is no JSON object is left out."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        fresh = []
        for line in lines:
            try:
                event = json.loads(line.decode("utf-8", errors="replace"))
            except ValueError:
                continue
            if isinstance(event, dict):
                fresh.append(event)
        self.events += fresh
        return fresh


def judge_end(
    returncode: int, events: list[dict[str, Any]], last_words: str | None, host_kills: int
) -> tuple[str, str | None]:
    """Status and one line of explanation for a worker that ended by itself or by a signal.

    Its own last event counts first; then the signal that ended it; then its exit code and the last line of its log.
    """
    end = next((event for event in events if event.get("event") == "end"), None)
    if end is not None:
        return str(end["status"]), end.get("error")
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else "a signal"
        error = f"ended by {name} ({-returncode})"
        if -returncode == signal.SIGKILL:
            sure = (
                "the host's out-of-memory killer did it"
                if host_kills > 0
                else "usually the host's out-of-memory killer"
            )
            error += f": {sure}"
        return "killed", error
    said = f": {last_words}" if last_words else ""
    return "error", f"ended with exit code {returncode} and no result{said}"


def num_host_kills() -> int:
    """Processes that the host's out-of-memory killer has ended so far; 0 where Linux does not tell."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def last_line(log: Path) -> str | None:
    """The last line of `log` that says something, whatever bytes are in there; None when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _follow(
    process: subprocess.Popen[bytes], reader: EventReader, on_event: Callable[[dict[str, Any]], None], deadline: float
) -> bool:
    """Whether the worker ended before `deadline`; hands its events on meanwhile."""
    while True:
        try:
            process.wait(timeout=POLL_S)
            done = True
        except subprocess.TimeoutExpired:
            done = False
        for event in reader.read():
            on_event(event)
        if done:
            return True
        if time.monotonic() > deadline:
            return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker's whole group: politely while the worker lives, then surely."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says it the second way
        os.killpg(process.pid, number)
