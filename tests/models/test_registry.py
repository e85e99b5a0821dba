"""The built-in facts: complete, sourced, free of torch, and equal to what is built from them."""

import copy
import json
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import torch

from memplan.errors import MemplanError
from memplan.models import registry
from memplan.models.factory import build_model
from memplan.models.hf_build import built_config, built_module
from memplan.spec.step import PRECISIONS


def counts_of(name: str) -> dict[str, int]:
    """Total, trainable and token-embedding parameters of the module built on the meta device."""
    spec = registry.model_spec(name)
    model: Any
    if spec.impl == "hf":
        pytest.importorskip("transformers")
        with torch.device("meta"):
            model = built_module(built_config(spec), name, "eager")
        embedding = model.get_input_embeddings()
        tables = list(embedding.parameters()) if isinstance(embedding, torch.nn.Embedding) else []
    else:
        with torch.device("meta"):
            model = build_model(spec)
        tables = list(model.decoder.embedding.parameters())
    parameters = list(model.parameters())
    return {
        "total": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "embedding": sum(p.numel() for p in tables),
    }


@pytest.mark.parametrize("name", registry.names())
def test_built_module_has_the_published_counts(name: str) -> None:
    published = registry.published_counts(name)
    assert published.pop("source")
    assert counts_of(name) == published


def test_a_wrong_fact_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    published = registry.published_counts("smollm2-135m")
    right = registry._facts("smollm2-135m")
    right["decoder"]["ffn"] += 1
    monkeypatch.setattr(registry, "_facts", lambda name: copy.deepcopy(right))
    assert counts_of("smollm2-135m")["total"] != published["total"]


@pytest.mark.parametrize("name", registry.names())
def test_spec_is_complete(name: str) -> None:
    spec = registry.model_spec(name)
    assert spec.name == name
    assert spec.source
    assert spec.precision in PRECISIONS
    assert spec.seq <= spec.decoder.max_positions
    assert (spec.vision is None) == (spec.connector is None) == (spec.images == 0)
    assert spec.decoder.num_heads % spec.decoder.num_kv_heads == 0


def test_molmo2_forms() -> None:
    trainer, exported = registry.model_spec("molmo2-4b"), registry.model_spec("molmo2-4b-hf")
    assert (trainer.decoder.projections, trainer.decoder.mask, trainer.decoder.rope_fp32) == ("fused", "dense", True)
    assert (exported.decoder.projections, exported.decoder.mask) == ("separate", "dense")
    assert trainer.frozen == ("embedding",)
    assert exported.frozen == ()
    assert trainer.vision == exported.vision
    assert trainer.connector == exported.connector


def test_a_users_module_is_named_and_not_loaded() -> None:
    spec = registry.model_spec("nowhere.to_be_found:make")
    assert (spec.impl, spec.config, spec.name) == ("user", "nowhere.to_be_found:make", "nowhere.to_be_found:make")
    assert (spec.seq, spec.decoder.vocab, spec.decoder.num_layers) == (0, 0, 0)


def test_transformers_facts_agree_with_the_specs() -> None:
    for name in ("tiny-hybrid", "qwen3.5-0.8b"):
        spec = registry.model_spec(name)
        assert spec.impl == "hf"
        config, decoder = json.loads(spec.config), spec.decoder
        assert decoder.num_layers == config["num_hidden_layers"]
        assert (decoder.hidden, decoder.ffn) == (config["hidden_size"], config["intermediate_size"])
        assert (decoder.vocab, decoder.max_positions) == (config["vocab_size"], config["max_position_embeddings"])
        assert (decoder.num_heads, decoder.num_kv_heads) == (
            config["num_attention_heads"], config["num_key_value_heads"]
        )  # fmt: skip


def test_unknown_name_lists_near_ones() -> None:
    with pytest.raises(MemplanError, match=r"molmo2-4b") as caught:
        registry.model_spec("molmo2_4b")
    assert "Did you mean" in caught.value.hint
    with pytest.raises(MemplanError):
        registry.published_counts("molmo2_4b")
    with pytest.raises(MemplanError):
        registry.model_spec("../models/data/gpt2")


def test_only_the_file_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    load = tomllib.load
    monkeypatch.setattr(tomllib, "load", lambda file: read.append(file.name) or load(file))
    registry.model_spec("gpt2")
    assert [name.rsplit("/", 1)[-1] for name in read] == ["gpt2.toml"]


def test_loads_without_torch() -> None:
    code = (
        "import sys; from memplan.models.registry import names, model_spec; [model_spec(name) for name in names()]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
