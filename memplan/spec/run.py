"""One run: a model, a step and a device, with an identity that does not depend on when or where it is asked."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from memplan.errors import MemplanError
from memplan.spec.device import DeviceSpec
from memplan.spec.model import ConnectorSpec, DecoderSpec, ModelSpec, RopeScaling, VisionSpec
from memplan.spec.pairing import check_pair
from memplan.spec.step import StepSpec

NOT_ASKED = {
    "model": ("source", "seq", "precision", "images", "notes"),
    "device": ("source",),
}
"""Fields that leave a run's identity alone."""
NEW_LEVERS = {
    "workload": ("lm", "vlm"),
    "suffix": (0,),
    "blocks": ("",),
    "dropout": (0.0,),
    "lora": ("",),
    "compile": ("off",),
    "update": ("step",),
    "rows": ("full",),
}
"""Fields of the step that came later, with what they say where nobody asks for them: such a run keeps its identity."""

_DECODER_FIELDS = dataclasses.fields(DecoderSpec)
NEW_FACTS = _DECODER_FIELDS[[field.name for field in _DECODER_FIELDS].index("mask") + 1 :]
"""Fields of a decoder that came later: at its default each leaves a run's identity alone too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The whole question."""

    model: ModelSpec
    """What is trained."""
    step: StepSpec
    """How one step is made."""
    device: DeviceSpec
    """Where it runs."""

    def __post_init__(self) -> None:
        check_pair(self.model, self.step)
        seq, images, decoder = self.step.seq, self.step.images, self.model.decoder
        length = seq + self.step.suffix
        if decoder.positions == "learned" and length > decoder.max_positions:
            raise MemplanError(
                f"{self.model.name} has {decoder.max_positions} learned positions, fewer than a sequence of {length}.",
                f"Type --seq {decoder.max_positions} or less.",
            )
        self.step.filling.check_model(self.model)
        num_tokens = self.model.image_tokens(images)
        if images and num_tokens >= seq:
            raise MemplanError(
                f"{images} crops make {num_tokens} image tokens, more than a sequence of {seq} has room for.",
                f"Type --seq {num_tokens + 1} or more, or fewer --images.",
            )

    @property
    def run_id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON of what is asked.

        Sources and a model's usual set-up are no part of the question: correcting one keeps the id.
        """
        facts = self.to_dict()
        for key, unsaid in (("impl", "memplan"), ("config", "")):
            if facts["model"][key] == unsaid:
                del facts["model"][key]
        for part, keys in NOT_ASKED.items():
            for key in keys:
                del facts[part][key]
        for key, plain in NEW_LEVERS.items():
            if facts["step"][key] in plain:
                del facts["step"][key]
        for field in NEW_FACTS:
            if facts["model"]["decoder"][field.name] == field.default:
                del facts["model"]["decoder"][field.name]
        import hashlib

        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    def step_dict(self) -> dict[str, Any]:
        """The step, as a row has it."""
        return dataclasses.asdict(self.step)

    @property
    def title(self) -> str:
        """Model and rung: `qwen3-4b B4c1@full`."""
        return f"{self.model.name} B{self.step.batch}c{self.step.chunks}@{self.step.ckpt}"

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
        model["notes"] = tuple(model.get("notes", ()))
        step = {"workload": "vlm" if data["step"].get("images") else "lm"} | data["step"]
        return RunSpec(model=ModelSpec(**model), step=StepSpec(**step), device=DeviceSpec(**data["device"]))
