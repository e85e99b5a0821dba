"""Llama's kin: parameters against transformers' modules, peaks against the trace."""

from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL, decoder

SMOLLM3 = decoder(
    "SmolLM3ForCausalLM", "smollm3", head_dim=40, num_hidden_layers=5, use_sliding_window=False, attention_bias=True,
    tie_word_embeddings=True,
)  # fmt: skip
FAMILY = {name: SMALL[name] for name in ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3")} | {"smollm3": SMOLLM3}

FULL: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-4B": (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "vocab_size": 151936, "tie_word_embeddings": True}, 4_022_468_096,
    ),
    "Qwen2.5-Coder-1.5B": (
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960,
         "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
         "tie_word_embeddings": True}, 1_543_714_304,
    ),
    "Llama-3.1-70B": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
         "tie_word_embeddings": False}, 70_553_706_496,
    ),
    "Llama-3.2-1B": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
         "vocab_size": 128256, "tie_word_embeddings": True}, 1_235_814_400,
    ),
    "SmolLM2-135M": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
         "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
         "tie_word_embeddings": True}, 134_515_008,
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 4096,
         "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000, "sliding_window": 4096}, 7_241_732_096,
    ),
    "Phi-3-mini-4k-instruct": (
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
         "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": 2047},
        3_821_079_552,
    ),
}  # fmt: skip
"""Full-size models with the parameters of the modules that transformers builds."""


@pytest.mark.parametrize("name", FULL)
def test_full_models_have_as_many_parameters_as_published(name: str) -> None:
    config, params = FULL[name]
    assert counted(config_run(config, batch=1)) == params


@pytest.mark.parametrize("name", FAMILY)
def test_eleven_models_of_a_family_have_the_parameters_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    runs = [config_run(config, batch=1) for config in (FAMILY[name], *others(FAMILY[name]))]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


FEW: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("llama", {}, "h100-80g", {"precision": "bf16-mixed", "ckpt": "selective", "loss": "chunked:2"}),
    "qwen3 on a CPU": ("qwen3", {}, "cpu", {"precision": "bf16"}),
    "olmo2, eager": ("olmo2", {}, "h100-80g", {"precision": "bf16-mixed", "attention": "eager"}),
    "no positions": ("smollm3", {"no_rope_layers": [1, 0]}, "h100-80g", {"ckpt": "full"}),
    "phi3": ("phi3", {}, "cpu", {"ckpt": "every:2", "loss": "chunked-ckpt:2"}),
}
"""Runs that between them meet most of what the kin differ in: a model, what is changed in it, a device, a step."""


@pytest.mark.parametrize("name", FEW)
def test_the_ledger_says_what_the_trace_says(name: str) -> None:
    pytest.importorskip("transformers")
    model, own, device, step = FEW[name]
    run = config_run(FAMILY[model] | {"num_hidden_layers": 2} | own, device, **step)
    assert estimated(run) == traced(run)


def test_a_window_makes_masks_where_sequences_reach_it() -> None:
    beyond, reached, plain = (
        estimated(config_run(SMALL["mistral"] | {"sliding_window": size}, precision="bf16"))
        for size in (129, 128, None)
    )
    assert beyond == plain < reached


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_combination_is_what_the_trace_says(name: str, device: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2", "selective"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss, precision in product(checkpoints, losses, ("fp32", "bf16", "bf16-mixed")):
        run = config_run(FAMILY[name], device, ckpt=ckpt, loss=loss, precision=precision)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 1e-4:
            missed.append((ckpt, loss, precision, ours, theirs))
    assert not missed
