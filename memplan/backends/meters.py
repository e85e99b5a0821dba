"""Peaks that outlive a reset: all who watch a device's allocator share one meter, which tells each of them every peak.

`torch.cuda.reset_peak_memory_stats` forgets for everybody in the process. Here a reset is the end of a stretch: its
peaks go to every open account and into the process's lifetime, and only then do the counters begin anew (torch 2.13).
The CPU's allocator tells its story to `torch.profiler` alone (backends/cpu.py), which cannot run twice at once, so a
stretch there is a profile.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.backends.base import Reading
from memplan.backends.cpu import read_events, started_profile
from memplan.backends.cuda import COUNTER_KEYS, PEAK_KEYS
from memplan.backends.resets import forget_peaks, listen_to_resets
from memplan.errors import MemplanError
from memplan.record import WindowPeak

NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""With it torch asks the driver for every block, and its counters stay at zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What the allocator said between two resets."""

    peaks: dict[str, int] = field(default_factory=dict)
    """Largest bytes by name of `PEAK_KEYS`; what the allocator does not tell is left out."""
    counters: dict[str, int] = field(default_factory=dict)
    """Values at the stretch's end by name of `COUNTER_KEYS`, since the process began."""
    live_bytes: int = 0
    """Allocated bytes at the stretch's end."""


class Account:
    """What stretches add up to for one who watches."""

    def __init__(self) -> None:
        self.phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._phase_peaks: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._live_bytes = 0

    def begin(self, counters: dict[str, int]) -> None:
        """Counts from `counters` on."""
        self._first = self._last = counters

    def add(self, stretch: Stretch) -> None:
        """Takes a stretch in."""
        for name, num_bytes in stretch.peaks.items():
            self._peaks[name] = max(self._peaks.get(name, 0), num_bytes)
        if self.phase is not None:
            before = self._phase_peaks.get(self.phase, 0)
            self._phase_peaks[self.phase] = max(before, stretch.peaks.get("allocated_bytes", 0))
        self._last = stretch.counters
        self._live_bytes = stretch.live_bytes

    def reading(self, num_steps: int | None = None) -> Reading:
        """Everything so far."""
        told: dict[str, Any] = {"allocated_bytes": 0} | self._peaks
        told |= {name: value - self._first.get(name, 0) for name, value in self._last.items()}
        peak = WindowPeak(**told, live_bytes=self._live_bytes, num_steps=num_steps)
        return Reading(peak=peak, phase_peaks=dict(self._phase_peaks), live_bytes=self._live_bytes)


class Meter:
    """One device's allocator, and who watches it."""

    name: str
    """Device as torch writes it."""

    def __init__(self) -> None:
        self.lifetime_allocated_bytes = 0
        self._accounts: list[Account] = []

    def cut(self, *, leaving: Sequence[Account] = (), entering: Sequence[Account] = ()) -> None:
        """Ends the stretch, tells all accounts, lets some leave and others enter, and begins the next stretch. Who
        leaves has left also where the device gives no answer."""
        try:
            stretch = self._read()
            self.tell(stretch)
        finally:
            self._accounts = [account for account in self._accounts if account not in leaving]
        for account in entering:
            account.begin(stretch.counters)
            self._accounts.append(account)
        self._go_on(watched=bool(self._accounts))

    def tell(self, stretch: Stretch) -> None:
        """Adds a stretch to all accounts and to the lifetime."""
        peak_bytes = stretch.peaks.get("allocated_bytes", 0)
        self.lifetime_allocated_bytes = max(self.lifetime_allocated_bytes, peak_bytes)
        for account in self._accounts:
            account.add(stretch)

    def _read(self) -> Stretch:
        raise NotImplementedError

    def _go_on(self, *, watched: bool) -> None:
        raise NotImplementedError


class CudaMeter(Meter):
    """The caching allocator's statistics of one GPU. Never initialises CUDA: before that there is nothing to count."""

    def __init__(self, torch: Any, index: int) -> None:
        super().__init__()
        self.name = f"cuda:{index}"
        self._cuda = torch.cuda
        self._index = index
        listen_to_resets(self._hear)

    def _hear(self, cuda: Any, index: int, stats: dict[str, int]) -> None:
        """Takes in what a window of the ladder is about to reset."""
        if cuda is self._cuda and index == self._index:
            self.tell(self._stretch(stats))

    def _read(self) -> Stretch:
        return self._stretch(self._cuda.memory_stats(self._index) if self._cuda.is_initialized() else {})

    @staticmethod
    def _stretch(stats: dict[str, int]) -> Stretch:
        return Stretch(
            peaks={name: stats[key] for name, key in PEAK_KEYS.items() if key in stats},
            counters={name: stats[key] for name, key in COUNTER_KEYS.items() if key in stats},
            live_bytes=stats.get("allocated_bytes.all.current", 0),
        )

    def _go_on(self, *, watched: bool) -> None:
        if self._cuda.is_initialized():
            forget_peaks(self._cuda, self._index, but=self._hear)


class CpuMeter(Meter):
    """The CPU's allocator, which is heard while somebody watches. Blocks made before are not known: where more is freed
    than was made, that much was there at the start."""

    name = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._profile: Any = None
        self._live_bytes = 0

    def _read(self) -> Stretch:
        if self._profile is None:
            return Stretch(live_bytes=self._live_bytes)
        self._profile.stop()
        events = read_events(self._profile.profiler.kineto_results.events())
        self._profile = None
        least = most = now = 0
        for event in events:
            now += event.delta_bytes
            least, most = min(least, now), max(most, now)
        start_bytes = max(self._live_bytes, -least)
        self._live_bytes = start_bytes + now
        return Stretch(peaks={"allocated_bytes": start_bytes + most}, live_bytes=self._live_bytes)

    def _go_on(self, *, watched: bool) -> None:
        if watched:
            import torch

            if getattr(torch._C._autograd, "_profiler_enabled", bool)():  # a second one would end the first unheard
                self._accounts.clear()
                raise MemplanError(
                    "Another profiler of torch is at work, and the CPU's allocator tells its story to one alone.",
                    "End that one first, or take this window out.",
                )
            self._profile = started_profile()


_METERS: dict[str, Meter] = {}


def meter_of(device: Any = None) -> Meter:
    """The process's one meter of `device`: `cuda`, `cuda:1`, a number, `cpu`, a torch.device, or None for the current
    GPU. MemplanError where there is none."""
    name = f"cuda:{device}" if isinstance(device, int) else "cuda" if device is None else str(device)
    kind, _, number = name.partition(":")
    if kind not in ("cuda", "cpu") or (number and not number.isdigit()):
        raise MemplanError(f"A window knows no device {name!r}.", "Type cuda, cuda:1 or cpu.")
    if kind == "cpu":
        return _METERS.setdefault("cpu", CpuMeter())
    if NO_CACHING in os.environ:
        raise MemplanError(f"{NO_CACHING} switches off the allocator that counts.", f"Type: unset {NO_CACHING}")
    import torch

    count = torch.cuda.device_count()  # asks NVML, so that a process may still fork afterwards
    if not count:
        raise MemplanError("There is no CUDA device here.", 'Type device="cpu" to watch the CPU\'s allocator.')
    cuda: Any = torch.cuda
    index = int(number) if number else cuda.current_device() if cuda.is_initialized() else 0
    if index >= count:
        raise MemplanError(f"There is no device cuda:{index}; torch sees {count}.", "Type cuda:0, or leave it out.")
    key = f"cuda:{index}"
    if key not in _METERS:
        _METERS[key] = CudaMeter(torch, index)
    return _METERS[key]
