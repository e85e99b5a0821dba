"""Runs of models of transformers' families, and the numbers that the ledger, the trace and transformers say of them."""

import copy
import json
import random
from typing import Any

from memplan.estimate import estimate
from memplan.estimate.step import build, new_tape
from memplan.models.hf_config import spec_of
from memplan.spec import RunSpec, StepSpec
from memplan.spec.device import CPU, card
from memplan.spec.hf_facts import complete

SCALES = ("intermediate_size", "vocab_size", "num_hidden_layers", "moe_intermediate_size", "n_inner", "n_layer")
"""Sizes that may be changed one by one."""


def config_run(config: dict[str, Any], device: str = "h100-80g", **step: Any) -> RunSpec:
    """A run of the model of a configuration."""
    model = spec_of(complete(config, "config.json").config, name="small", source="a test")
    values: dict[str, Any] = {"batch": 4, "seq": 128, "precision": "fp32"} | step
    return RunSpec(model=model, step=StepSpec(**values), device=CPU if device == "cpu" else card(device))


def counted(run: RunSpec) -> int:
    """Parameters of the model by the ledger."""
    tape = new_tape(run)
    build(tape, run)
    return sum(parameter.numel * parameter.copies for parameter in tape.parameters)


def counted_by_transformers(run: RunSpec) -> int:
    """Parameters of transformers' module, those that are tied once."""
    import torch

    from memplan.models.hf_build import built_config, built_module, no_initialisation

    with torch.device("meta"), no_initialisation():
        module = built_module(built_config(run.model), run.model.name, run.step.attention)
    module.tie_weights()
    return sum(parameter.numel() for parameter in module.parameters())


def estimated(run: RunSpec) -> int:
    """Peak of a step by formula, blocks that the allocator does not split included."""
    return estimate(run).peak_allocated_bytes


def traced(run: RunSpec) -> int:
    """Peak of the same step by the trace."""
    from memplan.backends.simulated import simulate

    return simulate(run).steps.steady.peak_allocated_bytes


def others(config: dict[str, Any], num: int = 10) -> list[dict[str, Any]]:
    """`num` configurations of the same family with other sizes that go together."""
    draw, made = random.Random(json.dumps(config, sort_keys=True)), []
    for _ in range(num):
        other = copy.deepcopy(config)
        for key in SCALES:
            if key in other:
                other[key] += draw.randint(1, 40)
        other.pop("layer_types", None)
        other["hidden_size"] *= draw.randint(1, 3)
        heads = draw.choice((1, 2, 4))
        if other["hidden_size"] % other["num_attention_heads"] == 0:
            other["num_key_value_heads"] = heads
        made.append(other)
    return made
