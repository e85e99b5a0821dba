"""One run: a model, a step and a device, with an identity that does not depend on when or where it is asked."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from memplan.spec.device import DeviceSpec
from memplan.spec.model import ConnectorSpec, DecoderSpec, ModelSpec, RopeScaling, VisionSpec
from memplan.spec.step import StepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The whole question."""

    model: ModelSpec
    """What is trained."""
    step: StepSpec
    """How one step is made."""
    device: DeviceSpec
    """Where it runs."""

    @property
    def run_id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_dict` makes an equal run."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "RunSpec":
        """The run that `to_dict` described."""
        model = dict(data["model"])
        decoder = dict(model["decoder"])
        if decoder["rope_scaling"] is not None:
            decoder["rope_scaling"] = RopeScaling(**decoder["rope_scaling"])
        model["decoder"] = DecoderSpec(**decoder)
        if model["vision"] is not None:
            model["vision"] = VisionSpec(**model["vision"] | {"layers_read": tuple(model["vision"]["layers_read"])})
            model["connector"] = ConnectorSpec(**model["connector"])
        model["frozen"] = tuple(model["frozen"])
        return RunSpec(model=ModelSpec(**model), step=StepSpec(**data["step"]), device=DeviceSpec(**data["device"]))
