"""BERT, ViT and SigLIP: parameters against transformers' modules, peaks against the trace."""

import random
from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL

from memplan.errors import MemplanError
from memplan.spec import RunSpec

FAMILY = {name: SMALL[name] for name in ("bert", "vit", "siglip")}

BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
VIT = {"model_type": "vit", "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True} | BASE

FULL: dict[str, tuple[dict[str, Any], str, int]] = {
    "bert-base": (BERT | BASE, "BertModel", 109_482_240),
    "bert-base for masked words": (BERT | BASE, "BertForMaskedLM", 109_514_298),
    "bert-large": (BERT | LARGE, "BertModel", 335_141_888),
    "bert-large for masked words": (BERT | LARGE, "BertForMaskedLM", 335_174_458),
    "vit-base": (VIT | {"num_labels": 1000}, "ViTForImageClassification", 86_567_656),
    "vit-base-in21k": (VIT, "ViTModel", 86_389_248),
    "siglip2-so400m": (
        {"model_type": "siglip",
         "text_config": SO400M | {"vocab_size": 256000, "max_position_embeddings": 64, "projection_size": 1152},
         "vision_config": SO400M | {"image_size": 384, "patch_size": 14}}, "SiglipModel", 1_136_008_498,
    ),
    "siglip2-so400m's image encoder": (
        SO400M | {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}, "SiglipVisionModel",
        428_225_600,
    ),
}  # fmt: skip
"""Full-size models, the class that is built, and its parameters as published or counted in transformers' module."""


def encoder_run(config: dict[str, Any], device: str = "h100-80g", **step: Any) -> RunSpec:
    """A run of an encoder on what it reads: words, or images with a class each."""
    if config["model_type"] == "bert":
        return config_run(config, device, **step)
    seq = config_run(config, batch=1, seq=1, workload="classify").model.seq
    return config_run(config, device, workload="classify", seq=seq, **step)


def changed(name: str) -> list[dict[str, Any]]:
    """Ten other configurations of a family."""
    draw = random.Random(name)
    if name == "siglip":
        towers = [other | {"image_size": 8 * draw.randint(1, 9)} for other in others(FAMILY[name]["vision_config"])]
        return [FAMILY[name] | {"vision_config": without_groups(tower)} for tower in towers]
    configs = [without_groups(other) for other in others(FAMILY[name])]
    if name == "bert":
        return configs
    return [
        config | {"qkv_bias": bool(index % 2), "image_size": [40, 8 * (index + 1)], "patch_size": [8, 4]}
        for index, config in enumerate(configs)
    ]


def without_groups(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without a number of key and value heads, which encoders do not have."""
    return {key: value for key, value in config.items() if key != "num_key_value_heads"}


@pytest.mark.parametrize("name", FULL)
def test_full_encoders_have_as_many_parameters_as_published(name: str) -> None:
    config, architecture, params = FULL[name]
    assert counted(encoder_run(config | {"architectures": [architecture]}, batch=1)) == params


@pytest.mark.parametrize("name", FAMILY)
def test_eleven_encoders_have_the_parameters_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    runs = [encoder_run(config, batch=1) for config in (FAMILY[name], *changed(name))]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


@pytest.mark.parametrize(
    ("name", "architecture"), [("bert", "BertModel"), ("bert", "BertForPreTraining"), ("vit", "ViTModel"),
                               ("siglip", "SiglipModel")],
)  # fmt: skip
def test_classes_that_no_step_trains_are_counted_all_the_same(name: str, architecture: str) -> None:
    pytest.importorskip("transformers")
    run = encoder_run(FAMILY[name] | {"architectures": [architecture]})
    assert counted(run) == counted_by_transformers(run)
    with pytest.raises(MemplanError, match=architecture):
        estimated(run)


FEW: dict[str, tuple[str, str, dict[str, Any]]] = {
    "words": ("bert", "h100-80g", {"precision": "bf16-mixed", "ckpt": "selective", "loss": "chunked:2"}),
    "a first row": ("vit", "a100-80g", {"precision": "bf16", "ckpt": "every:2"}),
    "a mean row": ("siglip", "cpu", {}),
}
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "words that are dropped": ("bert", "cpu", {"dropout": 0.1, "ckpt": "full"}),
    "weights of attention": ("bert", "h100-80g", {"attention": "eager", "precision": "bf16-mixed"}),
    "a fused loss of logits with a bias": ("bert", "h100-80g", {"precision": "bf16-mixed", "loss": "fused"}),
    "the same in halves": ("bert", "cpu", {"precision": "fp16", "loss": "fused"}),
    "rows that lie apart": ("siglip", "h100-80g", {"precision": "bf16-mixed", "ckpt": "full", "attention": "eager"}),
}
"""A model, a device, a step."""


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_ledger_of_an_encoder_says_what_the_trace_says(name: str) -> None:
    pytest.importorskip("transformers")
    model, device, step = (FEW | MORE)[name]
    run = encoder_run(FAMILY[model], device, **step)
    assert estimated(run) == traced(run)


def test_a_pooling_head_that_nobody_reads_has_no_gradient_and_no_state() -> None:
    whole, tower = SMALL["siglip"], SMALL["siglip"]["vision_config"]
    without = whole | {"vision_config": tower | {"vision_use_head": False}}
    runs = [encoder_run(config, "cpu", ckpt="full") for config in (whole, without)]
    params = counted(runs[0]) - counted(runs[1])
    assert params == 4 * tower["hidden_size"] ** 2 + 2 * tower["hidden_size"] * tower["intermediate_size"] + (
        8 * tower["hidden_size"] + tower["intermediate_size"]
    )
    assert estimated(runs[0]) - estimated(runs[1]) == 4 * params


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_combination_of_an_encoder_is_what_the_trace_says(name: str, device: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2", "selective"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss, precision in product(checkpoints, losses, ("fp32", "bf16", "bf16-mixed")):
        run = encoder_run(FAMILY[name], device, ckpt=ckpt, loss=loss, precision=precision)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 2e-4:
            missed.append((ckpt, loss, precision, ours, theirs))
    assert not missed
