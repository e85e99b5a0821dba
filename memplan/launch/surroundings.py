"""What lies around a step and changes its memory or its speed: caches of compiled code, settings that do not go
together."""

import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memplan.backends.cuda import allocator_conf, allocator_warning
from memplan.spec import DeviceSpec, RunSpec
from memplan.spec.entry import EntryRun


def surroundings(run: RunSpec | EntryRun, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """For a step that compiles, whether inductor finds anything compiled before: with a cold cache it tries kernels
    out, which takes memory of its own in the first step."""
    compiles = isinstance(run, RunSpec) and run.step.compile == "on"
    return {"inductor_cache": inductor_cache(environment)} if compiles else {}


def inductor_cache(environment: Mapping[str, str]) -> str:
    """`warm` where inductor's folder holds anything, else `cold`.

    Source: default_cache_dir, torch/_inductor/runtime/cache_dir_utils.py, torch 2.13.
    """
    folder = environment.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        folder = str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    try:
        return "warm" if any(Path(folder).iterdir()) else "cold"
    except OSError:
        return "cold"


def warnings(device: DeviceSpec, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Sentences about settings of a device's allocator that spoil what is measured on it."""
    text = allocator_warning(allocator_conf(environment)) if device.rules == "cuda" else None
    return [text] if text else []
