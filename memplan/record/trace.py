"""What the trace says about a step: peaks by phase, who is alive at the largest moment, and where the host waits."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from memplan.record.memory import SCHEMA_VERSION, MemoryBreakdown
from memplan.spec.device import DeviceSpec
from memplan.spec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A storage, or several alike, alive at the peak."""

    num_bytes: int
    """Bytes asked for, of one."""
    count: int = 1
    """How many of this module's depth, op, shape and dtype there are."""
    category: str
    """One of `CATEGORIES`."""
    module: str
    """Module that made it; `*` stands for the number of a block where several are counted together."""
    op: str
    """Op that made it."""
    shape: tuple[int, ...]
    """Shape of the first tensor on it."""
    dtype: str
    """Dtype of that tensor."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_bytes * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTotals:
    """Peaks of one phase, its first moment included."""

    allocated_bytes: int
    """Largest live bytes after rounding."""
    active_bytes: int
    """Largest allocated bytes plus freed blocks that wait for a stream."""
    reserved_bytes: int
    """Largest bytes held from the driver."""
    op: str
    """Op behind which most was allocated; empty where that was the beginning."""
    module: str
    """Module that the op belongs to."""
    breakdown: MemoryBreakdown
    """Bytes alive then; their sum is `allocated_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPoint:
    """A place where the host waits for the device to read a value."""

    where: str
    """File and line."""
    op: str
    """Op that reads."""
    phase: str
    """Phase in which it happens."""
    count: int
    """Times a step."""
    assumed: str
    """The value that the trace went on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Where a step runs out of a card's memory."""

    phase: str
    """Phase of the request."""
    op: str
    """Op that asked."""
    module: str
    """Module that the op belongs to."""
    requested_bytes: int
    """Bytes it asked for."""
    allocated_bytes: int
    """Bytes allocated then."""
    reserved_bytes: int
    """Bytes reserved then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Allocated bytes over the story of a step, by category, thinned out for a picture. Time is counted in events."""

    bytes_by_category: dict[str, tuple[int, ...]]
    """For each category a value a point; the peak of the stretch that the point stands for is one of its moments."""
    phases: tuple[tuple[int, str], ...]
    """Point at which each phase begins, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """The trace's answer sheet. Peaks are those of a card without limit; `out_of_memory` says where a real one ends."""

    peak_allocated_bytes: int
    """Largest allocated bytes."""
    peak_active_bytes: int
    """Largest active bytes."""
    peak_reserved_bytes: int
    """Largest reserved bytes."""
    phase: str
    """Phase of the allocated peak."""
    op: str
    """Op whose memory makes the peak."""
    module: str
    """Module that the op belongs to."""
    breakdown: MemoryBreakdown
    """Bytes alive at the allocated peak; their sum is the peak."""
    phases: dict[str, PhaseTotals]
    """Peaks by phase, in the order of a step."""
    static_bytes: int
    """Allocated bytes at the start: what stays between two steps."""
    between: tuple[LiveTensor, ...]
    """What is alive then, the largest first."""
    alive: tuple[LiveTensor, ...]
    """What is alive at the allocated peak, the largest first."""
    syncs: tuple[SyncPoint, ...] = ()
    """Places where the host waits, in one step."""
    out_of_memory: OutOfMemory | None = None
    """Where the card's capacity is exceeded, or None."""
    num_alloc_retries: int = 0
    """Times that the card's capacity makes the allocator give back all it keeps, which is slow, before it goes on."""
    attention: dict[str, int] = field(default_factory=dict)
    """Attention kernels chosen, with the number of calls."""
    host_bytes: int = 0
    """Most that waited in the host's memory at once, as its allocator rounds it."""

    def to_dict(self, *, most_alive: int = 10) -> dict[str, Any]:
        """The JSON form, with the `most_alive` largest of what is alive."""
        return {
            "schema_version": SCHEMA_VERSION,
            "source": "traced",
            "peak": {
                "allocated_bytes": self.peak_allocated_bytes,
                "active_bytes": self.peak_active_bytes,
                "reserved_bytes": self.peak_reserved_bytes,
                "phase": self.phase,
                "op": self.op,
                "module": self.module,
            },
            "breakdown": self.breakdown.to_dict(),
            "phases": {name: dataclasses.asdict(totals) for name, totals in self.phases.items()},
            "alive_at_peak": [
                {"bytes": tensor.total_bytes}
                | {key: value for key, value in dataclasses.asdict(tensor).items() if key != "num_bytes"}
                for tensor in self.alive[:most_alive]
            ],
            "syncs": [dataclasses.asdict(sync) for sync in self.syncs],
            "out_of_memory": None if self.out_of_memory is None else dataclasses.asdict(self.out_of_memory),
            "num_alloc_retries": self.num_alloc_retries,
            "attention": self.attention,
            "host_bytes": self.host_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSteps:
    """What the trace says about a step that is taken again and again on a device."""

    device: DeviceSpec
    """Whose rules held."""
    first_step: TraceReport
    """The first step, in which an optimizer makes its state."""
    steady: TraceReport
    """Every later step."""
    timeline: Timeline
    """A later step, moment by moment."""

    @property
    def needed_bytes(self) -> int:
        """Largest allocated bytes over both."""
        return max(self.first_step.peak_allocated_bytes, self.steady.peak_allocated_bytes)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """Where the device's capacity is exceeded first, or None."""
        return self.first_step.out_of_memory or self.steady.out_of_memory

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return self.steady.to_dict() | {
            "device": self.device.name,
            "context_bytes": self.device.context_bytes,
            "static_bytes": self.steady.static_bytes,
            "first_step": {"allocated_bytes": self.first_step.peak_allocated_bytes},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """What the trace says about a run."""

    run: RunSpec
    """The question."""
    params_total: int
    """Parameters, tied ones once."""
    params_trainable: int
    """Parameters that train."""
    steps: TracedSteps
    """Its steps."""
    grown: bool
    """Whether the stories of equal blocks were told from a few of them."""
    note: str = ""
    """What was done instead of what was asked for, in words; empty when nothing was."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that scripts may rely on: an estimate's keys and the trace's own."""
        return self.steps.to_dict() | {
            "model": self.run.model.name,
            "run_id": self.run.run_id,
            "params": {"total": self.params_total, "trainable": self.params_trainable},
            "step": dataclasses.asdict(self.run.step),
            "frozen": list(self.run.model.frozen),
            "grown": self.grown,
            "note": self.note,
        }
