"""The seam: what a device must offer to have a training step measured on it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

from memplan.record import WindowPeak

T = TypeVar("T")
NO_ROOM_FRAC = 0.01
"""With less than this share of a device free, a library that could not start may have been short of memory."""
FULL_FRAC = 0.97
"""The same with this share of the allowed bytes reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How full a device is."""

    free_bytes: int
    """Bytes that the driver still has."""
    total_bytes: int
    """Bytes of the device."""
    reserved_bytes: int
    """Bytes that this process's allocator holds."""
    cap_bytes: int | None = None
    """Bytes that it may hold; None where nothing but the device limits it."""

    @property
    def nearly_full(self) -> bool:
        """Whether so little is left that a failure which does not speak of memory may be one of memory."""
        allowed_bytes = self.total_bytes if self.cap_bytes is None else self.cap_bytes
        return self.free_bytes < NO_ROOM_FRAC * self.total_bytes or self.reserved_bytes >= FULL_FRAC * allowed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that the allocator refused for good, as it told its observer."""

    requested_bytes: int
    """Bytes asked for."""
    free_bytes: int
    """Bytes that the driver still had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The stretch between one mark and the next."""

    phase: str
    """The mark's phase, empty before the first mark."""
    start_bytes: int
    """Allocated bytes at its start."""
    peak_bytes: int
    """Largest allocated bytes in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the allocator said about one window."""

    peak: WindowPeak
    """Peaks of the window; the bytes alive at its start count."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Largest allocated bytes between each mark and the next, by the mark's phase."""
    live_bytes: int
    """Allocated bytes at the window's end."""
    segments: tuple[Segment, ...] = ()
    """The window from mark to mark, from its start on."""


def peaks_by_phase(segments: Iterable[Segment]) -> dict[str, int]:
    """Largest allocated bytes of each phase that has a name."""
    peaks: dict[str, int] = {}
    for segment in segments:
        if segment.phase:
            peaks[segment.phase] = max(peaks.get(segment.phase, 0), segment.peak_bytes)
    return peaks


class Window(Protocol):
    """A stretch of steps whose memory is read. `reading` is there after the end, also when the stretch failed."""

    reading: Reading | None

    def __enter__(self) -> "Window": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def mark(self, phase: str) -> None:
        """Says that `phase` begins now; an empty one is none."""
        ...


class Backend(Protocol):
    """A device. Windows follow one another, the first one opened before the model is built. What allocates between two
    of them must free it there too."""

    counts_while_timing: bool
    """Whether a window without marks costs the steps inside nothing, so that the timed ones can stand in it."""

    @property
    def device(self) -> Any:
        """The torch.device that steps run on."""
        ...

    def cap(self, cap_bytes: int) -> None:
        """The allocator holds no more than `cap_bytes` from now on; to be called before anything is built."""
        ...

    def listen(self, *, history: bool) -> str:
        """Hears of requests that are refused, and with `history` has the allocator record its own. What was asked for
        in vain, in words, or nothing."""
        ...

    def window(self) -> Window:
        """A window whose counters start when it is entered."""
        ...

    def clock(self, work: Callable[[], T]) -> tuple[T, int]:
        """What `work` returns and how long the device needed for it, in nanoseconds."""
        ...

    def num_device_allocs(self) -> int:
        """Requests to the driver so far; 0 where they cannot be told."""
        ...

    def rounded(self, num_bytes: int) -> int:
        """What the allocator counts for a storage of `num_bytes`."""
        ...

    def workspace_bytes(self) -> int:
        """Bytes that libraries keep in the allocator from step to step. They may be given back by this: for the end."""
        ...

    def room(self) -> Room | None:
        """How full the device is now; None where it does not tell, or no longer answers."""
        ...

    def refusal(self) -> Refusal | None:
        """The last request that was refused, where the allocator tells."""
        ...

    def dump(self, path: str) -> bool:
        """Writes the recorded history to `path`; whether there was one."""
        ...

    def describe(self) -> dict[str, Any]:
        """The device and what torch was set to, for the row's environment."""
        ...
