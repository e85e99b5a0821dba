"""Mixtral and Qwen3's experts: parameters against transformers' modules, peaks against the trace."""

import random
from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL
from models.hub_configs import HUB

FAMILY = {name: SMALL[name] for name in ("mixtral", "qwen3_moe")}
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
FULL: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-30B-A3B": (HUB["qwen3_moe"], 30_532_122_624),
    "Mixtral-8x7B-v0.1": (MIXTRAL, 46_702_792_704),
}
"""Full-size models with the parameters of the modules that transformers builds."""


def with_experts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Ten configurations with other sizes, other numbers of experts, and dense layers where the family has them."""
    draw, made = random.Random(0), others(config)
    for number, other in enumerate(made):
        key = "num_local_experts" if "num_local_experts" in other else "num_experts"
        other[key] = draw.randint(4, 12)
        if "decoder_sparse_step" in other:
            other |= {"decoder_sparse_step": 1 + number % 3, "mlp_only_layers": [number % 4]}
    return made


@pytest.mark.parametrize("name", FULL)
def test_full_models_of_experts_have_as_many_parameters_as_published(name: str) -> None:
    config, params = FULL[name]
    assert counted(config_run(config, batch=1)) == params


@pytest.mark.parametrize("name", FAMILY)
def test_eleven_models_of_experts_have_the_parameters_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    runs = [config_run(config, batch=1) for config in (FAMILY[name], *with_experts(FAMILY[name]))]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


FEW: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "shares in fp32": ("mixtral", {"router_jitter_noise": 0.1}, "h100-80g", {"precision": "bf16", "ckpt": "full"}),
    "a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}, "cpu", {"precision": "bf16-mixed", "ckpt": "selective"}),
    "adapters": ("qwen3_moe", {}, "h100-80g", {"precision": "bf16-mixed", "lora": "8"}),
}
"""A model, what is changed in it, a device, a step."""
SHORT = {"num_hidden_layers": 2, "vocab_size": 40, "intermediate_size": 96}
"""A small vocabulary, so that the peak is among the experts, and tensors below the 1 MiB from which on the allocator
gives more than was asked for."""


@pytest.mark.parametrize("name", FEW)
def test_the_ledger_of_experts_says_what_the_trace_says(name: str) -> None:
    pytest.importorskip("transformers")
    model, own, device, step = FEW[name]
    run = config_run(FAMILY[model] | SHORT | own, device, batch=2, seq=64, **step)
    assert estimated(run) == traced(run)


def test_rows_go_through_every_expert_that_they_are_given_to() -> None:
    """Each further expert a token takes the same bytes."""
    peaks = [
        estimated(config_run(SMALL["mixtral"] | {"num_experts_per_tok": k, "vocab_size": 40}, "cpu", precision="bf16"))
        for k in (2, 3, 4)
    ]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_combination_of_experts_is_what_the_trace_says(name: str, device: str, precision: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2", "selective"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss in product(checkpoints, losses):
        step = {"ckpt": ckpt, "loss": loss, "precision": precision}
        run = config_run(FAMILY[name] | SHORT | {"num_hidden_layers": 3}, device, batch=2, seq=64, **step)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 1e-4:
            missed.append((ckpt, loss, ours, theirs))
    assert not missed
