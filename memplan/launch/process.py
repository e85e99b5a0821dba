"""The parent's half: starts a worker, listens to its events, and says how it ended, whatever it did.

The worker leads a process group of its own, so that its children end with it; it reads a pipe that closes when the
parent is gone, so that it never outlives the parent. Job and events are files without a name, so that none is left,
whoever is killed. Results come through events, never out of the log.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError
from memplan.launch.host import Kills, offer
from memplan.launch.listening import EventReader, Log, unnamed_file
from memplan.launch.pace import Pace
from memplan.launch.tree import Tree
from memplan.launch.watch import Watch
from memplan.record import STATUSES

POLL_S = 0.1
"""Seconds between two looks at the worker; the parent sleeps meanwhile."""
WORKER = "memplan.launch.worker"
SHELL_KILL = 128 + signal.SIGKILL
"""Exit code of a process whose child was ended by SIGKILL, as shells pass it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a worker ended and everything it said before."""

    status: str
    """One of `memplan.record.STATUSES`."""
    error: str | None
    """What went wrong, in one line; None for `ok`."""
    events: tuple[dict[str, Any], ...]
    """Its events in order, the last `end` one included."""
    failure: dict[str, Any] | None = None
    """What it said of the moment of its failure, as `memplan.record.Failure`; else where it was."""
    poisoned: bool = False
    """Whether the device's context may be of no use any more, so that the device should be tried."""
    telemetry: dict[str, Any] = field(default_factory=dict)
    """What a watch saw meanwhile, as `Watch.telemetry` says it; empty without one."""


def run_worker(
    job: dict[str, Any],
    *,
    timeout_s: float,
    log: Path,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    watch: Watch | None = None,
    module: str = WORKER,
) -> Outcome:
    """The outcome of `python -m MODULE JOB EVENTS` in a fresh process; its own output goes to `log`.

    Whatever happens here, KeyboardInterrupt included, neither the process nor its children nor a temporary file is
    left. MemplanError when no process can be started.
    """
    before = Kills.now()
    tree = Tree()
    with unnamed_file() as job_file, unnamed_file() as events_file, contextlib.closing(Log(log)) as output:
        job_file.write(json.dumps(job).encode())
        job_file.seek(0)
        files = job_file.fileno(), events_file.fileno()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *(f"/dev/fd/{number}" for number in files)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=files,
                process_group=0,
                env=tree.environment,
            )
        except OSError as error:
            raise MemplanError(f"No process could be started: {error.strerror}.") from None
        assert process.stdin is not None and process.stdout is not None
        with process.stdin, process.stdout:
            gone = True
            try:
                tree.root(process)
                offer(process.pid)
                output.listen(process.stdout)
                if watch is not None:
                    watch.begin(tree.owns)
                reader = EventReader(events_file.fileno())
                late = _follow(process, reader, output, Pace(timeout_s), watch, on_event)
            finally:
                gone = tree.end()
            output.drain()
            for event in reader.read():
                on_event(event)
        if late is not None and not gone:
            late += "; it could not be ended: the kernel holds it"
        evidence = Kills.now().evidence(before)
        status, said, failure = judge_end(process.returncode, reader, late, output.last_line, evidence)
        return Outcome(
            status=status,
            error=said,
            events=tuple(reader.events),
            failure=failure,
            poisoned=bool((reader.end or {}).get("poisoned")),
            telemetry=watch.telemetry() if watch is not None else {},
        )


def judge_end(
    returncode: int | None, reader: EventReader, late: str | None, last_words: str | None, evidence: str | None
) -> tuple[str, str | None, dict[str, Any] | None]:
    """Status, one line of explanation and the moment of failure of a worker that has ended or was given up.

    Its own last event counts first; then why it was given up, then the signal that ended it, then its exit code and
    the last line of its log. `evidence` is what proves that the host's out-of-memory killer has struck.
    """
    end = reader.end
    if end is not None:
        status, said = str(end.get("status")), end.get("error")
        if status.partition(":")[0] not in STATUSES:
            status, said = "error", f"ended with a status that does not exist, {status!r}: {said}"
        if evidence is not None and status == "error":
            said = f"{said}; {evidence}"
        return status, said, end.get("failure")
    failure = {"window": reader.reached, "text": last_words}
    if late is not None:
        return "timeout", late, failure
    if returncode in (-signal.SIGKILL, SHELL_KILL):
        if evidence is not None:
            return "host_oom", f"ended by SIGKILL (9): {evidence}", failure
        return "killed", "ended by SIGKILL (9); nothing shows that the host's out-of-memory killer did it", failure
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else "a signal"
        return "killed", f"ended by {name} ({-returncode})", failure
    said = f": {last_words}" if last_words else ""
    return "error", f"ended with exit code {returncode} and no result{said}", failure


def _follow(
    process: subprocess.Popen[bytes],
    reader: EventReader,
    output: Log,
    pace: Pace,
    watch: Watch | None,
    on_event: Callable[[dict[str, Any]], None],
) -> str | None:
    """Waits until the worker has ended, and hands its events on meanwhile; why it was given up, or None."""
    while True:
        ended = process.poll() is not None
        for event in reader.read():
            pace.hear(event)
            if watch is not None:
                watch.hear(event)
            on_event(event)
        if ended:
            return None
        late = pace.late(reader.reached)
        if late is not None:
            return late
        if watch is not None:
            watch.look()
        if not output.wait(POLL_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=POLL_S)
