"""gpt-oss: parameters against transformers' modules, peaks against the trace."""

import random
from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL

from memplan.errors import MemplanError

GPT_OSS = SMALL["gpt_oss"]
GPT_OSS_20B = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 24, "num_local_experts": 32,
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_experts_per_tok": 4, "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip


def test_gpt_oss_20b_has_as_many_parameters_as_published() -> None:
    assert counted(config_run(GPT_OSS_20B, batch=1, attention="eager")) == 20_914_757_184


def test_eleven_gpt_osses_have_the_parameters_of_transformers() -> None:
    pytest.importorskip("transformers")
    draw, changed = random.Random(0), others(GPT_OSS)
    for number, other in enumerate(changed):
        other |= {"num_local_experts": draw.randint(4, 12), "attention_bias": number % 2 == 0}
    runs = [config_run(config, batch=1, attention="eager") for config in (GPT_OSS, *changed)]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


FEW: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "biases in place": ({"num_key_value_heads": 4}, "h100-80g", {"precision": "bf16-mixed", "ckpt": "full"}),
    "sinks": ({"intermediate_size": 16, "num_experts_per_tok": 1}, "cpu", {"precision": "bf16"}),
}
"""What is changed, a device, a step."""
SHORT = {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "vocab_size": 40,
    "num_local_experts": 4, "intermediate_size": 96,
}  # fmt: skip
"""A small vocabulary, so that the peak is among the layers, and tensors below the 1 MiB from which on the allocator
gives more than was asked for."""


@pytest.mark.parametrize("name", FEW)
def test_the_ledger_of_gpt_oss_says_what_the_trace_says(name: str) -> None:
    pytest.importorskip("transformers")
    own, device, step = FEW[name]
    run = config_run(GPT_OSS | SHORT | own, device, attention="eager", batch=2, seq=64, **step)
    assert estimated(run) == traced(run)


def test_gpt_oss_refuses_what_the_real_step_refuses() -> None:
    with pytest.raises(MemplanError, match="no kernel that does the attention"):
        config_run(GPT_OSS | SHORT, "cpu", attention="sdpa")
    run = config_run(GPT_OSS | SHORT, "cpu", attention="eager", ckpt="selective")
    with pytest.raises(MemplanError):
        estimated(run)
    with pytest.raises(MemplanError):
        traced(run)


LONG = SHORT | {"num_hidden_layers": 4, "layer_types": GPT_OSS["layer_types"]}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
def test_every_combination_of_gpt_oss_is_what_the_trace_says(device: str, precision: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss in product(checkpoints, losses):
        step = {"ckpt": ckpt, "loss": loss, "precision": precision}
        run = config_run(GPT_OSS | LONG, device, attention="eager", batch=2, seq=64, **step)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 1e-4:
            missed.append((ckpt, loss, ours, theirs))
    assert not missed
