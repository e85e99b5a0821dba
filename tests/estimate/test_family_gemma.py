"""Gemma 2 and 3: parameters against transformers' modules, peaks against the trace."""

from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL
from models.hub_configs import HUB

FAMILY = {name: SMALL[name] for name in ("gemma2", "gemma3_text", "gemma3")}
USUAL: dict[str, dict[str, Any]] = {
    "gemma2": {"attention": "eager"}, "gemma3_text": {}, "gemma3": {"workload": "vlm", "images": 1},
}  # fmt: skip
"""What a step of each says."""

FULL: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-2-2b": (
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 2304, "intermediate_size": 9216,
         "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
         "vocab_size": 256000}, 2_614_341_888,
    ),
    "gemma-2-9b": (
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584,
         "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 256, "vocab_size": 256000}, 9_241_705_984,
    ),
    "gemma-3-4b-it": (HUB["gemma3"], 4_300_079_472),
}  # fmt: skip
"""Full-size models with the parameters of the modules that transformers builds."""


@pytest.mark.parametrize("name", FULL)
def test_full_gemmas_have_as_many_parameters_as_published(name: str) -> None:
    config, params = FULL[name]
    assert counted(config_run(config, batch=1, attention="eager")) == params


@pytest.mark.parametrize("name", FAMILY)
def test_eleven_gemmas_have_the_parameters_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    text = FAMILY[name].get("text_config")
    changed = others(text or FAMILY[name])
    configs = (FAMILY[name], *([FAMILY[name] | {"text_config": other} for other in changed] if text else changed))
    runs = [config_run(config, batch=1, **USUAL[name]) for config in configs]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
FEW: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "capped scores": ("gemma2", TWO, "h100-80g", {"precision": "bf16-mixed", "ckpt": "selective", "loss": "chunked:2"}),
    "windows": ("gemma3_text", TWO, "h100-80g", {"precision": "bf16", "ckpt": "every:2"}),
    "a single head of keys": ("gemma3_text", TWO | {"num_key_value_heads": 1}, "h100-80g", {"precision": "bf16"}),
    "masks on the host, one a head": ("gemma3_text", TWO, "h100-80g", {"precision": "fp32", "ckpt": "offload"}),
    "images": ("gemma3", {}, "h100-80g", {"precision": "bf16-mixed", "ckpt": "full"}),
}
"""A model, what is changed in it, a device, a step."""


@pytest.mark.parametrize("name", FEW)
def test_the_ledger_of_a_gemma_says_what_the_trace_says(name: str) -> None:
    pytest.importorskip("transformers")
    model, own, device, step = FEW[name]
    run = config_run(FAMILY[model] | own, device, **USUAL[model] | step)
    assert estimated(run) == traced(run)


def test_caps_of_scores_and_logits_take_memory() -> None:
    peaks = [
        estimated(config_run(SMALL["gemma2"] | caps, attention="eager", precision="bf16"))
        for caps in (
            {},
            {"attn_logit_softcapping": None},
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        )
    ]
    assert peaks[0] > peaks[1] > peaks[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_combination_of_a_gemma_is_what_the_trace_says(name: str, device: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2", "selective"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss, precision in product(checkpoints, losses, ("fp32", "bf16", "bf16-mixed")):
        step = USUAL[name] | {"ckpt": ckpt, "loss": loss, "precision": precision}
        run = config_run(FAMILY[name], device, **step)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 1e-4:
            missed.append((ckpt, loss, precision, ours, theirs))
    assert not missed
