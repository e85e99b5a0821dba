"""CUDA's logic against a stand-in for torch: an allocator with the counters of torch.cuda.memory_stats."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.backends.cuda import CudaBackend


class OutOfMemoryError(RuntimeError):
    """torch's own type."""


class AcceleratorError(RuntimeError):
    """torch's type for errors of the runtime, with the runtime's code."""

    def __init__(self, text: str, error_code: int | None = None) -> None:
        super().__init__(text)
        if error_code is not None:
            self.error_code = error_code


class FakeCuda:
    """`torch.cuda` with an allocator that rounds to 512 bytes and reserves 2048 at a time."""

    def __init__(self) -> None:
        self.current = {"allocated_bytes": 0, "requested_bytes": 0, "active_bytes": 0, "reserved_bytes": 0}
        self.peak = dict(self.current)
        self.num_device_alloc = 0
        self.num_alloc_retries = 0
        self.synchronized = 0
        self.now_ms = 0.0

    def allocate(self, requested: int) -> int:
        rounded = -(-requested // 512) * 512
        self._add("requested_bytes", requested)
        self._add("allocated_bytes", rounded)
        self._add("active_bytes", rounded)
        while self.current["allocated_bytes"] > self.current["reserved_bytes"]:
            self._add("reserved_bytes", 2048)
            self.num_device_alloc += 1
        return requested

    def free(self, requested: int) -> None:
        rounded = -(-requested // 512) * 512
        self._add("requested_bytes", -requested)
        self._add("allocated_bytes", -rounded)
        self._add("active_bytes", -rounded)

    def _add(self, name: str, num_bytes: int) -> None:
        self.current[name] += num_bytes
        self.peak[name] = max(self.peak[name], self.current[name])

    def init(self) -> None:
        pass

    def synchronize(self, index: int) -> None:
        self.synchronized += 1

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = dict(self.current)

    def memory_stats(self, index: int) -> dict[str, int]:
        stats = {f"{name}.all.peak": value for name, value in self.peak.items()}
        stats |= {f"{name}.all.current": value for name, value in self.current.items()}
        return stats | {"num_device_alloc": self.num_device_alloc, "num_alloc_retries": self.num_alloc_retries}

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_ms=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_ms", self.now_ms)
        event.elapsed_time = lambda other: other.at_ms - event.at_ms
        return event


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    yield FakeCuda()


def backend_of(cuda: FakeCuda) -> CudaBackend:
    torch = SimpleNamespace(cuda=cuda, OutOfMemoryError=OutOfMemoryError, AcceleratorError=AcceleratorError)
    return CudaBackend(torch)


def test_each_segment_belongs_to_its_phase_and_the_window_is_their_largest(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    cuda.allocate(1000)
    with backend.window() as window:
        for _ in range(2):  # two chunks
            window.mark("forward")
            saved = cuda.allocate(3000)
            window.mark("backward")
            cuda.free(cuda.allocate(100))
            cuda.free(saved)
        window.mark("optimizer")
        cuda.free(cuda.allocate(512))
    reading = window.reading
    assert reading is not None
    assert reading.phase_peaks == {"forward": 1024 + 3072, "backward": 1024 + 3072 + 512, "optimizer": 1024 + 512 + 0}
    assert reading.phase_peaks["optimizer"] < reading.phase_peaks["backward"]
    assert reading.peak.allocated_bytes == 1024 + 3072 + 512
    assert reading.peak.requested_bytes == 1000 + 3000 + 100
    assert reading.peak.reserved_bytes == 6144
    assert reading.live_bytes == 1024


def test_a_window_forgets_the_peaks_and_counters_before_it(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    cuda.num_alloc_retries = 9
    cuda.free(cuda.allocate(100_000))
    with backend.window() as first:
        cuda.allocate(512)
        cuda.num_alloc_retries += 1
    with backend.window() as second:
        cuda.allocate(512)
    assert first.reading is not None and second.reading is not None
    assert first.reading.peak.allocated_bytes == 512
    assert first.reading.peak.num_alloc_retries == 1
    assert second.reading.peak.num_alloc_retries == 0
    assert second.reading.peak.num_device_allocs == 0


def test_device_calls_in_a_window_are_counted(cuda: FakeCuda) -> None:
    with backend_of(cuda).window() as window:
        cuda.allocate(5000)
    assert window.reading is not None
    assert window.reading.peak.num_device_allocs == 3


def test_a_failed_window_still_reads_but_does_not_wait(cuda: FakeCuda) -> None:
    window = backend_of(cuda).window()
    with pytest.raises(OutOfMemoryError), window:
        window.mark("forward")
        cuda.allocate(5000)
        before = cuda.synchronized
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert cuda.synchronized == before
    assert window.reading is not None
    assert window.reading.phase_peaks == {"forward": 5120}


def test_times_come_from_events(cuda: FakeCuda) -> None:
    def work() -> str:
        cuda.now_ms += 12.5
        return "done"

    assert backend_of(cuda).clock(work) == ("done", 12_500_000)


def test_the_keys_are_those_of_torch() -> None:
    """The stand-in proves nothing about names; torch's own documentation of `memory_stats` does."""
    torch = pytest.importorskip("torch")
    from memplan.backends.cuda import COUNTER_KEYS, PEAK_KEYS

    text = torch.cuda.memory_stats.__doc__
    for key in PEAK_KEYS.values():
        assert key.split(".")[0] in text
    assert COUNTER_KEYS["num_alloc_retries"] in text
    assert COUNTER_KEYS["num_device_alloc" + "s"] in text


def test_the_protocol_is_kept(cuda: FakeCuda) -> None:
    from memplan.backends.base import Backend
    from memplan.backends.cpu import CpuBackend

    names = [name for name in vars(Backend) if not name.startswith("_")]
    for backend in (backend_of(cuda), CpuBackend()):
        assert all(hasattr(type(backend), name) for name in names)
