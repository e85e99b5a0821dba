"""A stand-in for torch on a card: an allocator with the counters of `torch.cuda.memory_stats`, a clock that tests turn,
and a note of every private or dear call."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memplan.backends.cuda import CudaBackend
from memplan.units import GIB

SEGMENT = 2048
"""Bytes that the driver gives at once."""


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

    def __init__(self, total_bytes: int = 80 * GIB) -> None:
        names = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
        self.current = dict.fromkeys(names, 0)
        self.peak = dict(self.current)
        self.total_bytes = total_bytes
        self.cap_bytes = total_bytes
        self.outside_bytes = 0
        """What context and libraries hold beside the allocator."""
        self.counters = {"num_device_alloc": 0, "num_alloc_retries": 0, "num_ooms": 0}
        self.pools: dict[str, int] = {}
        """Bytes reserved by private pools, by their flattened key."""
        self.synchronized = 0
        self.now_ms = 0.0
        self.observer: Callable[[int, int, int, int], None] | None = None
        self.calls: list[tuple[str, Any]] = []
        """Calls that a normal run must not make, or must make in the right order."""
        self.memory = SimpleNamespace(
            _record_memory_history=lambda **options: self.calls.append(("record", options)),
            _dump_snapshot=lambda path: self.calls.append(("dump", path)),
        )

    def allocate(self, requested: int) -> int:
        rounded = -(-requested // 512) * 512
        more = max(self.current["allocated_bytes"] + rounded - self.current["reserved_bytes"], 0)
        reserve = -(-more // SEGMENT) * SEGMENT
        if self.current["reserved_bytes"] + reserve > self.cap_bytes:
            self.counters["num_ooms"] += 1
            free_bytes = self.mem_get_info(0)[0]
            if self.observer is not None:
                self.observer(0, rounded, self.total_bytes, free_bytes)
            raise OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {rounded} bytes. GPU 0 has a total capacity of 80.00 GiB of "
                f"which {free_bytes} bytes is free."
            )
        self._add("requested_bytes", requested)
        self._add("allocated_bytes", rounded)
        self._add("active_bytes", rounded)
        self._add("reserved_bytes", reserve)
        self.counters["num_device_alloc"] += reserve // SEGMENT
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
        stats |= {
            f"reserved_bytes_by_private_pools.{key}.{kind}.current": size
            for key, size in self.pools.items()
            for kind in ("all", "large_pool")
        }
        return stats | self.counters

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.total_bytes - self.current["reserved_bytes"] - self.outside_bytes, self.total_bytes

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.calls.append(("cap", fraction))
        self.cap_bytes = int(fraction * self.total_bytes)

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="Fake", total_memory=self.total_bytes, uuid="GPU-1", major=9, minor=0)

    def get_allocator_backend(self) -> str:
        return "native"

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_ms=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_ms", self.now_ms)
        event.elapsed_time = lambda other: other.at_ms - event.at_ms
        return event


def fake_torch(cuda: FakeCuda) -> Any:
    """The module around it."""
    return SimpleNamespace(
        cuda=cuda,
        device=lambda kind, index: SimpleNamespace(type=kind, index=index),
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(
            cudnn=SimpleNamespace(version=lambda: 91000, benchmark=True, deterministic=False, allow_tf32=True),
            cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False)),
        ),
        are_deterministic_algorithms_enabled=lambda: False,
        _C=SimpleNamespace(_cuda_attach_out_of_memory_observer=lambda hear: setattr(cuda, "observer", hear)),
    )


def backend_of(cuda: FakeCuda) -> CudaBackend:
    """memplan's backend on it."""
    return CudaBackend(fake_torch(cuda))
