"""Where a number comes from: machine, versions, settings. Whatever cannot be read is left out, never guessed."""

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import memplan
from memplan.units import KIB

ALLOCATOR_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "MALLOC_ARENA_MAX",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that change what an allocator does or what a step costs."""
_PACKAGE = Path(memplan.__file__).parent


def fingerprint() -> dict[str, Any]:
    """Machine, versions and settings, read without torch; unknown ones are left out."""
    facts = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _proc_value("/proc/cpuinfo", "model name"),
        "num_cpus": os.cpu_count(),
        "ram_bytes": total_ram_bytes(),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "memplan": memplan.__version__,
        "commit": commit(),
        "settings": {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ} or None,
    }
    facts |= gpu() or {}
    return {name: value for name, value in facts.items() if value is not None}


def installed_version(package: str) -> str | None:
    """Version in the installed metadata of `package`, or None; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Short commit of the checkout that memplan runs from, `+` behind it when files differ; None elsewhere."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != _PACKAGE.parent:
        return None
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "memplan")
    return head and head + ("+" if changed else "")


def gpu(nvml: Any = None) -> dict[str, Any] | None:
    """Name, memory and driver of the first visible NVIDIA GPU by NVML, or None where there is none.

    `nvml` stands for the module `pynvml`, so that a test can put a stand-in for it. NVML counts in physical order, so
    the GPU is looked up by what `CUDA_VISIBLE_DEVICES` names.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except Exception:  # no driver, no library, no permission: each NVML version has its own type
        return None
    facts: dict[str, Any] = {}
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if visible in ("", "-1") or nvml.nvmlDeviceGetCount() == 0:
            return None
        if visible.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(visible)
        facts["gpu"] = _text(nvml.nvmlDeviceGetName(handle))
        for name, read in (
            ("gpu_memory_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
            ("driver", lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        ):
            try:
                facts[name] = read()
            except Exception:  # a field that a MIG slice or a container may not read is left out
                continue
        return facts
    except Exception:  # seen, but not usable: as good as absent
        return None
    finally:
        nvml.nvmlShutdown()


def total_ram_bytes() -> int | None:
    """Bytes of the host's memory."""
    return _meminfo_bytes("MemTotal")


def available_ram_bytes() -> int | None:
    """Bytes that a new process can still get: what Linux says is available, or less where a control group says so."""
    candidates = [_meminfo_bytes("MemAvailable"), _group_room_bytes()]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def _group_room_bytes() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text().strip()
        cached = sum(
            int(line.split()[1])
            for line in (folder / "memory.stat").read_text().splitlines()
            if line.startswith(("inactive_file ", "active_file "))
        )
    except (OSError, ValueError):
        return None
    return int(limit) - int(used) + cached if limit.isdigit() and used.isdigit() else None


def _meminfo_bytes(name: str) -> int | None:
    value = _proc_value("/proc/meminfo", name)
    return int(value.split()[0]) * KIB if value else None


def _proc_value(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _git(*arguments: str) -> str | None:
    import subprocess

    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
