"""GPT-2 and GPT-NeoX: parameters against transformers' modules, peaks against the trace."""

import random
from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL

FAMILY = {name: SMALL[name] for name in ("gpt2", "gpt_neox")}

FULL: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024,
         "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808,
    ),
    "pythia-1b": (
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 50304, "hidden_size": 2048,
         "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 8, "hidden_act": "gelu",
         "max_position_embeddings": 2048, "use_parallel_residual": True, "tie_word_embeddings": False,
         "attention_bias": True}, 1_011_781_632,
    ),
}  # fmt: skip
"""Full-size models with the parameters of the modules that transformers builds."""


def changed(name: str) -> list[dict[str, Any]]:
    """Ten other configurations of a family."""
    config, draw = FAMILY[name], random.Random(name)
    if name == "gpt2":
        sizes = [(draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 900)) for _ in range(10)]
        return [
            config | {"n_embd": 32 * width, "n_layer": layers, "vocab_size": vocab, "n_positions": 128 + vocab}
            for width, layers, vocab in sizes
        ]
    return [
        other | {"attention_bias": bool(index % 3), "tie_word_embeddings": index % 4 == 0, "num_key_value_heads": 4}
        for index, other in enumerate(others({key: value for key, value in config.items() if key != "head_dim"}))
    ]


@pytest.mark.parametrize("name", FULL)
def test_full_gpts_have_as_many_parameters_as_published(name: str) -> None:
    config, params = FULL[name]
    assert counted(config_run(config, batch=1)) == params


@pytest.mark.parametrize("name", FAMILY)
def test_eleven_gpts_have_the_parameters_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    runs = [config_run(config, batch=1) for config in (FAMILY[name], *changed(name))]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


FEW: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "GELU written out": ("gpt2", {"n_layer": 2}, "h100-80g", {"precision": "bf16-mixed", "ckpt": "selective"}),
    "one behind the other": ("gpt_neox", {"num_hidden_layers": 2, "use_parallel_residual": False}, "cpu", {}),
}
MORE: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "dropout": ("gpt2", {"n_layer": 2}, "cpu", {"precision": "bf16-mixed", "dropout": 0.1}),
    "heads of 42": ("gpt2", {"n_layer": 2, "n_embd": 168}, "a100-80g", {"precision": "bf16"}),
    "side by side": ("gpt_neox", {"num_hidden_layers": 2}, "a100-80g", {"precision": "bf16", "loss": "chunked:2"}),
}
"""A model, what is changed in it, a device, a step."""


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_ledger_of_a_gpt_says_what_the_trace_says(name: str) -> None:
    pytest.importorskip("transformers")
    model, own, device, step = (FEW | MORE)[name]
    run = config_run(FAMILY[model] | own, device, **step)
    assert estimated(run) == traced(run)


def test_dropout_is_the_step_s_and_not_the_configuration_s() -> None:
    dropping = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    plain = estimated(config_run(SMALL["gpt2"]))
    assert estimated(config_run(SMALL["gpt2"] | dropping)) == plain
    assert estimated(config_run(SMALL["gpt2"], dropout=0.1)) > plain


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_combination_of_a_gpt_is_what_the_trace_says(name: str, device: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2", "selective"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss, precision in product(checkpoints, losses, ("fp32", "bf16", "bf16-mixed")):
        run = config_run(FAMILY[name], device, ckpt=ckpt, loss=loss, precision=precision)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 1e-4:
            missed.append((ckpt, loss, precision, ours, theirs))
    assert not missed
