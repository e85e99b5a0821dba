"""The host's side of a worker: who is ended first when memory runs out there, and who was."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from memplan.backends import cgroups

FIRST_TO_GO = 1000
"""The largest `oom_score_adj`: Linux ends this process before any other (proc(5))."""
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """How many processes out-of-memory killers have ended so far; None: nobody counts them."""

    group: int | None
    """Those of our control group, whoever's limit was reached."""
    machine: int | None
    """Those of the whole machine."""

    @staticmethod
    def now() -> "Kills":
        """The counts at this moment."""
        return Kills(group=cgroups.num_kills(), machine=_machine_kills())

    def evidence(self, before: "Kills") -> str | None:
        """What proves that a killer has struck our group since `before`, in words; None without a proof.

        Where our group is counted, a kill elsewhere on the machine proves nothing.
        """
        if self.group is not None and before.group is not None:
            return "the host's out-of-memory killer struck its control group" if self.group > before.group else None
        if self.machine is not None and before.machine is not None and self.machine > before.machine:
            return "the host's out-of-memory killer struck meanwhile"
        return None


def offer(pid: int) -> None:
    """Lets the host's out-of-memory killer take `pid` first, so that whoever watches it survives; Linux only."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(FIRST_TO_GO), encoding="ascii")


def _machine_kills(vmstat: Path = VMSTAT) -> int | None:
    try:
        text = vmstat.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)
