"""Molmo2 as transformers has it: parameters against its modules, peaks against the trace, with images and without."""

import copy
from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL

from memplan.estimate.step import write_step

CONFIG = SMALL["molmo2"]


def changed(**parts: dict[str, Any]) -> dict[str, Any]:
    """The small configuration with other values in its parts."""
    config = copy.deepcopy(CONFIG)
    for name, values in parts.items():
        config[f"{name}_config"] |= values
    return config


BARE = changed(text={"vocab_size": 90, "num_hidden_layers": 2})
"""So few tokens that layers make the peak, and no logits."""

IMAGES = ((0, "lm"), (2, "vlm"))
VISION = {"model_type": "molmo2_vision", "hidden_size": 1152, "num_hidden_layers": 25}
FULL: dict[str, tuple[dict[str, Any], int]] = {
    "molmo2-4b": ({"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}, 4_850_869_200),
    "molmo2-8b": ({"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}, 8_661_703_120),
    "molmo2-o-7b": (
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 100278,
         "num_key_value_heads": 32, "qk_norm_type": "olmo", "norm_after": True}, 7_760_786_896,
    ),
}  # fmt: skip
"""Texts of full-size models with the parameters of the whole, tower and connector included."""


@pytest.mark.parametrize("name", FULL)
def test_full_molmos_have_as_many_parameters_as_published(name: str) -> None:
    text, params = FULL[name]
    config = {
        "model_type": "molmo2",
        "text_config": {"model_type": "molmo2_text", "num_attention_heads": 32} | text,
        "vision_config": VISION,
        "adapter_config": {
            "model_type": "molmo2_adapter",
            "hidden_size": 1152,
            "intermediate_size": text["intermediate_size"],
            "text_hidden_size": text["hidden_size"],
        },
    }
    assert counted(config_run(config, batch=1)) == params


def test_eleven_molmos_have_the_parameters_of_transformers() -> None:
    pytest.importorskip("transformers")
    configs = [CONFIG]
    for index, text in enumerate(others(CONFIG["text_config"])):
        text |= {"qk_norm_type": ("qwen3", "olmo")[index % 2], "attention_bias": index % 3 == 0}
        adapter = {"text_hidden_size": text["hidden_size"], "intermediate_size": 96 + index, "mlp_bias": index % 2 > 0}
        vision = {"intermediate_size": 200 + index, "num_hidden_layers": 3 + index % 3}
        configs.append(changed(text=text, vision=vision, adapter=adapter))
    runs = [config_run(config, batch=1) for config in configs]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


@pytest.mark.parametrize(("images", "workload"), IMAGES)
def test_the_ledger_of_a_molmo_says_what_the_trace_says(images: int, workload: str) -> None:
    pytest.importorskip("transformers")
    run = config_run(BARE, batch=2, seq=48, precision="bf16", images=images, workload=workload)
    assert estimated(run) == traced(run)


def test_a_tower_that_sees_no_images_gets_neither_gradients_nor_optimizer_state() -> None:
    tapes = [write_step(config_run(BARE, seq=48, images=images, workload=work)) for images, work in IMAGES]
    tower = sum(one.numel * one.copies for one in tapes[0].parameters if one.component in ("vision", "connector"))
    states = [sum(one.num_bytes for one in tape.allocs if one.op.startswith("exp_avg")) for tape in tapes]
    assert states[1] - states[0] >= 2 * 4 * tower > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize(("images", "workload"), IMAGES)
def test_every_combination_of_a_molmo_is_what_the_trace_says(images: int, workload: str, device: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2", "selective"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss, precision in product(checkpoints, losses, ("fp32", "bf16", "bf16-mixed")):
        step = {"ckpt": ckpt, "loss": loss, "precision": precision, "images": images}
        run = config_run(CONFIG, device, seq=96, workload=workload, **step)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 2e-4:
            missed.append((ckpt, loss, precision, ours, theirs))
    assert not missed
