"""The CPU: live bytes as its allocator reports them, times by the host's clock.

The CPU allocator keeps no statistics, but while `torch.profiler` runs with `profile_memory=True` it reports each
allocation and each free with its size (`c10/core/CPUAllocator.cpp`, `ProfiledCPUMemoryReporter`; torch 2.13). The
running sum of these is the number of live bytes, temporaries inside ops included. Each window is a profile of its own,
and the reporter remembers the blocks of earlier ones, so nothing may be allocated between two windows.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from memplan.backends.base import Reading, T, says_out_of_memory
from memplan.errors import MemplanError
from memplan.record import WindowPeak

MARK_PREFIX = "memplan:"
_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the allocator's story."""

    at_ns: int
    """When, on the profiler's clock."""
    delta_bytes: int = 0
    """Bytes allocated (positive) or freed (negative)."""
    phase: str | None = None
    """The phase that begins here, or None for an allocation or a free."""


class CpuBackend:
    """The host's own memory and cores."""

    def __init__(self) -> None:
        self._live_bytes = 0

    @property
    def device(self) -> Any:
        """torch's CPU device."""
        import torch

        return torch.device("cpu")

    def window(self) -> "CpuWindow":
        """A window that goes on from the live bytes of the one before."""
        return CpuWindow(self)

    def clock(self, work: Callable[[], T]) -> tuple[T, int]:
        """What `work` returns and its time by the host's monotonic clock, in nanoseconds."""
        start = time.perf_counter_ns()
        value = work()
        return value, time.perf_counter_ns() - start

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the host's allocator or Python itself had no memory left."""
        return says_out_of_memory(error)

    def describe(self) -> dict[str, Any]:
        """Threads and instruction set that torch uses."""
        import torch

        return {
            "device": "cpu",
            "num_threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


class CpuWindow:
    """A profile of the allocator from entry to exit."""

    def __init__(self, backend: CpuBackend) -> None:
        self.reading: Reading | None = None
        self._backend = backend
        self._profile: Any = None

    def __enter__(self) -> Self:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.start()
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
    peak_bytes = live_bytes
    phase: str | None = None
    phase_peaks: dict[str, int] = {}
    for event in events:
        phase = event.phase or phase
        live_bytes += event.delta_bytes
        if live_bytes < 0:
            raise MemplanError("More bytes were freed than allocated: the profiler's story has a hole.")
        peak_bytes = max(peak_bytes, live_bytes)
        if phase is not None:
            phase_peaks[phase] = max(phase_peaks.get(phase, 0), live_bytes)
    return Reading(peak=WindowPeak(allocated_bytes=peak_bytes), phase_peaks=phase_peaks, live_bytes=live_bytes)
