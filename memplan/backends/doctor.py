"""What this machine has, what it lacks, and what to type about it."""

import shutil
from dataclasses import replace
from typing import Any

from memplan.backends import cgroups
from memplan.backends.environment import (
    available_ram_bytes,
    commit,
    container,
    fingerprint,
    gpu,
    installed_version,
    settings,
    total_ram_bytes,
)
from memplan.backends.nvml import open_device
from memplan.record import Check
from memplan.record.fingerprint import spill_possible
from memplan.units import format_bytes

PARTS = {"typer": "the command line", "matplotlib": "plots", "rich": "tables on a terminal"}
"""Packages that memplan itself needs, and what for."""
FACTS = {"gpu_uuid": "UUID", "driver": "driver", "cuda_driver": "for CUDA up to", "power_limit_w": "watts at most"}
"""What is told of a GPU beside its name and memory, and how it is called."""


def checks() -> tuple[Check, ...]:
    """One check after another; each says what it found, and none depends on another having succeeded."""
    found = [_memplan(), *_torch(), _gpu(), *_neighbours(), *_spill(), _memory()]
    found += [_package(name, purpose) for name, purpose in PARTS.items()]
    found.append(
        _package("transformers", "Hugging Face models (optional)", advice="pip install 'memplan[hf]'", optional=True)
    )
    found += _settings()
    return tuple(found)


def _memplan() -> Check:
    import platform

    from memplan import __version__

    source = commit()
    found = f"{__version__}{f', commit {source}' if source else ''}, Python {platform.python_version()}"
    return Check(name="memplan", status="ok", found=found)


def _torch() -> list[Check]:
    advice = "pip install torch --index-url https://download.pytorch.org/whl/cpu (or without the index for CUDA)"
    if installed_version("torch") is None:
        found = "not installed: estimate, models, report and calibrate work, ladder and verify do not"
        return [Check(name="torch", status="missing", found=found, advice=advice)]
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways: missing library, wrong architecture, ...
        text = f"installed, but does not load: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        return [Check(name="torch", status="missing", found=text, advice=advice)]
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU only"
    return [
        Check(name="torch", status="ok", found=f"{torch.__version__}, {built}, {torch.get_num_threads()} threads"),
        _cuda(torch),
    ]


def _cuda(torch: Any) -> Check:
    if torch.cuda.is_available():
        return Check(name="CUDA", status="ok", found=torch.cuda.get_device_name(0))
    if gpu() is None:
        return Check(name="CUDA", status="note", found="no GPU", advice="memplan ladder ... --device cpu")
    if torch.version.cuda is None:
        advice = "pip install torch (a build with CUDA)"
        return Check(
            name="CUDA", status="missing", found="there is a GPU, but torch is built without CUDA", advice=advice
        )
    return Check(
        name="CUDA",
        status="missing",
        found="there is a GPU, but torch cannot use it",
        advice="nvidia-smi (is the driver new enough for this torch?)",
    )


def _gpu() -> Check:
    facts = gpu()
    if facts is None:
        seen = "nvidia-smi is there, NVML is not usable" if shutil.which("nvidia-smi") else "no NVIDIA driver"
        return Check(name="driver", status="note", found=seen)
    parts = [str(facts["gpu"])]
    if "gpu_memory_bytes" in facts:
        parts.append(format_bytes(facts["gpu_memory_bytes"]))
    parts += [f"{name} {facts[key]}" for key, name in FACTS.items() if key in facts]
    return Check(name="driver", status="ok", found=", ".join(parts))


def _neighbours() -> list[Check]:
    """Whether the GPU is ours alone, and whole."""
    device = open_device()
    if device is None:
        return []
    processes, sliced = device.processes(), device.mig() == "on"
    names = [str(replace(process, name=device.program(process.pid or 0))) for process in processes or ()]
    device.close()
    if processes is None:
        found = [Check(name="others", status="note", found="NVML does not say who uses the GPU")]
    elif names:
        advice = "end them, or give another GPU with CUDA_VISIBLE_DEVICES; --allow-shared climbs all the same"
        found = [Check(name="others", status="note", found="; ".join(names), advice=advice)]
    else:
        text = "no process on the GPU" + (" that a container sees" if container() else "")
        found = [Check(name="others", status="ok", found=text)]
    if sliced:
        text = "the GPU is cut in slices: a rung has the first one, or that which CUDA_VISIBLE_DEVICES names"
        found.append(Check(name="MIG", status="note", found=text))
    return found


def _spill() -> list[Check]:
    facts = fingerprint()
    if not spill_possible(facts):
        return []
    text = f"{facts['driver_model']}: what does not fit goes to the host's memory, and is slow instead of an error"
    advice = "in NVIDIA's control panel set the CUDA sysmem fallback policy to: prefer no sysmem fallback"
    return [Check(name="spill", status="note", found=text, advice=advice)]


def _memory() -> Check:
    total, available, limit = total_ram_bytes(), available_ram_bytes(), cgroups.limit_bytes()
    if total is None or available is None:
        return Check(name="memory", status="note", found="unknown here: rungs on the CPU are started unchecked")
    text = f"{format_bytes(total)}, {format_bytes(available)} available"
    if limit is not None:
        text += f", the control group may have {format_bytes(limit)}"
    return Check(name="memory", status="ok", found=text)


def _package(name: str, purpose: str, advice: str = "", optional: bool = False) -> Check:
    version = installed_version(name)
    if version is not None:
        return Check(name=name, status="ok", found=f"{version}, for {purpose}")
    status = "note" if optional else "missing"
    return Check(
        name=name, status=status, found=f"not installed, for {purpose}", advice=advice or f"pip install {name}"
    )


def _settings() -> list[Check]:
    there = settings()
    if not there:
        return [Check(name="settings", status="ok", found="no allocator setting in the environment")]
    found = [Check(name=name, status="note", found=value) for name, value in there.items()]
    new, old = there.get("PYTORCH_ALLOC_CONF"), there.get("PYTORCH_CUDA_ALLOC_CONF")
    if new is not None and old is not None and new != old:
        text = "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF say different things"
        advice = "unset one: torch has two readers, and each prefers another of them"
        found.append(Check(name="allocator", status="note", found=text, advice=advice))
    joined = f"{new},{old}".replace(" ", "").lower()
    if "expandable_segments:true" in joined and "max_split_size_mb" in joined:
        advice = "drop max_split_size_mb: with expandable segments it makes reserved memory grow (pytorch#123548)"
        text = "two settings that do not go together"
        found.append(Check(name="allocator", status="note", found=text, advice=advice))
    return found
