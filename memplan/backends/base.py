"""The seam: what a device must offer to have a training step measured on it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

from memplan.record import WindowPeak

T = TypeVar("T")
OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
)
"""Texts with which a RuntimeError says that memory ran out. Those that may mean something else, such as
`CUBLAS_STATUS_NOT_INITIALIZED` (also a bad index) or `CUDNN_STATUS_NOT_SUPPORTED`, are left to `error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the allocator said about one window."""

    peak: WindowPeak
    """Peaks of the window; the bytes alive at its start count."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Largest allocated bytes between each mark and the next, by the mark's phase."""
    live_bytes: int
    """Allocated bytes at the window's end."""


class Window(Protocol):
    """A stretch of steps whose memory is read. `reading` is there after the end, also when the stretch failed."""

    reading: Reading | None

    def __enter__(self) -> "Window": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def mark(self, phase: str) -> None:
        """Says that `phase` begins now."""
        ...


class Backend(Protocol):
    """A device. Windows follow one another, the first one opened before the model is built; steps that are timed come
    after the last window, so that neither disturbs the other."""

    @property
    def device(self) -> Any:
        """The torch.device that steps run on."""
        ...

    def window(self) -> Window:
        """A window whose counters start when it is entered."""
        ...

    def clock(self, work: Callable[[], T]) -> tuple[T, int]:
        """What `work` returns and how long the device needed for it, in nanoseconds."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that memory ran out, and nothing else."""
        ...

    def describe(self) -> dict[str, Any]:
        """The device and what torch was set to, for the row's environment."""
        ...


def says_out_of_memory(error: BaseException) -> bool:
    """Whether the type or the text of `error` says that memory ran out, on whichever device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
