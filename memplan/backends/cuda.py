"""CUDA: the caching allocator's own statistics, times by CUDA events.

`reset_peak_memory_stats` sets each peak to what is alive now, and leaves the counters of retries and driver calls
running (`torch/cuda/memory.py`; torch 2.13), so these two are taken as differences.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from memplan.backends.base import Reading, T, says_out_of_memory
from memplan.record import WindowPeak

PEAK_KEYS = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "requested_bytes": "requested_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
}
"""Field of `WindowPeak` to key of `torch.cuda.memory_stats`."""
COUNTER_KEYS = {"num_alloc_retries": "num_alloc_retries", "num_device_allocs": "num_device_alloc"}
"""The same for counters that only ever rise."""
CUDA_ERROR_MEMORY_ALLOCATION = 2
"""`cudaErrorMemoryAllocation` of the CUDA runtime."""


class CudaBackend:
    """One NVIDIA GPU.

    `torch` stands for the module, so that a test can put a stand-in for it.
    """

    def __init__(self, torch: Any = None, index: int = 0) -> None:
        if torch is None:
            import torch
        self._torch = torch
        self._index = index

    @property
    def device(self) -> Any:
        """torch's CUDA device."""
        return self._torch.device("cuda", self._index)

    def window(self) -> "CudaWindow":
        """A window over the allocator's counters."""
        return CudaWindow(self._torch, self._index)

    def clock(self, work: Callable[[], T]) -> tuple[T, int]:
        """What `work` returns and the time between two CUDA events around it, in nanoseconds."""
        cuda = self._torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize(self._index)
        start.record()
        value = work()
        end.record()
        end.synchronize()
        return value, round(start.elapsed_time(end) * 10**6)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` is torch's own type for it, carries CUDA's code, or says so in one of the known texts."""
        if isinstance(error, self._torch.OutOfMemoryError):
            return True
        accelerator_error = getattr(self._torch, "AcceleratorError", None)
        if accelerator_error is not None and isinstance(error, accelerator_error):
            code = getattr(error, "error_code", None)
            return code == CUDA_ERROR_MEMORY_ALLOCATION or says_out_of_memory(error)
        return says_out_of_memory(error)

    def describe(self) -> dict[str, Any]:
        """The GPU and what torch was built with for it."""
        torch = self._torch
        properties = torch.cuda.get_device_properties(self._index)
        return {
            "device": "cuda",
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_uuid": str(getattr(properties, "uuid", "")) or None,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "allocator_backend": torch.cuda.get_allocator_backend(),
        }


class CudaWindow:
    """The counters between entry and exit. Each mark closes a segment, so that its peak belongs to one phase."""

    def __init__(self, torch: Any, index: int) -> None:
        self.reading: Reading | None = None
        self._torch = torch
        self._cuda = torch.cuda
        self._index = index
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._phase_peaks: dict[str, int] = {}
        self._counters: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._cuda.init()
        self._cuda.synchronize(self._index)
        self._cuda.reset_peak_memory_stats(self._index)
        self._counters = self._read_counters(self._cuda.memory_stats(self._index))
        return self

    def mark(self, phase: str) -> None:
        """Closes the segment before and begins `phase`; allocation happens on the host, so no synchronisation."""
        self._close_segment()
        self._phase = phase
        self._cuda.reset_peak_memory_stats(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after a failure the context may be poisoned; the counters still answer
            self._cuda.synchronize(self._index)
        stats = self._close_segment()
        counters = self._read_counters(stats)
        told: dict[str, Any] = self._peaks | {name: value - self._counters[name] for name, value in counters.items()}
        self.reading = Reading(
            peak=WindowPeak(**told),
            phase_peaks=self._phase_peaks,
            live_bytes=stats.get("allocated_bytes.all.current", 0),
        )

    def _close_segment(self) -> dict[str, int]:
        stats: dict[str, int] = self._cuda.memory_stats(self._index)
        for name, key in PEAK_KEYS.items():
            self._peaks[name] = max(self._peaks.get(name, 0), stats.get(key, 0))
        if self._phase is not None:
            before = self._phase_peaks.get(self._phase, 0)
            self._phase_peaks[self._phase] = max(before, stats.get(PEAK_KEYS["allocated_bytes"], 0))
        return stats

    @staticmethod
    def _read_counters(stats: dict[str, int]) -> dict[str, int]:
        return {name: stats.get(key, 0) for name, key in COUNTER_KEYS.items()}
