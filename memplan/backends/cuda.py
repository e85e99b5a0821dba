"""CUDA: the caching allocator's own statistics, times by CUDA events.

`reset_peak_memory_stats` sets each peak to what is alive now, and leaves the counters of retries, failures and driver
calls running (`torch/cuda/memory.py`; torch 2.13), so these are taken as differences.
"""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from memplan.backends.base import Reading, Refusal, Room, Segment, T, peaks_by_phase
from memplan.backends.resets import forget_peaks, listen_to_resets, stop_listening
from memplan.record import WindowPeak

PEAK_KEYS = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "requested_bytes": "requested_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.peak",
}
"""Field of `WindowPeak` to key of `torch.cuda.memory_stats`."""
COUNTER_KEYS = {
    "num_alloc_retries": "num_alloc_retries",
    "num_ooms": "num_ooms",
    "num_device_allocs": "num_device_alloc",
}
"""The same for counters that only ever rise."""
PRIVATE_POOLS = "reserved_bytes_by_private_pools."
"""How keys of private pools begin, in a torch that tells of them (2.13 does)."""
BLOCK_BYTES = 512
"""What blocks are rounded to. Source: kMinBlockSize, c10/core/AllocatorConfig.h, torch 2.13."""
HISTORY_ENTRIES = 100_000
"""Events of the allocator that a snapshot keeps, some KB each; torch's own default knows no end."""


