"""A GPU between two rungs: who else is on it, whether the last rung has let go of it, and whether it still computes."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memplan.backends.nvml import Device, GpuProcess
from memplan.launch.process import Outcome, run_worker
from memplan.units import MIB

TOLERANCE_BYTES = 64 * MIB
"""How much more than before may be in use: what a driver keeps for itself varies."""
IDLE_BYTES = 512 * MIB
"""How much may be in use although NVML lists nobody: screens, the driver's own services."""
SETTLE_S = 30.0
"""Seconds that a driver has to clean up after a process."""
POLL_S = 0.2
"""Seconds between two looks."""
HEALTH_S = 120.0
"""Seconds that a small product may take, torch's start included."""


def foreign(device: Device) -> tuple[GpuProcess, ...]:
    """Who uses the GPU while no rung runs, the largest first.

    Where nobody is listed and yet much is in use, as in a container that does not see the host's processes, one
    process without a number stands for whoever it is.
    """
    listed = device.processes() or ()
    if listed:
        named = [
            GpuProcess(pid=process.pid, bytes=process.bytes, name=device.program(process.pid))
            for process in listed
            if process.pid is not None
        ]
        return tuple(sorted(named, key=lambda process: -(process.bytes or 0)))
    used_bytes = device.used_bytes()
    if used_bytes is None or used_bytes <= IDLE_BYTES or device.counts_reserve():
        return ()
    return (GpuProcess(pid=None, bytes=used_bytes),)


def unclaimed_bytes(device: Device) -> int | None:
    """Bytes in use that no living process answers for; None where NVML does not tell.

    What living processes hold is theirs to change. What is left behind a process that is gone stays in the number,
    whether NVML still lists it or not.
    """
    used_bytes = device.used_bytes()
    if used_bytes is None:
        return None
    claimed = sum(
        process.bytes or 0 for process in device.processes() or () if process.pid is not None and _lives(process.pid)
    )
    return max(used_bytes - claimed, 0)


def settled(
    device: Device,
    before_bytes: int,
    timeout_s: float = SETTLE_S,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether `unclaimed_bytes` comes back to `before_bytes`, a tolerance aside, within `timeout_s`.

    True where NVML does not tell: nothing speaks against it.
    """
    deadline = clock() + timeout_s
    while True:
        now_bytes = unclaimed_bytes(device)
        if now_bytes is None or now_bytes <= before_bytes + TOLERANCE_BYTES:
            return True
        if clock() >= deadline:
            return False
        sleep(POLL_S)


def health_check(job: dict[str, Any], run: Callable[..., Outcome] = run_worker) -> str | None:
    """What is wrong with the device of `job` when a fresh process does a small product on it; None: it computes.

    `job` names the run as any other job does; its kind is set here.
    """
    outcome = run(job | {"kind": "health"}, timeout_s=HEALTH_S, log=Path(os.devnull))
    return None if outcome.status == "ok" else f"{outcome.status}: {outcome.error}"


def _lives(pid: int) -> bool:
    """Whether a process with this number runs here and is no zombie."""
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
