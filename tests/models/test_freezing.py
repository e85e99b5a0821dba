"""What freezing a component takes out of training: the same parameters by formula and in the module, for each family.

Counts on the meta device: `estimate` and the step itself divide a model by code of their own.
"""

from typing import Any

import pytest
import torch
from hf_configs import DECODER, SMALL
from hub_configs import refusal

from memplan.estimate.step import build, new_tape
from memplan.models.factory import build_model
from memplan.models.hf_config import spec_of, trained
from memplan.models.registry import model_spec
from memplan.spec import ModelSpec, RunSpec, StepSpec
from memplan.spec.device import CPU
from memplan.spec.hf_facts import complete

OWN = ("tiny", "tiny-gpt2", "tiny-moe", "tiny-molmo2")
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5", "text_config": SMALL["qwen3_5_text"],
    "vision_config": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": DECODER["hidden_size"], "num_position_embeddings": 16,
    },
}  # fmt: skip
"""With an image encoder that no step here runs."""
CONFIGS = SMALL | {"qwen3_5": HYBRID, "tied": SMALL["llama"] | {"tie_word_embeddings": True}}


def spec_named(name: str) -> ModelSpec:
    if name in OWN:
        return model_spec(name)
    return spec_of(trained(complete(CONFIGS[name]).config, []), name=name, source="a test")


def by_formula(spec: ModelSpec) -> int:
    step = StepSpec(batch=1, seq=spec.seq, workload=spec.usual_workload(0), attention=spec.usual_attention)
    run = RunSpec(model=spec, step=step, device=CPU)
    tape = new_tape(run)
    build(tape, run)
    return sum(one.numel * one.copies for one in tape.parameters if one.requires_grad)


def in_module(spec: ModelSpec) -> int:
    with torch.device("meta"):
        model = build_model(spec, attention=spec.usual_attention)
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize("name", [*OWN, *CONFIGS])
def test_a_component_is_the_same_parameters_to_the_estimate_and_to_the_step(name: str) -> None:
    spec = spec_named(name)
    whole = by_formula(spec.frozen_to("none"))
    assert whole == in_module(spec.frozen_to("none"))
    left = {part: by_formula(spec.frozen_to(part)) for part in spec.components}
    assert left == {part: in_module(spec.frozen_to(part)) for part in spec.components}
    assert all(count < whole for count in left.values())
    shared = sum(whole - count for count in left.values()) - whole  # a tied table is of embedding and head
    extra = spec.decoder.extra_vocab * spec.decoder.hidden if spec.impl == "memplan" else 0  # always trains
    assert shared + extra == (spec.decoder.vocab * spec.decoder.hidden if spec.decoder.tied else 0)


def test_places_and_types_are_no_part_of_a_tied_head() -> None:
    for name, others in (("gpt2", ("n_positions",)), ("bert", ("max_position_embeddings", "type_vocab_size"))):
        spec = spec_named(name)
        config = complete(SMALL[name]).config
        rows = sum(config[key] for key in others)
        table = spec.decoder.vocab * spec.decoder.hidden
        frozen = in_module(spec.frozen_to("none")) - in_module(spec.frozen_to("embedding"))
        norm = 2 * spec.decoder.hidden if name == "bert" else 0
        assert frozen == table + rows * spec.decoder.hidden + norm


def test_a_component_that_is_not_there_is_named_with_those_that_are() -> None:
    for name in ("tiny", "llama", "vit", "siglip"):
        assert refusal(spec_named(name).frozen_to, "vision").endswith("It has embedding, blocks, head.")
    assert "no connector to freeze" in refusal(spec_named("qwen3_5").frozen_to, "vision+connector")
    assert "Nobody knows" in refusal(model_spec("mine.own:make").frozen_to, "head")


def test_an_encoder_that_no_step_runs_is_told_from_one_that_is_not_there() -> None:
    assert "counted, but no step here runs it" in refusal(spec_named("qwen3_5").image_tokens, 2)
    assert "has no vision tower" in refusal(spec_named("llama").image_tokens, 2)
