"""Whether numbers of two environments may be held against each other, and which facts say no."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from memplan.record import RungResult
from memplan.record.fingerprint import MEMORY_KEYS, MEMORY_SETTINGS, SPEED_SETTINGS

CPU_KEYS = ("cpu_capability", "num_threads")
"""Facts that decide on the host what kernels ask for: the instruction set, and a buffer for each thread."""
SIMULATED_KEYS = ("device", "torch", *MEMORY_SETTINGS)
"""Facts that decide a trace: the card, torch's minor version, whose ops are played, and what its allocator is told."""
PREDICTED = ("simulated", "estimated")
"""Sources of rows for which nothing ran: no machine makes them differ."""
HARDWARE_KEYS = (
    "device",
    "gpu",
    "gpu_memory_bytes",
    "mig",
    "power_limit_w",
    "max_sm_clock_mhz",
    "driver_model",
    "machine",
    "cpu",
    "num_cpus",
)
"""Facts that make a machine faster or slower whatever runs on it."""
SOFTWARE_KEYS = ("torch", "cuda", "cudnn", "driver", *CPU_KEYS, *MEMORY_SETTINGS, *SPEED_SETTINGS)
"""Facts that make the same machine faster or slower."""
SPEED_KEYS = (*HARDWARE_KEYS, *SOFTWARE_KEYS)
"""Facts that must be equal before times are compared."""
SETTINGS = (*MEMORY_SETTINGS, *SPEED_SETTINGS)
"""Those of these facts that are environment variables."""
MACHINE_KEYS = ("device", "gpu", "gpu_memory_bytes", "driver")
"""Facts that are part of a run's identity by way of its device."""

Different = dict[str, tuple[Any, Any]]
"""Fact to what it was before and is now."""


def memory_differences(base: Sequence[RungResult], new: Sequence[RungResult]) -> Different:
    """Facts that keep peaks of `base` and `new` from being compared."""
    if any(row.source in PREDICTED for row in new):
        return differences(base, new, SIMULATED_KEYS, minor=True)
    on_cpu = all(row.environment.get("device") == "cpu" for row in (*base, *new))
    return differences(base, new, (*MEMORY_KEYS, *(CPU_KEYS if on_cpu else MEMORY_SETTINGS)))


def speed_differences(base: Sequence[RungResult], new: Sequence[RungResult], *, across: bool) -> Different:
    """Facts that keep times of `base` and `new` from being compared; with `across` those of the hardware alone."""
    return differences(base, new, HARDWARE_KEYS if across else SPEED_KEYS)


def machine_differences(base: Sequence[RungResult], new: Sequence[RungResult]) -> Different:
    """Facts of the device that differ: they give the same question another identity."""
    return differences(base, new, MACHINE_KEYS)


def differences(
    base: Sequence[RungResult], new: Sequence[RungResult], keys: Iterable[str], *, minor: bool = False
) -> Different:
    """Those of `keys` that differ. A fact that one side does not tell, as older rows may not, is none; a setting that
    is not told is unset. With `minor`, versions of torch are equal when their first two numbers are."""
    found: Different = {}
    wanted = tuple(keys)
    told_by = [[plain_facts(row.environment, wanted, minor=minor) for row in side] for side in (base, new)]
    for key in wanted:
        before, after = ({facts.get(key) for facts in side} for side in told_by)
        if key not in SETTINGS:
            before, after = before - {None}, after - {None}
        if before and after and before != after:
            found[key] = (_one(before), _one(after))
    return found


def told(different: Different) -> str:
    """The differences in words: `torch 2.9.0 before, 2.13.0 now`."""
    return "; ".join(
        f"{key} {'unset' if before is None else before} before, {'unset' if after is None else after} now"
        for key, (before, after) in different.items()
    )


def plain_facts(environment: dict[str, Any], keys: Iterable[str], *, minor: bool = False) -> dict[str, Any]:
    """Those of `keys` that an environment tells, settings beside the other facts."""
    settings = environment.get("settings") or {}
    found = {key: settings.get(key) if key in SETTINGS else environment.get(key) for key in keys}
    if minor and found.get("torch") is not None:
        found["torch"] = ".".join(str(found["torch"]).split(".")[:2])
    return {
        key: value if isinstance(value, Hashable) else str(value) for key, value in found.items() if value is not None
    }


def _one(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else " and ".join(sorted(str(value) for value in values))
