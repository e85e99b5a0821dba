"""Where a number comes from: machine, versions, settings. Whatever cannot be read is left out, never guessed."""

import os
from pathlib import Path
from typing import Any

import memplan
from memplan.backends import cgroups
from memplan.backends.nvml import open_device
from memplan.record.fingerprint import MEMORY_SETTINGS, PLACE_SETTINGS, SPEED_SETTINGS
from memplan.units import KIB

SETTINGS = (*MEMORY_SETTINGS, *SPEED_SETTINGS, *PLACE_SETTINGS)
"""Environment variables that are kept with a row, beside all that begin with `PYTORCH_`."""
CONTAINERS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
"""Files that a container's runtime leaves in it."""
GROUPS = ("kubepods", "docker", "containerd", "lxc", "libpod")
"""Words in the path of a container's control group."""
_PACKAGE = Path(memplan.__file__).parent


def fingerprint() -> dict[str, Any]:
    """Machine, versions and settings, read without torch; unknown ones are left out."""
    import platform

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
        "settings": settings() or None,
        "driver_model": "WSL" if "microsoft" in platform.release().lower() else None,
        "container": container(),
        "cgroup_limit_bytes": cgroups.limit_bytes(),
        "machine_id": machine_id(),
    }
    facts |= gpu() or {}
    return {name: value for name, value in facts.items() if value is not None}


def installed_version(package: str) -> str | None:
    """Version in the installed metadata of `package`, or None; nothing is imported."""
    import importlib.metadata

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


def settings() -> dict[str, str]:
    """The environment variables that change what an allocator does or what a step costs."""
    names = {*SETTINGS, *(name for name in os.environ if name.startswith("PYTORCH_"))}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def container(root: Path = Path("/")) -> str | None:
    """The kind of container that we run in, as far as it shows; None outside of one."""
    for file, kind in CONTAINERS.items():
        if (root / file.lstrip("/")).exists():
            return kind
    try:
        group = (root / "proc/1/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        group = ""
    found = next((word for word in GROUPS if word in group), None)
    return found or os.environ.get("container") or None  # noqa: SIM112 - systemd and podman write it so


def machine_id(path: Path = Path("/etc/machine-id")) -> str | None:
    """Twelve letters that tell this machine from others and nothing else about it; None where it has no number."""
    import hashlib

    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return hashlib.sha256(f"memplan {text}".encode()).hexdigest()[:12] if text else None


def gpu(nvml: Any = None) -> dict[str, Any] | None:
    """Name, memory, UUID, driver and limits of the first visible NVIDIA GPU by NVML, or None where there is none.

    What a slice or a container may not read is left out. `nvml` is as in `open_device`.
    """
    device = open_device(nvml)
    if device is None:
        return None
    facts = {
        "gpu": device.name(),
        "gpu_memory_bytes": device.total_bytes(),
        "gpu_uuid": device.uuid(),
        "driver": device.driver(),
        "cuda_driver": device.cuda_driver(),
        "driver_model": device.driver_model(),
        "power_limit_w": device.power_limit_w(),
        "mig": device.mig(),
    }
    device.close()
    return {name: fact for name, fact in facts.items() if fact is not None}


def total_ram_bytes() -> int | None:
    """Bytes of the host's memory."""
    return _meminfo_bytes("MemTotal")


def available_ram_bytes() -> int | None:
    """Bytes that a new process can still get: what Linux says is available, or less where a control group says so."""
    candidates = [_meminfo_bytes("MemAvailable"), cgroups.room_bytes()]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


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
