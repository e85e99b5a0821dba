"""One NVIDIA GPU by NVML. Every field is optional: what cannot be read is None, and why is kept.

NVML needs no CUDA context, so the parent of a ladder may use it. It counts GPUs in the order of the bus, torch in that
of CUDA, so a GPU is found by its UUID, or by what `CUDA_VISIBLE_DEVICES` names.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from memplan.units import format_bytes

T = TypeVar("T")
SLOWED_BY = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clock",
    0x200: "board limit",
    0x400: "reliability limit",
}
"""Bits of NVML's clock event reasons that slow a busy GPU (nvml.h, `nvmlClocksEventReason*`); idling and clocks that
somebody has set are none of them."""
UNTOLD = 0xFFFF_FFFF
"""What NVML writes for a 32-bit number it does not have; `NVML_VALUE_NOT_AVAILABLE`."""
NEVER_BYTES = 1 << 56
"""No GPU has as much; WSL has reported 17179869184 GiB, which is 2**64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int | None
    """Its number, in a container that of the host; None for memory in use that no process is listed for."""
    bytes: int | None
    """What it holds; None where NVML does not tell (WDDM, WSL, MIG)."""
    name: str = "unknown"
    """Name of its program."""

    def __str__(self) -> str:
        parts = [f"pid {self.pid}"] if self.pid is not None else []
        parts += [format_bytes(self.bytes)] if self.bytes is not None else []
        return f"{self.name} ({', '.join(parts)})" if parts else self.name


class Untold(Exception):
    """NVML answered, but what it said is no answer."""


