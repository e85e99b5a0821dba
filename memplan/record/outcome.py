"""What a real run left behind: one row a rung, and the verdict of a comparison of tensors."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from memplan.record.memory import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPeak:
    """Peaks of one window (`first_step`, `warmup`, `measured`), counters reset at its start."""

    allocated_bytes: int
    """Largest live bytes after rounding."""
    requested_bytes: int | None = None
    """Largest bytes asked for; None where the allocator does not tell."""
    active_bytes: int | None = None
    """Largest allocated bytes plus freed blocks that wait for a stream."""
    reserved_bytes: int | None = None
    """Largest bytes held from the driver; None on the CPU, whose allocator keeps none back."""
    host_bytes: int | None = None
    """Most that waited in the host's memory at once, rounded as its allocator does; None where nothing is offloaded."""
    num_alloc_retries: int | None = None
    """Failed requests that were repeated after giving cached segments back, in this window."""
    num_device_allocs: int | None = None
    """Requests to the driver in this window; above 0 in `measured` the allocator was not steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One row of a ladder. Failure is a value: a rung that died has a status and whatever was known before."""

    rung: str
    """Name with its checkpoint mode: `B12c6@full`."""
    run_id: str
    """Identity of the run."""
    status: str
    """`ok`, `over_gate`, `oom`, `timeout`, `killed` or `error`."""
    source: str
    """`measured`, or `simulated` when the step was traced for a card that is not there."""
    model: str
    """Model name."""
    step: dict[str, Any]
    """The step, as `StepSpec`."""
    peak_allocated_bytes: int | None = None
    """Largest allocated bytes over the windows; None when no window was finished."""
    peak_reserved_bytes: int | None = None
    """Largest reserved bytes over the windows, where there is such a number."""
    windows: dict[str, WindowPeak] = field(default_factory=dict)
    """Peaks by window."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Largest allocated bytes by phase, from steps that are not timed."""
    estimated_bytes: int | None = None
    """What the formulas said before."""
    traced_bytes: int | None = None
    """What the trace said before."""
    gate_bytes: int | None = None
    """What the peak is held against."""
    gate_on: str = "allocated"
    """Which peak is held against the gate."""
    verdict: str = "inconclusive"
    """`pass`, `fail` or `inconclusive` (no gate, or no number)."""
    step_ns: tuple[int, ...] = ()
    """Time of each timed step, nanoseconds."""
    loss: tuple[float, ...] = ()
    """Loss of every step, the first one first."""
    error: str | None = None
    """What went wrong, in one line."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, settings."""
    command: str = ""
    """What to type to run this again."""

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second over the timed steps: B * steps / total time."""
        total_ns = sum(self.step_ns)
        return self.step["batch"] * len(self.step_ns) * 10**9 / total_ns if total_ns else None

    @property
    def median_step_ns(self) -> int | None:
        """Median time of the timed steps, rounded down to a nanosecond."""
        ordered = sorted(self.step_ns)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[-middle - 1]) // 2 if ordered else None

    @property
    def whole_peak_bytes(self) -> int | None:
        """Largest allocated bytes of a rung that came to its end; of a simulated one also where the card has no room,
        since nothing had to run for it."""
        whole = self.status in ("ok", "over_gate") or self.source == "simulated"
        return self.peak_allocated_bytes if whole else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON line of this row."""
        return {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(self) | {"samples_per_s": self.samples_per_s}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "RungResult":
        """The row of a JSON line; keys that this version does not know are left out."""
        known = {item.name for item in dataclasses.fields(RungResult)}
        values = {key: value for key, value in data.items() if key in known}
        peaks = {item.name for item in dataclasses.fields(WindowPeak)}
        values["windows"] = {
            name: WindowPeak(**{key: value for key, value in window.items() if key in peaks})
            for name, window in values.get("windows", {}).items()
        }
        for name in ("step_ns", "loss"):
            values[name] = tuple(values.get(name, ()))
        return RungResult(**values)
