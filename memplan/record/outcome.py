"""What a real run left behind: one row a rung and repeat, with the numbers of a failure too."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from memplan.record.memory import SCHEMA_VERSION
from memplan.record.misfit import LARGEST, misfit
from memplan.record.trace import LiveTensor

STATUSES = (
    "ok",
    "over_gate",
    "oom",
    "oom_suspect",
    "thrash",
    "ac_error",
    "numerics_fail",
    "killed",
    "host_oom",
    "timeout",
    "dirty_device",
    "error",
    "skipped",
)
"""How a rung can end. Behind `error` and `skipped` a colon and the kind may stand: `error:kernel_limit`,
`skipped:dominated_by B8c4@none`."""
FINAL = ("ok", "over_gate", "oom", "thrash", "ac_error", "numerics_fail")
"""Statuses that say something about the rung itself. The others may go away when the rung is tried again, so `--resume`
tries them again."""
WHOLE = ("ok", "over_gate", "thrash")
"""Statuses of rungs that came to their end, so that their peaks are those of whole steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPeak:
    """Peaks of one window (`init`, `first_step`, `warmup`, `measured`), counters reset at its start. None: not told."""

    allocated_bytes: int
    """Largest live bytes after rounding."""
    requested_bytes: int | None = None
    """Largest bytes asked for; None where the allocator does not tell."""
    active_bytes: int | None = None
    """Largest allocated bytes plus freed blocks that wait for a stream."""
    reserved_bytes: int | None = None
    """Largest bytes held from the driver; None on the CPU, whose allocator keeps none back."""
    inactive_split_bytes: int | None = None
    """Most free bytes in pieces of split blocks, which the driver cannot have back: fragmentation."""
    private_pool_bytes: int | None = None
    """Bytes reserved by private pools, such as those of CUDA graphs, at the window's end."""
    used_bytes: int | None = None
    """Most that the process held of the device: reserved bytes and what lies outside torch's allocator."""
    own_bytes: int | None = None
    """Most that NVML reported for the rung's own processes, sampled."""
    others_bytes: int | None = None
    """Most that NVML reported for other processes, sampled."""
    host_bytes: int | None = None
    """Most that waited in the host's memory at once, rounded as its allocator does; None where nothing is offloaded."""
    live_bytes: int | None = None
    """Allocated bytes at the window's end."""
    num_steps: int | None = None
    """Steps in the window."""
    num_alloc_retries: int | None = None
    """Failed requests that were repeated after giving cached segments back, in this window."""
    num_ooms: int | None = None
    """Requests that failed for good, in this window."""
    num_device_allocs: int | None = None
    """Requests to the driver in this window; above 0 in `measured` the allocator was not steady."""
    num_collections: int | None = None
    """Runs of Python's cyclic collector in this window."""
    steady: bool | None = None
    """Whether, at the window's end, steps asked the driver for nothing and took equal times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The moment at which a rung failed, as far as it could be seen. A peak up to there is a lower bound."""

    window: str
    """Window or phase of the work: `build`, `first_step`, ..., `timed`."""
    phase: str | None = None
    """Phase of the step, one of `PHASES`."""
    requested_bytes: int | None = None
    """Bytes asked for in vain."""
    allocated_bytes: int | None = None
    """Largest allocated bytes until then."""
    reserved_bytes: int | None = None
    """Largest reserved bytes until then."""
    free_bytes: int | None = None
    """Bytes that the driver still had."""
    cap_bytes: int | None = None
    """What the allocator was capped at."""
    alive: tuple[LiveTensor, ...] = ()
    """The largest tensors alive then, by module and op."""
    snapshot: str | None = None
    """File with the allocator's snapshot of a second run, in the row's folder."""
    text: str | None = None
    """Everything that the error said."""

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Failure":
        """The failure of a JSON object; keys that this version does not know are left out."""
        values = _known(Failure, data)
        values["alive"] = tuple(
            LiveTensor(**_known(LiveTensor, tensor) | {"shape": tuple(tensor["shape"])})
            for tensor in values.get("alive", ())
        )
        return Failure(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One row of a ladder. Failure is a value: a rung that died has a status and whatever was known before."""

    rung: str
    """Name with its checkpoint mode: `B12c6@full`."""
    run_id: str
    """Identity of the run."""
    repeat: int = 1
    """Which repeat of the rung, from 1."""
    status: str
    """One of `STATUSES`."""
    source: str
    """`measured`; `simulated` when the step was traced for a card that is not there; `estimated` when formulas alone
    say so."""
    model: str
    """Model name."""
    step: dict[str, Any]
    """The step, as `StepSpec`."""
    peak_allocated_bytes: int | None = None
    """Largest allocated bytes over the windows; None when no window was finished."""
    peak_reserved_bytes: int | None = None
    """Largest reserved bytes over the windows, where there is such a number."""
    peak_used_bytes: int | None = None
    """Most that the process held of the device over the windows, where there is such a number."""
    windows: dict[str, WindowPeak] = field(default_factory=dict)
    """Peaks by window."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Largest allocated bytes by phase, from steps that are not timed."""
    breakdown: dict[str, int] = field(default_factory=dict)
    """Bytes at the allocated peak by category; they add up to it. Measured ones are told by what can be counted:
    parameters, buffers, gradients and optimizer state, what forward leaves for backward, and `temps`, the rest."""
    between_steps: dict[str, int] = field(default_factory=dict)
    """Bytes alive between two steps by category: `activations` there are leftovers of the step before."""
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
    grad_norm: float | None = None
    """Total norm of the gradients of the first step, before clipping."""
    num_targets: int | None = None
    """Tokens of a step that have a label."""
    model_flops: int | None = None
    """FLOPs of the products of one step, nothing recomputed; what MFU counts."""
    hardware_flops: int | None = None
    """The same with what is recomputed; what HFU counts."""
    peak_flops: float | None = None
    """FLOPs a second that the device does at most in this precision, dense; None where nobody knows."""
    attention: dict[str, int] = field(default_factory=dict)
    """Attention kernels that really ran in one step, with the number of calls."""
    parity: dict[str, Any] = field(default_factory=dict)
    """Comparison with the plain step: `same`, the `rung` at which, and in words `says`; empty where nobody compared."""
    telemetry: dict[str, Any] = field(default_factory=dict)
    """What NVML said while steps were timed: `sm_clock_mhz`, `power_w`, `temperature_c`, `throttled`, `others`."""
    warnings: tuple[str, ...] = ()
    """What to know before believing the numbers, a sentence each."""
    failure: Failure | None = None
    """The moment of the failure, of a row that failed."""
    error: str | None = None
    """What went wrong, in one line."""
    started_at: str | None = None
    """When the rung began, UTC, ISO 8601."""
    elapsed_ns: int | None = None
    """Time from its start to its row, nanoseconds."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, settings."""
    command: str = ""
    """What to type to run this again."""

    @property
    def kind(self) -> str:
        """The status without what stands behind its colon."""
        return self.status.partition(":")[0]

    @property
    def key(self) -> tuple[str, int]:
        """What a later line replaces: run and repeat."""
        return self.run_id, self.repeat

    @property
    def gated_bytes(self) -> int | None:
        """The peak that the gate reads."""
        peaks = {"reserved": self.peak_reserved_bytes, "used": self.peak_used_bytes}
        return peaks.get(self.gate_on, self.peak_allocated_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over the timed steps: B * S * steps / total time."""
        samples = self.samples_per_s
        return samples * self.step["seq"] if samples is not None and self.step.get("seq") else None

    @property
    def mfu_frac(self) -> float | None:
        """Model FLOPs a second over the device's peak."""
        return self._utilisation(self.model_flops)

    @property
    def hfu_frac(self) -> float | None:
        """Hardware FLOPs a second, recomputed ones included, over the device's peak."""
        return self._utilisation(self.hardware_flops)

    def _utilisation(self, flops: int | None) -> float | None:
        step_ns = self.median_step_ns
        return flops * 10**9 / step_ns / self.peak_flops if flops and step_ns and self.peak_flops else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second over the timed steps: B * steps / total time."""
        total_ns = sum(self.step_ns)
        batch = self.step.get("batch")
        return batch * len(self.step_ns) * 10**9 / total_ns if batch and total_ns else None

    @property
    def median_step_ns(self) -> int | None:
        """Median time of the timed steps, rounded down to a nanosecond."""
        import statistics

        return int(statistics.median(self.step_ns)) if self.step_ns else None

    @property
    def whole_peak_bytes(self) -> int | None:
        """Largest allocated bytes of a rung that came to its end; of a simulated one also where the card has no room,
        since nothing had to run for it."""
        whole = self.status in WHOLE or self.source == "simulated"
        return self.peak_allocated_bytes if whole else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON line of this row, derived numbers included."""
        derived = {name: getattr(self, name) for name in ("samples_per_s", "tokens_per_s", "mfu_frac", "hfu_frac")}
        return {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(self) | derived

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "RungResult":
        """The row of a JSON line; keys that this version does not know are left out. ValueError, which says what is
        wrong, where a value is none that a row can have."""
        wrong = misfit(RungResult, data) or _wrong_facts(data)
        if wrong is not None:
            raise ValueError(wrong)
        values = _known(RungResult, data)
        values["windows"] = {
            name: WindowPeak(**_known(WindowPeak, window)) for name, window in values.get("windows", {}).items()
        }
        if values.get("failure") is not None:
            values["failure"] = Failure.from_dict(values["failure"])
        for name in ("step_ns", "loss", "warnings"):
            values[name] = tuple(values.get(name, ()))
        return RungResult(**values)


def _wrong_facts(data: dict[str, Any]) -> str | None:
    """What is wrong with the facts of step and environment that others compute with, in words."""
    for name in ("batch", "seq"):
        value = data["step"].get(name)
        if value is not None and not (type(value) is int and 0 < value <= LARGEST):
            return f"step.{name} is {json.dumps(value)[:60]}, not a whole number above zero"
    settings = data.get("environment", {}).get("settings")
    if settings is not None and not isinstance(settings, dict):
        return f"environment.settings is {json.dumps(settings)[:60]}, not an object"
    return None


def _known(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    """The values of `data` that `kind` has fields for."""
    names = {item.name for item in dataclasses.fields(kind)}
    return {key: value for key, value in data.items() if key in names}
