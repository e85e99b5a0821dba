"""DeepSeek V2 and V3, Moonlight: parameters against transformers' modules, peaks against the trace."""

import random
from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL
from models.hub_configs import HUB

from memplan.estimate.step import build, new_tape

FAMILY = {name: SMALL[name] for name in ("deepseek_v2", "deepseek_v3")}
MOONLIGHT = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840, "hidden_size": 2048,
    "intermediate_size": 11264, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "tie_word_embeddings": False,
}  # fmt: skip
FULL: dict[str, tuple[dict[str, Any], int]] = {
    "DeepSeek-V3": (HUB["deepseek_v3"], 671_026_404_352),
    "Moonlight-16B-A3B": (MOONLIGHT, 15_960_108_544),
}
"""Full-size models with the parameters of the modules that transformers builds."""


def with_experts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Ten configurations with other sizes, numbers of experts and ranks, half of them with one matrix for queries."""
    draw, made = random.Random(0), others(config)
    for number, other in enumerate(made):
        other["num_key_value_heads"] = other["num_attention_heads"]
        other |= {
            "n_routed_experts": draw.randint(4, 12), "n_shared_experts": draw.randint(1, 3),
            "first_k_dense_replace": draw.randint(0, 3), "kv_lora_rank": draw.randint(20, 60),
            "q_lora_rank": None if number % 2 else draw.randint(20, 60), "v_head_dim": draw.randint(20, 60),
            "qk_nope_head_dim": draw.randint(20, 60), "attention_bias": number % 3 == 0,
        }  # fmt: skip
    return made


@pytest.mark.parametrize("name", FULL)
def test_full_deepseeks_have_as_many_parameters_as_published(name: str) -> None:
    config, params = FULL[name]
    assert counted(config_run(config, batch=1)) == params


@pytest.mark.parametrize("name", FAMILY)
def test_eleven_deepseeks_have_the_parameters_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    runs = [config_run(config, batch=1) for config in (FAMILY[name], *with_experts(FAMILY[name]))]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


GROUPS = {"n_group": 4, "topk_group": 2}
FEW: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "pairs": ("deepseek_v3", {}, "h100-80g", {"precision": "bf16-mixed", "ckpt": "selective", "loss": "chunked:2"}),
    "groups, halves": ("deepseek_v3", GROUPS | {"rope_interleave": False}, "cpu", {"precision": "bf16"}),
    "complex turns": (
        "deepseek_v2", GROUPS | {"topk_method": "group_limited_greedy"}, "h100-80g",
        {"precision": "bf16-mixed", "ckpt": "full"},
    ),
}  # fmt: skip
"""A model, what is changed in it, a device, a step."""
SHORT = {"num_hidden_layers": 2, "vocab_size": 40}
"""A small vocabulary, so that the peak is among the layers."""


@pytest.mark.parametrize("name", FEW)
def test_the_ledger_of_a_deepseek_says_what_the_trace_says(name: str) -> None:
    pytest.importorskip("transformers")
    model, own, device, step = FEW[name]
    run = config_run(FAMILY[model] | SHORT | own, device, batch=2, seq=64, **step)
    assert estimated(run) == traced(run)


def test_router_biases_of_all_layers_are_buffers() -> None:
    tape = new_tape(run := config_run(SMALL["deepseek_v3"] | {"num_hidden_layers": 9}, "cpu"))
    build(tape, run)
    buffers = sum(alloc.num_bytes for alloc in tape.allocs if alloc.category == "buffers")
    assert buffers == 4 * (8 * 8 + 2 * 8)  # 8 layers of 8 experts, and two tables of 8 frequencies


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_combination_of_a_deepseek_is_what_the_trace_says(name: str, device: str, precision: str) -> None:
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
