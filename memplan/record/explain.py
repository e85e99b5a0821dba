"""What checkpointing does with each op of a block."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from memplan.record.memory import SCHEMA_VERSION
from memplan.spec.run import RunSpec

SAVE, RECOMPUTE, ALTERNATE, FREE = "SAVE", "RECOMPUTE", "ALTERNATE", "FREE"
"""Kept for backward; run again in it; every second call kept; neither: a view, or whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPolicy:
    """One op of a block, all its calls together."""

    op: str
    """Name with its overload: `aten.mm.default`."""
    policy: str
    """`SAVE`, `RECOMPUTE`, `ALTERNATE`, or `FREE` where there is nothing to keep."""
    kind: str
    """`product`, `grouped` (a product of experts), `attention`, or empty."""
    num_calls: int
    """Calls in one forward of the block."""
    num_bytes: int
    """Bytes of the results of all calls; views have none."""
    num_flops: int
    """Floating-point operations of all calls: those of products, attention and convolutions."""
    num_kept: int
    """Calls whose results are kept."""
    kept_bytes: int
    """Bytes of the results that are kept."""
    kept_flops: int
    """Floating-point operations that need not be run again, as their results are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPolicy:
    """What a checkpoint mode makes of one block of a run, and what it costs beside the others."""

    run: RunSpec
    """The question; of its chunks one is looked at."""
    block: str
    """Path of the block."""
    ops: tuple[OpPolicy, ...]
    """Its ops, the dearest first."""
    kept_bytes: dict[str, int]
    """Bytes that the block keeps for backward by mode (`none`, `selective`, `full`), parameters left out."""
    recomputed_flops: dict[str, int]
    """Floating-point operations that backward runs again, by mode."""
    note: str = ""
    """What a step does instead, in words; empty where it does this."""

    @property
    def num_flops(self) -> int:
        """Floating-point operations of the block's forward."""
        return sum(op.num_flops for op in self.ops)

    @property
    def num_bytes(self) -> int:
        """Bytes of all results of the block's forward."""
        return sum(op.num_bytes for op in self.ops)

    def flops_frac(self, op: OpPolicy) -> float:
        """Share of `op` in the block's floating-point operations."""
        return op.num_flops / self.num_flops if self.num_flops else 0.0

    def bytes_frac(self, op: OpPolicy) -> float:
        """Share of `op` in the bytes of the block's results."""
        return op.num_bytes / self.num_bytes if self.num_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [
            dataclasses.asdict(op) | {"flops_frac": self.flops_frac(op), "bytes_frac": self.bytes_frac(op)}
            for op in self.ops
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "source": "traced",
            "model": self.run.model.name,
            "run_id": self.run.run_id,
            "step": dataclasses.asdict(self.run.step),
            "block": self.block,
            "num_flops": self.num_flops,
            "num_bytes": self.num_bytes,
            "kept_bytes": self.kept_bytes,
            "recomputed_flops": self.recomputed_flops,
            "note": self.note,
            "ops": rows,
        }
