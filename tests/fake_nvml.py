"""A stand-in for the module `pynvml`: GPUs that say what a test wants, and refuse what it wants refused."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
HUGE = (1 << 32) - 1
"""What NVML writes for a 32-bit number that it does not have."""


class NVMLError(Exception):
    """As NVML's own."""


@dataclass
class FakeGpu:
    """What one GPU says."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-11111111-aaaa"
    total: int = 80 * GIB
    used: int = 0
    reserved: int = 600 << 20
    processes: dict[int, int | None] = field(default_factory=dict)
    drawing: dict[int, int | None] = field(default_factory=dict)
    clock: int = 1980
    power: int = 650_000
    limit: int = 700_000
    temperature: int = 61
    reasons: int = 0
    mig: int | None = 0
    slices: list["FakeGpu"] = field(default_factory=list)
    board: "FakeGpu | None" = None
    driver_model: int | None = None


class FakeNvml:
    """The functions that memplan calls; `opened` counts who has not let go yet."""

    nvmlMemory_v2 = 0x2000028

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.opened = 0
        self.num_calls = 0
        self.programs: dict[int, str] = {}

    def refuse(self, *names: str, error: Exception | None = None) -> "FakeNvml":
        """Makes these functions fail."""

        def refused(*arguments: Any, **options: Any) -> Any:
            raise error or NVMLError("Insufficient Permissions")

        for name in names:
            setattr(self, name, refused)
        return self

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in (*self.gpus, *(part for whole in self.gpus for part in whole.slices)):
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError("Not Found")

    def nvmlDeviceIsMigDeviceHandle(self, gpu: FakeGpu) -> bool:
        return gpu.board is not None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu:
        assert gpu.board is not None
        return gpu.board

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        return gpu.slices[index]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if gpu.mig is None:
            raise NVMLError("Not Supported")
        return [gpu.mig, gpu.mig]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        return gpu.name.encode()

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        self.num_calls += 1
        if version == 0x2000028:
            return SimpleNamespace(total=gpu.total, used=gpu.used, reserved=gpu.reserved)
        return SimpleNamespace(total=gpu.total, used=gpu.used + gpu.reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        self.num_calls += 1
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in gpu.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in gpu.drawing.items()]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid not in self.programs:
            raise NVMLError("Not Found")
        return self.programs[pid]

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        assert kind == 1
        self.num_calls += 1
        return gpu.clock

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return gpu.power

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        return gpu.limit

    def nvmlDeviceGetPowerManagementLimit(self, gpu: FakeGpu) -> int:
        return gpu.limit

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return gpu.temperature

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return gpu.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return gpu.reasons

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCurrentDriverModel(self, gpu: FakeGpu) -> int:
        if gpu.driver_model is None:
            raise NVMLError("Not Supported")
        return gpu.driver_model

    def nvmlDeviceGetDriverModel(self, gpu: FakeGpu) -> list[int]:
        raise NVMLError("Not Supported")
