"""NVML's look at one GPU while a worker uses it: bytes of the worker and of others, clocks, power, heat.

Known limits: a peak between two looks is not seen; NVML's calls are made by the parent, so a driver that never answers
holds the parent too.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memplan.backends.nvml import Device, GpuProcess, bare, open_device

LOOK_S = 0.1
"""Least seconds between two looks."""
MOST_SHARE = 0.02
"""Share of the time that looking may take: where NVML is slow, it is asked less often."""
WINDOWS = {"build": "init"}
"""Phases of the worker whose window has another name."""
CLOCKS = ("sm_clock_mhz", "power_w", "power_limit_w", "temperature_c")
"""What is read while steps are timed, beside the reasons for a low clock."""
NOT_LISTED = "the rung's processes are not in NVML's list: in a container their numbers are other ones"
NO_BYTES = "NVML gives no bytes per process here (WDDM, WSL, MIG)"
NO_LOOK = "nobody looked: it was over too soon"


@dataclass(slots=True)
class Seen:
    """What was seen in one phase."""

    own_bytes: int | None = None
    others_bytes: int | None = None
    others: dict[int, int | None] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    slowed_by: dict[str, None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


class Watch:
    """Looks at one GPU while workers run, one after another."""

    def __init__(self, device: Device, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._nvml = nvml
        self._clock = clock
        self.begin(lambda pid: False)

    def begin(self, owns: Callable[[int], bool]) -> None:
        """Forgets the worker before; `owns` says which processes belong to the new one, which has just started."""
        self._owns = owns
        self._phase = "start"
        self._phases: list[str] = []
        self._seen: dict[str, Seen] = {}
        self._next_s = 0.0
        self._own_listed = False
        self._before = frozenset(process.pid for process in self._device.processes() or ())

    def hear(self, event: dict[str, Any]) -> None:
        """Notes which phase begins. When the worker names another GPU than the one looked at, that one is looked at."""
        if event.get("event") == "phase":
            phase = str(event.get("phase"))
            self._phase = WINDOWS.get(phase, phase)
            self._phases.append(self._phase)
            self._next_s = 0.0
        if isinstance(uuid := event.get("gpu_uuid"), str):
            self._move_to(uuid)

    def look(self) -> None:
        """Looks, when it is time for it."""
        began = self._clock()
        if began < self._next_s:
            return
        seen = self._seen.setdefault(self._phase, Seen())
        self._count(seen)
        if self._phase == "timed":
            self._read_clocks(seen)
        now = self._clock()
        self._next_s = now + max(LOOK_S, (now - began) / MOST_SHARE)

    def telemetry(self) -> dict[str, Any]:
        """What was seen since `begin`.

        `windows`: for each window or phase `own_bytes` and `others_bytes`, the largest seen; `timed`: `sm_clock_mhz`
        and `power_w` as `min`, `median`, `max`, `power_limit_w`, `temperature_c` at most, `throttled` (reasons),
        `others` (processes), empty when no step was timed; `others`: those of the whole time. What could not be seen is
        None, and the reason stands in `missing`.
        """
        windows = {
            name: {"own_bytes": seen.own_bytes, "others_bytes": seen.others_bytes} for name, seen in self._seen.items()
        }
        everybody: dict[int, int | None] = {}
        for seen in self._seen.values():
            _add(everybody, seen.others)
        return {"windows": windows, "timed": self._timed(), "others": self._listed(everybody)}

    def close(self) -> None:
        """Lets go of the GPU."""
        self._device.close()

    def _move_to(self, uuid: str) -> None:
        """Looks at the GPU called `uuid` from now on; what was seen on another one is worth nothing."""
        here = self._device.uuid()
        if here is None or bare(uuid) == bare(here):
            return
        other = open_device(self._nvml, uuid)
        if other is None or other.uuid() == here:
            return
        self._device.close()
        self._device = other
        phase, phases = self._phase, self._phases
        self.begin(self._owns)
        self._phase, self._phases = phase, phases

    def _timed(self) -> dict[str, Any]:
        if "timed" not in self._phases:
            return {}
        seen = self._seen.get("timed") or Seen(missing=dict.fromkeys(CLOCKS, NO_LOOK))
        numbers = seen.numbers
        return {
            **{name: _spread(numbers.get(name)) for name in ("sm_clock_mhz", "power_w")},
            **{name: max(numbers.get(name, ()), default=None) for name in ("power_limit_w", "temperature_c")},
            "throttled": list(seen.slowed_by),
            "others": self._listed(seen.others),
            "missing": seen.missing,
        }

    def _count(self, seen: Seen) -> None:
        """Adds who holds what. Others' bytes are known where ours can be told from theirs."""
        listed = self._device.processes()
        if listed is None:
            seen.missing |= dict.fromkeys(
                ("own_bytes", "others_bytes"), self._device.missing.get("processes", NO_BYTES)
            )
            return
        own = [process for process in listed if process.pid is not None and self._owns(process.pid)]
        others = [process for process in listed if process not in own]
        self._own_listed |= bool(own)
        if own:
            seen.own_bytes = _more(seen, "own_bytes", seen.own_bytes, own)
        else:
            seen.missing.setdefault("own_bytes", NOT_LISTED)
        if self._own_listed or all(process.pid in self._before for process in others):
            seen.others_bytes = _more(seen, "others_bytes", seen.others_bytes, others)
            _add(seen.others, {process.pid: process.bytes for process in others if process.pid is not None})
        else:  # somebody new, who may well be the rung itself
            seen.missing.setdefault("others_bytes", NOT_LISTED)

    def _read_clocks(self, seen: Seen) -> None:
        device = self._device
        for name in CLOCKS:
            value = getattr(device, name)()
            if value is None:
                seen.missing[name] = device.missing[name]
            else:
                seen.numbers.setdefault(name, []).append(value)
        reasons = device.slowed_by()
        if reasons is None:
            seen.missing["throttled"] = device.missing["throttled"]
        else:
            seen.slowed_by |= dict.fromkeys(reasons)

    def _listed(self, processes: dict[int, int | None]) -> list[dict[str, Any]]:
        return [{"pid": pid, "name": self._device.program(pid), "bytes": held} for pid, held in processes.items()]


def open_watch(nvml: Any = None) -> Watch | None:
    """A watch over the GPU that torch calls `cuda:0` here; None where there is none. `nvml` is as in `open_device`."""
    device = open_device(nvml)
    return Watch(device, nvml) if device is not None else None


def _more(seen: Seen, name: str, before: int | None, processes: list[GpuProcess]) -> int | None:
    """The larger of `before` and what `processes` hold together; `before` when NVML does not tell."""
    held = [process.bytes for process in processes]
    known = [value for value in held if value is not None]
    if len(known) < len(held):
        seen.missing[name] = NO_BYTES
        return before
    seen.missing.pop(name, None)
    return max(sum(known), before or 0)


def _add(to: dict[int, int | None], more: dict[int, int | None]) -> None:
    for pid, held in more.items():
        to[pid] = max((value for value in (to.get(pid), held) if value is not None), default=None)


def _spread(values: list[float] | None) -> dict[str, float] | None:
    """Least, median and largest; None without a value."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)} if values else None
