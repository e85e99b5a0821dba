"""A worker and all that it started, so that nobody of them outlives it.

They are known by the process group, which a process can leave, and by a mark in the environment, which children
inherit wherever they go. The mark is read in /proc, so on other systems than Linux the group alone counts.
"""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

GRACE_S = 3.0
"""Seconds between asking a worker to end and making it end."""
STUCK_S = 10.0
"""Seconds after which a worker that was killed counts as stuck: a driver can hold a process for ever."""
MARK = "MEMPLAN_WORKER"
"""The environment variable that names a worker."""
SWEEPS = 20
"""How often strays are looked for: one may start another while it is being ended."""
PROC = Path("/proc")


class Tree:
    """The processes of one worker."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._leader: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment to start the worker with."""
        name, _, value = self._mark.partition("=")
        return {**os.environ, name: value}

    def root(self, leader: subprocess.Popen[bytes]) -> None:
        """Says which process the worker is; it must lead a group of its own."""
        self._leader = leader

    def owns(self, pid: int) -> bool:
        """Whether `pid` is the worker or something that it started."""
        with contextlib.suppress(OSError):
            if self._leader is not None and os.getpgid(pid) == self._leader.pid:
                return True
        return self._marked(PROC / str(pid))

    def end(self) -> bool:
        """Ends them all: politely while the worker lives, then surely. False when the worker is stuck in the kernel."""
        leader = self._leader
        if leader is None:
            return True
        try:
            if leader.poll() is None:
                _signal_group(leader.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    leader.wait(timeout=GRACE_S)
        finally:  # a second Ctrl-C only makes it quicker
            _signal_group(leader.pid, signal.SIGKILL)
            for _ in range(SWEEPS):
                if not self._sweep():
                    break
                time.sleep(0.005)
            try:
                leader.wait(timeout=STUCK_S)
            except subprocess.TimeoutExpired:
                return False
        return True

    def _sweep(self) -> bool:
        """Whether there were strays; they have been killed."""
        found = False
        for folder in PROC.glob("[0-9]*"):
            if self._marked(folder):
                found = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(folder.name), signal.SIGKILL)
        return found

    def _marked(self, folder: Path) -> bool:
        try:
            return self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, somebody else's, or no Linux
            return False


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says it the second way
        os.killpg(group, number)
