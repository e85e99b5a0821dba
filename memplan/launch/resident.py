"""Resident memory while steps are timed, where the allocator is not listened to: the kernel counts it at no cost.

Linux keeps the largest resident set of a process and forgets it when asked (`/proc/PID/clear_refs`, proc(5)). Resident
are pages that were written, of whatever thread and library: a block that nobody writes into is not seen. What glibc
keeps of freed blocks (up to 32 MiB each; larger ones it maps and unmaps, mallopt(3)) is resident before and serves
later requests unseen, as pages do that were given back with MADV_FREE and not yet taken: a warning tells the least
there was, and silence proves nothing where as much was kept.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from memplan.backends.base import Reading
from memplan.units import KIB, MIB, format_bytes

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
FORGET_PEAK = "5"
"""What has the kernel forget the largest resident set (proc(5), since Linux 4.0)."""
TOLERATED_BYTES = 16 * MIB
"""Resident bytes above the watched step's that say nothing: half of the largest block that glibc keeps, or
eight huge pages of 2 MiB that each count whole as soon as a byte of them is written."""
TOLERATED_FRAC = 0.1
"""The same as a share of the watched step's peak: gaps between blocks grow with what is allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Resident bytes of this process."""

    now: int
    """At this moment."""
    largest: int
    """The largest since the kernel was asked to forget."""

    @staticmethod
    def read(status: Path = STATUS) -> "Resident | None":
        """What the kernel says; None where it does not."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
            now, largest = (int(lines[name].split()[0]) * KIB for name in ("VmRSS", "VmHWM"))
            return Resident(now=now, largest=largest)
        return None


class ResidentWatch:
    """Two looks at the resident memory, at entry and at exit; between them the kernel alone watches."""

    def __init__(self, status: Path = STATUS, clear_refs: Path = CLEAR_REFS) -> None:
        self._status = status
        self._clear_refs = clear_refs
        self.before: Resident | None = None
        self.behind: Resident | None = None

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._clear_refs.write_text(FORGET_PEAK, encoding="ascii")
            self.before = Resident.read(self._status)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.behind = Resident.read(self._status)

    def beyond(self, watched: Reading) -> str | None:
        """A sentence where the steps in between took clearly more than `watched`, the window of one of them."""
        if self.before is None or self.behind is None:
            return None
        peak_bytes = watched.peak.allocated_bytes
        tolerated = max(TOLERATED_BYTES, int(TOLERATED_FRAC * peak_bytes))
        grown = self.behind.now - self.before.now
        if grown > tolerated:
            return (
                f"memory grows while steps are timed: {format_bytes(grown)} more are resident behind them, which no "
                "window shows"
            )
        start_bytes = watched.segments[0].start_bytes if watched.segments else 0
        more = self.behind.largest - self.before.now - (peak_bytes - start_bytes)
        if more > tolerated:
            return (
                f"timed steps took up to {format_bytes(more)} more resident memory than the watched step shows: "
                "allocations in other threads, or steps that differ"
            )
        return None