class Device:
    """One GPU. `missing` says of each field that could not be read last time why."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.missing: dict[str, str] = {}
        self._nvml, self._handle, self._board = nvml, handle, handle
        self._names: dict[int, str] = {}
        sliced = self._quietly(lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle))
        if sliced:  # clocks and power are those of the whole board
            self._board = self._quietly(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle
        elif self.mig() == "on":  # CUDA takes the first slice, never the whole
            self._handle = self._quietly(lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)) or handle

    def close(self) -> None:
        """Lets go of NVML."""
        self._quietly(self._nvml.nvmlShutdown)

    def name(self) -> str | None:
        """`NVIDIA H100 80GB HBM3`."""
        return self.read("gpu", lambda: _text(self._nvml.nvmlDeviceGetName(self._handle)))

    def uuid(self) -> str | None:
        """`GPU-...`, or `MIG-...` of a slice."""
        return self.read("gpu_uuid", lambda: _text(self._nvml.nvmlDeviceGetUUID(self._handle)))

    def total_bytes(self) -> int | None:
        """Its memory."""
        return self.read("gpu_memory_bytes", lambda: _size(self._memory().total))

    def used_bytes(self) -> int | None:
        """What is in use, whoever uses it; what the driver keeps for itself is left out where NVML can tell."""
        return self.read("used_bytes", lambda: _size(self._memory().used))

    def counts_reserve(self) -> bool:
        """Whether the bytes in use hold those that the driver keeps for itself: hundreds of MiB on an idle GPU."""
        return not hasattr(self._quietly(self._memory), "reserved")

    def sm_clock_mhz(self) -> int | None:
        """Clock of the multiprocessors."""
        return self.read("sm_clock_mhz", lambda: _told(self._nvml.nvmlDeviceGetClockInfo(self._board, 1)))

    def power_w(self) -> float | None:
        """Watts that the board draws."""
        return self.read("power_w", lambda: _told(self._nvml.nvmlDeviceGetPowerUsage(self._board)) / 1000)

    def power_limit_w(self) -> float | None:
        """Watts that the board may draw."""
        limits = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
        return self.read("power_limit_w", lambda: _told(self._first(limits)(self._board)) / 1000)

    def temperature_c(self) -> int | None:
        """Degrees Celsius."""
        return self.read("temperature_c", lambda: _told(self._nvml.nvmlDeviceGetTemperature(self._board, 0)))

    def slowed_by(self) -> tuple[str, ...] | None:
        """Why the clock is below what it could be, of `SLOWED_BY`."""
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        bits = self.read("throttled", lambda: int(self._first(names)(self._board)))
        return None if bits is None else tuple(name for bit, name in SLOWED_BY.items() if bits & bit)

    def mig(self) -> str | None:
        """`on` or `off`; None where the GPU cannot be sliced."""
        return self.read("mig", lambda: "on" if self._nvml.nvmlDeviceGetMigMode(self._board)[0] else "off")

    def driver(self) -> str | None:
        """The driver's version."""
        return self.read("driver", lambda: _text(self._nvml.nvmlSystemGetDriverVersion()))

    def cuda_driver(self) -> str | None:
        """The newest CUDA that the driver serves: `12.8`."""
        names = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
        number = self.read("cuda_driver", lambda: _told(self._first(names)()))
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def driver_model(self) -> str | None:
        """`WDDM` where Windows' display driver runs the GPU."""
        names = ("nvmlDeviceGetCurrentDriverModel", "nvmlDeviceGetDriverModel")
        model = self.read("driver_model", lambda: int(self._first(names)(self._board)))
        return "WDDM" if model == 0 else None

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Who uses it, names left out; None where NVML does not tell. An empty list does not prove that nobody does."""
        listed = self.read("processes", lambda: list(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)))
        if listed is None:
            return None
        drawing = self._quietly(lambda: self._nvml.nvmlDeviceGetGraphicsRunningProcesses(self._handle))
        found: dict[int, int | None] = {}
        for process in [*listed, *(drawing or ())]:
            held = self._quietly(lambda of=process: _size(of.usedGpuMemory))  # type: ignore[misc]
            found[int(process.pid)] = max((value for value in (found.get(process.pid), held) if value), default=None)
        return tuple(GpuProcess(pid=pid, bytes=held) for pid, held in found.items())

    def program(self, pid: int) -> str:
        """Name of the program that runs as `pid`, without its folder."""
        if pid not in self._names:
            path = self._quietly(lambda: _text(self._nvml.nvmlSystemGetProcessName(pid)))
            self._names[pid] = path.replace("\\", "/").rpartition("/")[2].split(" ")[0] if path else "unknown"
        return self._names[pid]

    def read(self, field: str, call: Callable[[], T]) -> T | None:
        """What `call` gives, or None and the reason in `missing`."""
        try:
            value = call()
        except Exception as error:  # each NVML version and each kind of GPU has refusals of its own
            self.missing[field] = f"{type(error).__name__}: {error}".removesuffix(": ")
            return None
        self.missing.pop(field, None)
        return value

    def _memory(self) -> Any:
        """Version 2 of NVML's answer, where there is one: version 1 counts the driver's own bytes as used."""
        try:
            return self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2)
        except Exception:  # an older driver, an older package
            return self._nvml.nvmlDeviceGetMemoryInfo(self._handle)

    def _first(self, names: tuple[str, ...]) -> Callable[..., Any]:
        """Calls the functions `names` until one answers: new names first, old drivers know only old ones."""

        def call(*arguments: Any) -> Any:
            for name in names[:-1]:
                try:
                    return getattr(self._nvml, name)(*arguments)
                except Exception:  # the last one's refusal is the one that counts
                    continue
            return getattr(self._nvml, names[-1])(*arguments)

        return call

    @staticmethod
    def _quietly(call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception:  # an answer that is a luxury
            return None


def open_device(nvml: Any = None, uuid: str | None = None) -> Device | None:
    """The GPU that torch calls `cuda:0` here, or the one called `uuid`; None where there is none that can be used.

    `nvml` stands for the module `pynvml`, so that a test can put a stand-in for it. Whoever opens it closes it.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except Exception:  # no driver, no library, no permission
        return None
    try:
        wanted = uuid if uuid is not None else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        handle = _find(nvml, wanted)
        device = Device(nvml, handle) if handle is not None else None
        if device is not None and device.name() is not None:
            return device
    except Exception:  # seen, but not usable: as good as absent
        pass
    nvml.nvmlShutdown()
    return None


def bare(uuid: str) -> str:
    """`uuid` without `GPU-` or `MIG-`, which torch leaves out."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _find(nvml: Any, wanted: str) -> Any:
    """The handle of the GPU with this index, UUID or beginning of a UUID; None when there is none."""
    count = int(nvml.nvmlDeviceGetCount())
    if count == 0 or wanted in ("", "-1"):
        return None
    if wanted.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(wanted))
    for name in (wanted, f"GPU-{bare(wanted)}", f"MIG-{bare(wanted)}"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except Exception:  # not its whole name, which CUDA does not ask for either
            continue
    for index in range(count):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if bare(_text(nvml.nvmlDeviceGetUUID(handle))).startswith(bare(wanted)):
            return handle
    return None


def _size(value: Any) -> int:
    if value is None or not 0 <= int(value) < NEVER_BYTES:
        raise Untold(f"NVML says {value} bytes")
    return int(value)


def _told(value: Any) -> int:
    if value is None or int(value) == UNTOLD:
        raise Untold("NVML has no number for it")
    return int(value)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
