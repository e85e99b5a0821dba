"""The CPU: live bytes as its allocator reports them, times by the host's clock.

The CPU allocator keeps no statistics, but while `torch.profiler` runs with `profile_memory=True` it reports each
allocation and each free with its size (`c10/core/CPUAllocator.cpp`, `ProfiledCPUMemoryReporter`; torch 2.13). The
running sum of these is the number of live bytes, temporaries inside ops included. Each window is a profile of its own,
and the reporter remembers the blocks of earlier ones, so nothing may be allocated between two windows.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from memplan.backends.base import Reading, Refusal, Room, Segment, T, peaks_by_phase
from memplan.errors import MemplanError
from memplan.record import WindowPeak

MARK_PREFIX = "memplan:"
_MEMORY_EVENT = "[memory]"
QUIET = "99"
"""Level at which the profiler no longer prints a line at each start and stop (kineto's `USDT`, torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the allocator's story."""

    at_ns: int
    """When, on the profiler's clock."""
    delta_bytes: int = 0
    """Bytes allocated (positive) or freed (negative)."""
    phase: str | None = None
    """The phase that begins here, empty for none of them; None for an allocation or a free."""


class CpuBackend:
    """The host's own memory and cores. Windows are profiles, and have no place where steps are timed."""

    counts_while_timing = False

    def __init__(self) -> None:
        self._live_bytes = 0

    @property
    def device(self) -> Any:
        """torch's CPU device."""
        import torch

        return torch.device("cpu")

    def cap(self, cap_bytes: int) -> None:
        """Nothing: the host's allocator knows no cap."""

    def listen(self, *, history: bool) -> str:
        """Nothing but the answer that this allocator has no history."""
        return "only CUDA's allocator records its history: there is no snapshot" if history else ""

    def window(self) -> "CpuWindow":
        """A window that goes on from the live bytes of the one before."""
        return CpuWindow(self)

    def clock(self, work: Callable[[], T]) -> tuple[T, int]:
        """What `work` returns and its time by the host's monotonic clock, in nanoseconds."""
        start = time.perf_counter_ns()
        value = work()
        return value, time.perf_counter_ns() - start

    def num_device_allocs(self) -> int:
        """0: no driver is asked."""
        return 0

    def rounded(self, num_bytes: int) -> int:
        """As it is."""
        return num_bytes

    def workspace_bytes(self) -> int:
        """0: what libraries keep lies outside torch's allocator."""
        return 0

    def room(self) -> Room | None:
        """None: memory is the whole host's."""
        return None

    def refusal(self) -> Refusal | None:
        """None: the error's text says it."""
        return None

    def dump(self, path: str) -> bool:
        """False: there is no history."""
        return False

    def describe(self) -> dict[str, Any]:
        """Threads and instruction set that torch uses."""
        import torch

        return {
            "device": "cpu",
            "num_threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }


class CpuWindow:
    """A profile of the allocator from entry to exit."""

    def __init__(self, backend: CpuBackend) -> None:
        self.reading: Reading | None = None
        self._backend = backend
        self._profile: Any = None

    def __enter__(self) -> Self:
        self._profile = started_profile()
        return self

    def mark(self, phase: str) -> None:
        """Leaves an empty profiler event whose time splits the story into phases."""
        from torch.profiler import record_function

        with record_function(MARK_PREFIX + phase):
            pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.stop()
        events = read_events(self._profile.profiler.kineto_results.events())
        self._profile = None
        self.reading = replay(events, self._backend._live_bytes)
        self._backend._live_bytes = self.reading.live_bytes


def started_profile() -> Any:
    """A profile of the allocator, begun without a word on standard error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    from torch.profiler import ProfilerActivity, profile

    begun = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    begun.start()
    return begun


def read_events(raw: Iterable[Any]) -> list[Event]:
    """The allocations, frees and marks among the profiler's events, by time; equal times keep their order."""
    events = []
    for item in raw:
        name = item.name()
        if name == _MEMORY_EVENT:
            events.append(Event(at_ns=item.start_ns(), delta_bytes=item.nbytes()))
        elif name.startswith(MARK_PREFIX):
            events.append(Event(at_ns=item.start_ns(), phase=name.removeprefix(MARK_PREFIX)))
    return sorted(events, key=lambda event: event.at_ns)


def replay(events: Iterable[Event], live_bytes: int) -> Reading:
    """Peaks of the running sum that starts at `live_bytes`; MemplanError when it falls below zero, which would mean
    that blocks were freed that nobody counted."""
    stretches: list[tuple[str, int, int]] = []
    phase, start_bytes, peak_bytes = "", live_bytes, live_bytes
    for event in events:
        if event.phase is not None:
            stretches.append((phase, start_bytes, peak_bytes))
            phase, start_bytes, peak_bytes = event.phase, live_bytes, live_bytes
        live_bytes += event.delta_bytes
        if live_bytes < 0:
            raise MemplanError("More bytes were freed than allocated: the profiler's story has a hole.")
        peak_bytes = max(peak_bytes, live_bytes)
    stretches.append((phase, start_bytes, peak_bytes))
    segments = tuple(Segment(phase=name, start_bytes=start, peak_bytes=peak) for name, start, peak in stretches)
    peak_of_all = max(segment.peak_bytes for segment in segments)
    return Reading(
        peak=WindowPeak(allocated_bytes=peak_of_all, live_bytes=live_bytes),
        phase_peaks=peaks_by_phase(segments),
        live_bytes=live_bytes,
        segments=segments,
    )
