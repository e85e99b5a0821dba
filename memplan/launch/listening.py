"""What a worker says: events through a file without a name, its own output through a pipe into a log."""

import contextlib
import json
import os
import re
import select
import tempfile
import time
from pathlib import Path
from typing import IO, Any

TAIL_BYTES = 8192
"""How much of the end of a worker's output is kept for the line that explains a failure."""
MOST_LOG_BYTES = 64 << 20
"""Where a log ends: a worker that cannot stop talking must not fill the disk."""
OF_THE_PROFILER = re.compile(r"USDT:.*|.*\bSyncActivityProfilerHandler\.cpp:\d+\].*")
"""What kineto prints where a profile begins and ends (torch 2.13): it explains nothing."""
CHUNK_BYTES = 1 << 16
"""How much is read at once."""
MOST_PIPE_BYTES = 1 << 20
"""The largest pipe that Linux makes without being asked by root (pipe(7))."""


def unnamed_file() -> IO[bytes]:
    """A file that is gone with the last process that has it open; in memory where the system can (Linux), so that a
    full disk does not matter."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return os.fdopen(os.memfd_create("memplan"), "w+b")
    return tempfile.TemporaryFile()


class EventReader:
    """Reads the JSON lines that another process appends; half a line waits for its other half."""

    def __init__(self, descriptor: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._descriptor = descriptor
        self._offset = 0
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Events that have come since the last call. What is no JSON object is left out."""
        fresh: list[dict[str, Any]] = []
        until = os.fstat(self._descriptor).st_size  # no further, however fast the other process writes
        while self._offset < until:
            data = os.pread(self._descriptor, min(CHUNK_BYTES, until - self._offset), self._offset)
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line.decode("utf-8", errors="replace"))
                    if isinstance(event, dict):
                        fresh.append(event)
        self.events += fresh
        return fresh

    @property
    def end(self) -> dict[str, Any] | None:
        """The worker's last word, when it has been said."""
        return next((event for event in self.events if event.get("event") == "end"), None)

    @property
    def reached(self) -> str:
        """What the worker was at."""
        return next((str(event["phase"]) for event in reversed(self.events) if "phase" in event), "the start")


class Log:
    """A worker's output on its way into a file. When the file cannot take it, the output is lost and nothing else."""

    def __init__(self, path: Path) -> None:
        self._tail = b""
        self._room_bytes = MOST_LOG_BYTES
        self._pipe: int | None = None
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def listen(self, pipe: IO[bytes]) -> None:
        """Takes what comes through `pipe` from now on."""
        self._pipe = pipe.fileno()
        os.set_blocking(self._pipe, False)

    def wait(self, seconds: float) -> bool:
        """Takes what comes for `seconds`. False as soon as nothing can come any more."""
        deadline = time.monotonic() + seconds
        while self._pipe is not None and (left := deadline - time.monotonic()) > 0:
            if select.select([self._pipe], [], [], left)[0]:
                self._read()
        return self._pipe is not None

    def drain(self) -> None:
        """Takes what is left in the pipe."""
        for _ in range(MOST_PIPE_BYTES // CHUNK_BYTES):
            self._read()

    @property
    def last_line(self) -> str | None:
        """The last line that says something, whatever bytes are in there; None when there is none."""
        lines = [line.strip() for line in self._tail.decode("utf-8", errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and not OF_THE_PROFILER.fullmatch(line)), None)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> None:
        """Takes what is there now, without waiting."""
        if self._pipe is None:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._pipe, CHUNK_BYTES)
            if not data:
                self._pipe = None
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        kept = data[: self._room_bytes]
        self._room_bytes -= len(kept)
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk
                os.write(self._file, kept)
