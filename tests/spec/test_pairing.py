"""What a model cannot be asked for, refused when the question is made, so that every verb says the same."""

import dataclasses
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.ladder.points import points
from memplan.models.registry import model_spec
from memplan.spec import Ladder, ModelSpec, RunSpec, StepSpec
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
    (model_spec("tiny"), {"parallel": "fsdp2:keep+keep-last", "world": 2}, "twice"),
    (dataclasses.replace(TRANSFORMERS, family="gemma2"), {}, "--attention eager"),
    (MINE, {"norm": "fused"}, "decides on its norm"),
    (MINE, {"attention": "eager"}, "decides on its attention"),
    (MINE, {"workload": "distill"}, "no head for a teacher"),
]


@pytest.mark.parametrize(("model", "step", "words"), REFUSED)
def test_a_step_that_a_model_cannot_make_is_refused(model: ModelSpec, step: dict[str, Any], words: str) -> None:
    with pytest.raises(MemplanError, match=words):
        RunSpec(model=model, step=StepSpec(**{"batch": 2, "seq": 16} | step), device=CPU)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("ckpt", "every:1000", "has 4 blocks, fewer than ckpt 'every:1000' counts"),
        ("loss", "chunked:100000", "128 rows, fewer than the parts"),
        ("lora", "4096", "rank 4096 are larger"),
    ],
)
def test_a_question_counts_no_more_than_there_is(option: str, value: str, words: str) -> None:
    question = Ladder.from_dict(
        {"model": "tiny", "rungs": "B2c1", "seq": 64, option: value}, name="q", origin="options"
    )
    with pytest.raises(MemplanError, match=words):
        points(question, CPU)


def test_what_a_model_can_make_is_not() -> None:
    for model, step in ((CLASSIFIER, "classify"), (TRANSFORMERS, "lm"), (MINE, "lm")):
        RunSpec(model=model, step=StepSpec(batch=2, seq=16, workload=step), device=CPU)
