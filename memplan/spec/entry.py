"""A step of the user's own code on a device: what a ladder over `--entry pkg.mod:make_step` asks."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from memplan.spec.device import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRun:
    """The step that `make_step(batch=, chunks=, ckpt=)` of the user makes."""

    entry: str
    """`pkg.mod:make_step`."""
    batch: int
    """B, samples a step."""
    chunks: int
    """C, backward passes a step."""
    ckpt: str
    """Checkpoint mode, for the user's code to follow."""
    seq: int | None = None
    """S, tokens a sample, where the ladder names it; else the user's own affair."""
    device: DeviceSpec
    """Where it runs."""

    @property
    def run_id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON of what is asked."""
        import hashlib

        facts = self.to_dict()
        del facts["device"]["source"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """What stands for the model's name."""
        return self.entry

    def step_dict(self) -> dict[str, Any]:
        """The step, as a row has it."""
        return {"batch": self.batch, "chunks": self.chunks, "ckpt": self.ckpt, "seq": self.seq}

    def arguments(self) -> dict[str, Any]:
        """What `make_step` is called with."""
        given = {"batch": self.batch, "chunks": self.chunks, "ckpt": self.ckpt}
        return given if self.seq is None else given | {"seq": self.seq}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_dict` makes an equal one."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "EntryRun":
        """What `to_dict` described."""
        return EntryRun(**data | {"device": DeviceSpec(**data["device"])})
