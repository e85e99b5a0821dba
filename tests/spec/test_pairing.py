"""What a model cannot be asked for, refused when the question is made, so that every verb says the same."""

import dataclasses
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.models.registry import model_spec
from memplan.spec import ModelSpec, RunSpec, StepSpec
from memplan.spec.device import CPU

TRANSFORMERS = model_spec("tiny-hybrid")
CLASSIFIER = dataclasses.replace(TRANSFORMERS, family="vit")
MINE = model_spec("mine.own:make")
REFUSED: list[tuple[ModelSpec, dict[str, Any], str]] = [
    (CLASSIFIER, {"workload": "lm"}, "makes a class of each image"),
    (CLASSIFIER, {"workload": "distill"}, "the workload distill has none"),
    (CLASSIFIER, {"workload": "classify", "loss": "valid-rows"}, "makes a loss"),
    (model_spec("tiny"), {"workload": "classify"}, "makes no class of an image"),
    (TRANSFORMERS, {"workload": "classify"}, "makes no class of an image"),
    (TRANSFORMERS, {"workload": "prefix-suffix", "suffix": 8}, "cache"),
    (TRANSFORMERS, {"norm": "fused"}, "transformers' own norms"),
    (MINE, {"norm": "fused"}, "decides on its norm"),
    (MINE, {"attention": "eager"}, "decides on its attention"),
    (MINE, {"workload": "distill"}, "no head for a teacher"),
]


@pytest.mark.parametrize(("model", "step", "words"), REFUSED)
def test_a_step_that_a_model_cannot_make_is_refused(model: ModelSpec, step: dict[str, Any], words: str) -> None:
    with pytest.raises(MemplanError, match=words):
        RunSpec(model=model, step=StepSpec(**{"batch": 2, "seq": 16} | step), device=CPU)


def test_what_a_model_can_make_is_not() -> None:
    for model, step in ((CLASSIFIER, "classify"), (TRANSFORMERS, "lm"), (MINE, "lm")):
        RunSpec(model=model, step=StepSpec(batch=2, seq=16, workload=step), device=CPU)
