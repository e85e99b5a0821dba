"""Bytes by category and by phase, and the estimate's answer sheet."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from memplan.spec.run import RunSpec

SCHEMA_VERSION = 1
CATEGORIES = ("params", "buffers", "grads", "optimizer", "activations", "logits", "temps", "comm", "other")
PHASES = ("init", "forward", "recompute", "loss", "backward", "optimizer")
"""In the order of a step. The estimate tells what is recomputed apart from the rest of backward, in the midst of which
it happens; a trace's and a measured step's backward is both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes alive at one moment, by category. The sum is the moment's allocated bytes."""

    params: int = 0
    """Bytes of parameters, frozen ones included."""
    buffers: int = 0
    """Bytes of buffers."""
    grads: int = 0
    """Bytes of parameters' gradients."""
    optimizer: int = 0
    """Bytes of optimizer state."""
    activations: int = 0
    """Bytes kept for backward, the logits' own apart."""
    logits: int = 0
    """Bytes of logits, their copies and their gradients."""
    temps: int = 0
    """Bytes alive inside or between ops only."""
    comm: int = 0
    """Bytes of communication buffers."""
    other: int = 0
    """Bytes of the batch and of what fits nowhere else."""

    @property
    def total_bytes(self) -> int:
        """Sum over the categories."""
        return sum(self.to_dict().values())

    def to_dict(self) -> dict[str, int]:
        """Bytes by category, zeros included."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The largest moment of a phase."""

    phase: str
    """One of `PHASES`."""
    moment: str
    """Which moment it is, in words: `block 17 backward`."""
    breakdown: MemoryBreakdown
    """Bytes alive then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A number that formulas can only fence in."""

    low_bytes: int
    """Least."""
    high_bytes: int
    """Most that is on record."""
    likely_bytes: int | None
    """What a model of the allocator says, where there is one."""
    reason: str
    """Why it is no single number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the formulas say about a run."""

    run: RunSpec
    """The question."""
    params_total: int
    """Parameters, tied ones once."""
    params_trainable: int
    """Parameters that train."""
    params_embedding: int
    """Parameters of the token embedding."""
    static: MemoryBreakdown
    """Bytes alive between two steps, gradients released: parameters, buffers, optimizer state."""
    phases: tuple[PhasePeak, ...]
    """The largest moment of each phase, in the order of a step."""
    per_sample_bytes: int
    """Bytes kept for backward by one more sample of a chunk: block activations and what surrounds them."""
    per_chunk_bytes: int
    """Bytes kept for backward by a chunk whatever its samples: autocast's low-precision copies of weights."""
    logits_per_sample_bytes: int
    """Bytes that head and loss keep for backward by one more sample of a chunk."""
    reserved: Band
    """Segments that the allocator holds at the peak."""
    process: Band
    """What the driver reports for the process then."""
    host_bytes: int = 0
    """Most that offloaded tensors take of the host's memory at once, as its allocator rounds it."""
    unsplit_bytes: int = 0
    """What blocks hold at the peak beyond what was asked for, since the allocator does not split them."""
    managed_bytes: int = 0
    """Paged optimizer state in unified memory, which the driver moves between host and card."""
    traced: bool = False
    """Whether all but the states is the trace's, of a model whose forward no formula knows."""
    notes: tuple[str, ...] = ()
    """What was done instead of what was asked for, and where the witnesses do not agree."""

    @property
    def per_token_bytes(self) -> float:
        """Bytes that one token of a sample keeps for backward, head and loss apart, on average."""
        return self.per_sample_bytes / self.run.step.seq

    @property
    def peak(self) -> PhasePeak:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.breakdown.total_bytes)

    @property
    def peak_allocated_bytes(self) -> int:
        """Allocated bytes at the peak."""
        return self.peak.breakdown.total_bytes

    @property
    def sources(self) -> dict[str, str]:
        """Who says what, by the keys of the JSON form: `formula`, or `traced`; of what is static by category."""
        rest = "traced" if self.traced else "formula"
        by_formula = dict.fromkeys(("params", "static.params", "static.buffers", "static.optimizer"), "formula")
        keys = ("static.comm", "static.other", "peak", "breakdown", "phases", "per_sample_bytes", "per_token_bytes",
                "per_chunk_bytes", "logits_per_sample_bytes", "host_bytes")  # fmt: skip
        return by_formula | {"managed_bytes": "formula"} | dict.fromkeys(keys, rest)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that scripts may rely on; gate and largest batch are added by whoever asks for them."""
        step = self.run.step
        return {
            "schema_version": SCHEMA_VERSION,
            "source": "traced" if self.traced else "estimated",
            "sources": self.sources,
            "model": self.run.model.name,
            "run_id": self.run.run_id,
            "params": {
                "total": self.params_total,
                "trainable": self.params_trainable,
                "embedding": self.params_embedding,
            },
            "step": dataclasses.asdict(step),
            "frozen": list(self.run.model.frozen),
            "device": self.run.device.name,
            "peak": {
                "allocated_bytes": self.peak_allocated_bytes,
                "active_bytes": self.peak_allocated_bytes,  # one stream: no freed block waits for another
                "reserved_bytes": self.reserved.likely_bytes,
                "reserved": dataclasses.asdict(self.reserved),
                "process": dataclasses.asdict(self.process),
                "phase": self.peak.phase,
                "moment": self.peak.moment,
            },
            "breakdown": self.peak.breakdown.to_dict(),
            "phases": {
                phase.phase: {
                    "allocated_bytes": phase.breakdown.total_bytes,
                    "moment": phase.moment,
                    "breakdown": phase.breakdown.to_dict(),
                }
                for phase in self.phases
            },
            "static_bytes": self.static.total_bytes,
            "static": self.static.to_dict(),
            "per_sample_bytes": self.per_sample_bytes,
            "per_token_bytes": self.per_token_bytes,
            "per_chunk_bytes": self.per_chunk_bytes,
            "logits_per_sample_bytes": self.logits_per_sample_bytes,
            "host_bytes": self.host_bytes,
            "managed_bytes": self.managed_bytes,
            "unsplit_bytes": self.unsplit_bytes,
            "notes": list(self.notes),
        }
