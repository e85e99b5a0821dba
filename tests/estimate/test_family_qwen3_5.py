"""Qwen3.5: parameters against transformers' modules, peaks against the trace, loops that are told by a few rounds."""

from itertools import product
from typing import Any

import pytest
from family_runs import config_run, counted, counted_by_transformers, estimated, others, traced
from models.hf_configs import SMALL
from samples import swept

from memplan.estimate import recurrent
from memplan.estimate.reading import peak_bytes
from memplan.estimate.step import write_step

CONFIG = SMALL["qwen3_5_text"]
BARE = CONFIG | {"vocab_size": 96}
"""So few tokens that layers make the peak, and no logits."""
SHORT = BARE | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320, "head_dim": 256,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
}  # fmt: skip
FULL: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3.5-0.8b": (
        QWEN | {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
                "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True}, 752_393_024,
    ),
    "qwen3.6-27b": (
        QWEN | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
                "num_key_value_heads": 4, "linear_num_value_heads": 48, "tie_word_embeddings": False}, 26_895_998_464,
    ),
}  # fmt: skip
"""Texts of full-size models with the parameters of the modules that transformers builds."""
ENCODERS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3.5-0.8b": (
        {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072, "out_hidden_size": 1024},
        852_985_920,
    ),
    "qwen3.6-27b": ({"hidden_size": 1152, "depth": 27, "out_hidden_size": 5120}, 27_356_728_560),
}
"""Their image encoders, with the parameters of the whole."""


@pytest.mark.parametrize("name", FULL)
def test_full_hybrids_have_as_many_parameters_as_published(name: str) -> None:
    config, params = FULL[name]
    assert counted(config_run(config, batch=1)) == params


@pytest.mark.parametrize("name", FULL)
def test_hybrids_with_encoders_have_as_many_parameters_as_published(name: str) -> None:
    (text, _), (vision, params) = FULL[name], ENCODERS[name]
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": vision}
    run = config_run(config | {"tie_word_embeddings": text["tie_word_embeddings"]}, batch=1)
    assert counted(run) == params


def test_eleven_hybrids_have_the_parameters_of_transformers() -> None:
    pytest.importorskip("transformers")
    configs = [CONFIG, *others(CONFIG)]
    for index, config in enumerate(configs[1:]):
        config["linear_key_head_dim"] += 8 * index
        config["linear_num_value_heads"] = 2 + 2 * (index % 3)
        config["linear_conv_kernel_dim"] = 2 + index % 4
        config["full_attention_interval"] = 2 + index % 3
    runs = [config_run(config, batch=1) for config in configs]
    found = [counted(run) for run in runs]
    assert len(set(found)) == len(found)
    assert found == [counted_by_transformers(run) for run in runs]


def test_the_ledger_of_a_hybrid_says_what_the_trace_says() -> None:
    pytest.importorskip("transformers")
    run = config_run(SHORT, batch=2, seq=100, precision="bf16-mixed", ckpt="full")
    assert estimated(run) == traced(run)


@pytest.mark.parametrize("step", [{}, {"ckpt": "full"}, {"ckpt": "selective"}, {"precision": "bf16-mixed"}])
def test_one_round_speaks_for_all_between(step: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = config_run(SHORT, batch=2, seq=640, **step)
    told = estimated(run)
    monkeypatch.setattr(recurrent, "SINGLE", 10)
    assert told == estimated(run)


def test_a_long_sequence_is_told_by_as_few_events_as_a_short_one() -> None:
    config = SHORT | {"max_position_embeddings": 65536}
    events = [len(write_step(config_run(config, batch=1, seq=seq)).events) for seq in (4096, 65536)]
    assert events[0] == events[1]


def test_a_sweep_over_lengths_says_what_each_length_says_alone() -> None:
    points = list(swept(config_run(SHORT), {"batch": [2, 4], "seq": [64, 100, 448]}))
    steps = [write_step(config_run(SHORT, batch=point["batch"], seq=point["seq"])) for point in points]
    assert [point["peak_allocated_bytes"] for point in points] == [peak_bytes(step) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100-80g", "cpu"])
@pytest.mark.parametrize("config", [CONFIG, BARE | {"linear_num_key_heads": 4}], ids=["grouped", "alike"])
def test_every_combination_of_a_hybrid_is_what_the_trace_says(config: dict[str, Any], device: str) -> None:
    pytest.importorskip("transformers")
    checkpoints, losses = ("none", "full", "every:2", "selective"), ("full", "chunked:2", "chunked-ckpt:2")
    missed = []
    for ckpt, loss, precision in product(checkpoints, losses, ("fp32", "bf16", "bf16-mixed")):
        run = config_run(config, device, ckpt=ckpt, loss=loss, precision=precision)
        ours, theirs = estimated(run), traced(run)
        if abs(ours / theirs - 1) > 1e-4:
            missed.append((ckpt, loss, precision, ours, theirs))
    assert not missed


@pytest.mark.slow
@pytest.mark.parametrize(("seq", "ckpt"), [*product((64, 100, 512), ("none", "full", "selective"))])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_lengths_of_few_and_of_many_parts_are_what_the_trace_says(seq: int, ckpt: str, precision: str) -> None:
    pytest.importorskip("transformers")
    run = config_run(BARE, seq=seq, ckpt=ckpt, precision=precision)
    assert estimated(run) == traced(run)