class CudaBackend:
    """One NVIDIA GPU.

    `torch` stands for the module, so that a test can put a stand-in for it.
    """

    counts_while_timing = True

    def __init__(self, torch: Any = None, index: int = 0) -> None:
        if torch is None:
            import torch
        self._torch = torch
        self._index = index
        self._cap_bytes: int | None = None
        self._refusal: Refusal | None = None

    @property
    def device(self) -> Any:
        """torch's CUDA device."""
        return self._torch.device("cuda", self._index)

    def cap(self, cap_bytes: int) -> None:
        """The caching allocator reserves no more than that; context, libraries and NCCL come on top."""
        cuda = self._torch.cuda
        total_bytes = cuda.get_device_properties(self._index).total_memory
        self._cap_bytes = min(cap_bytes, total_bytes)
        cuda.set_per_process_memory_fraction(self._cap_bytes / total_bytes, self._index)

    def listen(self, *, history: bool) -> str:
        """Attaches torch's observer, which costs nothing until a request is refused; with `history` records stacks of
        Python of a bounded number of events, which does cost. Both are private to torch and may be missing."""
        self._torch.cuda.init()
        attach = getattr(getattr(self._torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._refused)
        if not history:
            return ""
        record = getattr(self._torch.cuda.memory, "_record_memory_history", None)
        try:
            if record is None:
                raise AttributeError
            record(enabled="all", context="all", stacks="python", max_entries=HISTORY_ENTRIES)
        except (AttributeError, TypeError):  # a torch with another signature
            return "this torch does not record the allocator's history: there is no snapshot"
        return ""

    def _refused(self, device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
        self._refusal = Refusal(requested_bytes=requested_bytes, free_bytes=free_bytes)

    def refusal(self) -> Refusal | None:
        """What the observer heard last."""
        return self._refusal

    def dump(self, path: str) -> bool:
        """Writes torch's pickle of segments and history, for its page `memory_viz`."""
        write = getattr(self._torch.cuda.memory, "_dump_snapshot", None)
        if write is None:
            return False
        write(path)
        return True

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

    def num_device_allocs(self) -> int:
        """Calls of cudaMalloc, and mappings of pages, so far."""
        return int(self._torch.cuda.memory_stats(self._index).get(COUNTER_KEYS["num_device_allocs"], 0))

    def rounded(self, num_bytes: int) -> int:
        """The next multiple of 512. A large block whose rest is not split off is larger."""
        return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def workspace_bytes(self) -> int:
        """cuBLAS's workspaces, told by what is no longer allocated when torch gives them back; 0 where it cannot."""
        clear = getattr(getattr(self._torch, "_C", None), "_cuda_clearCublasWorkspaces", None)
        if clear is None:
            return 0
        before = self._allocated_bytes()
        clear()
        return max(before - self._allocated_bytes(), 0)

    def _allocated_bytes(self) -> int:
        return int(self._torch.cuda.memory_stats(self._index).get("allocated_bytes.all.current", 0))

    def room(self) -> Room | None:
        """What driver and allocator say; None where the context answers nothing more."""
        cuda = self._torch.cuda
        try:
            free_bytes, total_bytes = cuda.mem_get_info(self._index)
            reserved_bytes = int(cuda.memory_stats(self._index).get("reserved_bytes.all.current", 0))
        except RuntimeError:
            return None
        return Room(
            free_bytes=free_bytes, total_bytes=total_bytes, reserved_bytes=reserved_bytes, cap_bytes=self._cap_bytes
        )

    def describe(self) -> dict[str, Any]:
        """The GPU, what torch was built with for it, and the switches that change kernels or memory."""
        torch = self._torch
        properties = torch.cuda.get_device_properties(self._index)
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return {
            "device": "cuda",
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_uuid": str(getattr(properties, "uuid", "")) or None,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": cudnn.version(),
            "allocator_backend": torch.cuda.get_allocator_backend(),
            "allocator_conf": allocator_conf(os.environ) or None,
            "cap_bytes": self._cap_bytes,
            "cudnn_benchmark": _switch(cudnn, "benchmark"),
            "cudnn_deterministic": _switch(cudnn, "deterministic"),
            "cudnn_tf32": _switch(cudnn, "allow_tf32"),
            "matmul_tf32": _switch(matmul, "allow_tf32"),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }


class CudaWindow:
    """The counters between entry and exit. Each mark closes a segment, so that its peak belongs to one phase. Resets
    by windows of the measured code itself lose none."""

    def __init__(self, torch: Any, index: int) -> None:
        self.reading: Reading | None = None
        self._torch = torch
        self._cuda = torch.cuda
        self._index = index
        self._phase = ""
        self._start_bytes = 0
        self._segments: list[Segment] = []
        self._peaks: dict[str, Any] = {}
        self._counters: dict[str, int] = {}
        self._heard: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._cuda.init()
        self._cuda.synchronize(self._index)
        forget_peaks(self._cuda, self._index, but=self._hear)
        listen_to_resets(self._hear)
        stats = self._cuda.memory_stats(self._index)
        self._start_bytes = stats.get("allocated_bytes.all.current", 0)
        self._counters = self._read_counters(stats)
        return self

    def mark(self, phase: str) -> None:
        """Closes the segment before and begins `phase`; allocation happens on the host, so no synchronisation."""
        stats = self._close_segment()
        self._phase, self._start_bytes = phase, stats.get("allocated_bytes.all.current", 0)
        forget_peaks(self._cuda, self._index, but=self._hear)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_listening(self._hear)
        if kind is None:  # after a failure the context may be poisoned; the counters still answer
            self._cuda.synchronize(self._index)
        stats = self._close_segment()
        told: dict[str, Any] = {
            name: value - self._counters[name] for name, value in self._read_counters(stats).items()
        }
        pools = [value for key, value in stats.items() if key.startswith(PRIVATE_POOLS) and _is_whole(key)]
        known = any(key.startswith(PRIVATE_POOLS.rstrip(".")) for key in stats)
        live_bytes = stats.get("allocated_bytes.all.current", 0)
        self.reading = Reading(
            peak=WindowPeak(
                **self._peaks,
                **told,
                private_pool_bytes=sum(pools) if known else None,
                used_bytes=self._used_bytes(stats) if kind is None else None,
                live_bytes=live_bytes,
            ),
            phase_peaks=peaks_by_phase(self._segments),
            live_bytes=live_bytes,
            segments=tuple(self._segments),
        )

    def _used_bytes(self, stats: dict[str, int]) -> int | None:
        """Largest reserved bytes and what lies outside the allocator now, all of which counts as this process's:
        whoever saw others on the device must not believe it."""
        try:
            free_bytes, total_bytes = self._cuda.mem_get_info(self._index)
        except (AttributeError, RuntimeError):
            return None
        outside_bytes = total_bytes - free_bytes - stats.get("reserved_bytes.all.current", 0)
        return int(self._peaks["reserved_bytes"] + max(outside_bytes, 0))

    def _hear(self, cuda: Any, index: int, stats: dict[str, int]) -> None:
        """Keeps the peaks of the segment so far, which somebody else is about to reset."""
        if cuda is self._cuda and index == self._index:
            self._heard = {key: max(self._heard.get(key, 0), stats.get(key, 0)) for key in PEAK_KEYS.values()}

    def _close_segment(self) -> dict[str, int]:
        stats: dict[str, int] = self._cuda.memory_stats(self._index)
        for name, key in PEAK_KEYS.items():
            self._peaks[name] = max(self._peaks.get(name, 0), self._heard.get(key, 0), stats.get(key, 0))
        key = PEAK_KEYS["allocated_bytes"]
        peak_bytes = max(stats.get(key, 0), self._heard.get(key, 0))
        self._heard = {}
        self._segments.append(Segment(phase=self._phase, start_bytes=self._start_bytes, peak_bytes=peak_bytes))
        return stats

    @staticmethod
    def _read_counters(stats: dict[str, int]) -> dict[str, int]:
        return {name: stats.get(key, 0) for name, key in COUNTER_KEYS.items()}


def _is_whole(key: str) -> bool:
    """Whether a key of a private pool tells all that it holds now."""
    return key.endswith(".all.current")


def _switch(backend: Any, name: str) -> Any:
    """What a switch of torch's stands on; None where it does not say. The old ones about TF32 raise RuntimeError when
    the new ones were used (torch 2.9 and later)."""
    try:
        return getattr(backend, name, None)
    except RuntimeError:
        return None


def allocator_conf(environment: Any) -> str:
    """The allocator's settings as `environment` gives them: the new variable counts before the old one.

    Source: c10/core/AllocatorConfig.cpp, torch 2.13.
    """
    return environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def allocator_warning(conf: str) -> str | None:
    """What to know about settings that do not go together; None where there is nothing."""
    words = conf.replace(" ", "")
    if "max_split_size_mb" in words and "expandable_segments:True" in words:
        return (
            "max_split_size_mb and expandable_segments stand together in the allocator's settings: reserved bytes may "
            "grow with every step; leave one of them out"
        )
    return None
