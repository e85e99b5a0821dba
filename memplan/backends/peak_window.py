"""A window over the allocator for a training loop of one's own: `with memplan.PeakWindow() as window: ...`."""

from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from memplan.backends.base import Reading
from memplan.backends.meters import Account, Meter, meter_of
from memplan.errors import MemplanError
from memplan.units import format_bytes

HISTORY = 1000
"""Records that `step` keeps, the latest ones."""


class PeakWindow:
    """Peaks of everything between entry and exit, bytes alive at the entry included; while it is open, of everything so
    far. Entering resets the device's peaks, and no other window loses one by that.

    `device` is `cuda` (the current GPU, taken when left out), `cuda:1` or `cpu`. On the CPU only blocks are
    seen that are made inside of windows by the thread that opened them: torch's profiler hears no other thread. Nothing
    waits for the device: memory is handed out on the host.

    `mark("backward")` begins a phase. `step()` ends a record after `every` calls; the latest ones are in `history`.
    """

    def __init__(self, device: Any = None, *, every: int = 1, history: int = HISTORY) -> None:
        if every < 1:
            raise MemplanError(f"every is {every}; it must be 1 or more.")
        self.every = every
        self.history: deque[Reading] = deque(maxlen=history)
        self._device = device
        self._meter: Meter | None = None
        self._whole: Account | None = None
        self._part: Account | None = None
        self._num_steps = 0
        self.is_open = False

    def open(self) -> Self:
        """Begins; whatever an earlier use of this window saw is forgotten."""
        if self.is_open:
            raise MemplanError("The window is open already.", "Make a second one for what is inside.")
        self._meter = meter_of(self._device)
        self._whole, self._part = Account(), Account()
        self._meter.cut(entering=(self._whole, self._part))
        self.history.clear()
        self._num_steps = 0
        self.is_open = True
        return self

    def close(self) -> None:
        """Ends; the numbers stay."""
        if self.is_open:
            meter, whole, part = self._opened()
            self.is_open = False
            meter.cut(leaving=(part, whole))

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(Exception):  # the error that ends the window is the one to see
            self.close()

    def mark(self, phase: str) -> None:
        """Says that `phase` begins now."""
        meter, whole, part = self._opened()
        meter.cut()
        whole.phase = part.phase = phase

    def step(self) -> Reading | None:
        """Ends a step. Every `every` of them the record since the last one comes back, and the next begins."""
        meter, whole, part = self._opened()
        self._num_steps += 1
        if self._num_steps % self.every:
            return None
        self._part = Account()
        meter.cut(leaving=(part,), entering=(self._part,))
        whole.phase = None
        record = part.reading(self.every)
        self.history.append(record)
        return record

    @property
    def reading(self) -> Reading:
        """All numbers at once."""
        if self._meter is None or self._whole is None:
            raise MemplanError("The window was never opened.", "Type: with memplan.PeakWindow() as window:")
        if self.is_open:
            self._meter.cut()
        return self._whole.reading(self._num_steps or None)

    @property
    def allocated_bytes(self) -> int:
        """Largest live bytes after rounding."""
        return self.reading.peak.allocated_bytes

    @property
    def requested_bytes(self) -> int | None:
        """Largest bytes asked for; None on the CPU."""
        return self.reading.peak.requested_bytes

    @property
    def active_bytes(self) -> int | None:
        """Largest allocated bytes plus freed blocks that wait for a stream; None on the CPU."""
        return self.reading.peak.active_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Largest bytes held from the driver; None on the CPU."""
        return self.reading.peak.reserved_bytes

    @property
    def num_alloc_retries(self) -> int | None:
        """Failed requests that were repeated after giving cached segments back, in this window; None on the CPU."""
        return self.reading.peak.num_alloc_retries

    @property
    def num_ooms(self) -> int | None:
        """Requests that failed for good, in this window; None on the CPU."""
        return self.reading.peak.num_ooms

    @property
    def num_device_allocs(self) -> int | None:
        """Requests to the driver in this window; None on the CPU."""
        return self.reading.peak.num_device_allocs

    @property
    def phase_peaks(self) -> dict[str, int]:
        """Largest allocated bytes between each mark and the next, by the mark's phase."""
        return self.reading.phase_peaks

    @property
    def live_bytes(self) -> int:
        """Allocated bytes now, or at the window's end."""
        return self.reading.live_bytes

    @property
    def lifetime_allocated_bytes(self) -> int:
        """Largest allocated bytes of the process so far, whatever windows have reset; what came before the first one
        counts on CUDA."""
        if self._meter is None:
            self._meter = meter_of(self._device)
        self._meter.cut()
        return self._meter.lifetime_allocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        numbers = as_dict(self.reading)
        assert self._meter is not None  # or there would be no reading
        more = {"device": self._meter.name, "lifetime_allocated_bytes": self._meter.lifetime_allocated_bytes}
        return numbers | more

    def __str__(self) -> str:
        if self._whole is None:
            return "a window that was never opened"
        return say(self.reading)

    def _opened(self) -> tuple[Meter, Account, Account]:
        if not self.is_open or self._meter is None or self._whole is None or self._part is None:
            raise MemplanError("The window is not open.", "Type: with memplan.PeakWindow() as window:")
        return self._meter, self._whole, self._part


NAMES = (
    "allocated_bytes",
    "requested_bytes",
    "active_bytes",
    "reserved_bytes",
    "num_alloc_retries",
    "num_ooms",
    "num_device_allocs",
    "num_steps",
    "live_bytes",
)
"""Fields of `WindowPeak` that a window fills."""


def as_dict(reading: Reading) -> dict[str, Any]:
    """The numbers of `reading` by name, those that the device does not tell left out."""
    told = {name: getattr(reading.peak, name) for name in NAMES}
    return {name: value for name, value in told.items() if value is not None} | {"phase_peaks": reading.phase_peaks}


def say(reading: Reading) -> str:
    """`reading` in one line: 1.50 GiB allocated (in backward), 2.00 GiB reserved, 3 alloc retries."""
    peak = reading.peak
    largest = max(reading.phase_peaks, key=reading.phase_peaks.__getitem__, default="")
    parts = [f"{format_bytes(peak.allocated_bytes)} allocated{f' (in {largest})' if largest else ''}"]
    if peak.reserved_bytes is not None:
        parts.append(f"{format_bytes(peak.reserved_bytes)} reserved")
    for what, number in (("alloc retries", peak.num_alloc_retries), ("out of memory", peak.num_ooms)):
        if number:
            parts.append(f"{number} {what}")
    return ", ".join(parts)
