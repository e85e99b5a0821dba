"""The question: which model, which step, which device. Frozen dataclasses over the standard library."""

from memplan.spec.device import DeviceSpec
from memplan.spec.entry import EntryRun
from memplan.spec.ladder import Ladder
from memplan.spec.model import ConnectorSpec, DecoderSpec, ModelSpec, RopeScaling, VisionSpec
from memplan.spec.run import RunSpec
from memplan.spec.rung import Rung, parse_rungs
from memplan.spec.step import StepSpec

__all__ = [
    "ConnectorSpec",
    "DecoderSpec",
    "DeviceSpec",
    "EntryRun",
    "Ladder",
    "ModelSpec",
    "RopeScaling",
    "RunSpec",
    "Rung",
    "StepSpec",
    "VisionSpec",
    "parse_rungs",
]
