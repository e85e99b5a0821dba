"""What no step can be, refused by formula and by trace in the same sentence, before anything runs."""

import dataclasses
from typing import Any

import pytest
from family_runs import config_run
from models.hf_configs import SMALL

from memplan.errors import MemplanError
from memplan.estimate.step import write_step
from memplan.spec import RunSpec

ALL = "embedding+blocks+head"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama", ALL, {}, "No parameter trains"),
    ("llama", ALL, {"parallel": "ddp", "world": 2}, "No parameter trains"),
    ("gemma3", ALL, {}, "has a part in the loss"),
    ("deepseek_v3", "none", {"precision": "bf16", "parallel": "fsdp2", "world": 3}, "in one dtype each"),
    ("deepseek_v3", "none", {"precision": "bf16", "parallel": "fsdp2:param-bf16", "world": 2}, "in one dtype each"),
]


def asked(name: str, freeze: str, step: dict[str, Any]) -> RunSpec:
    run = config_run(SMALL[name], "cpu", batch=2, seq=32, **step)
    return dataclasses.replace(run, model=run.model.frozen_to(freeze))


@pytest.mark.parametrize(("name", "freeze", "step", "words"), REFUSED)
def test_formula_and_trace_refuse_alike(name: str, freeze: str, step: dict[str, Any], words: str) -> None:
    pytest.importorskip("transformers")
    from memplan.backends.simulated import simulate

    run = asked(name, freeze, step)
    said = []
    for answer in (write_step, simulate):
        with pytest.raises(MemplanError, match=words) as caught:
            answer(run)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_what_is_frozen_in_two_dtypes_is_taken() -> None:
    run = asked("deepseek_v3", "none", {"precision": "bf16", "parallel": "fsdp2", "world": 2, "lora": "4"})
    assert write_step(run).parameters
