"""transformers' models in our step: what they compute, recurrent states under checkpointing, and their traces."""

import dataclasses
import json
import sys
from typing import Any

import pytest
import torch
from hf_configs import SMALL, small_run, small_spec
from samples import run_of

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.models.batch import synthetic_batch
from memplan.models.factory import build_model
from memplan.models.hf_modules import HfModel, image_inputs
from memplan.models.registry import model_spec
from memplan.spec import DeviceSpec, ModelSpec, RunSpec, StepSpec
from memplan.step.builder import build_step
from memplan.step.parity import compare, compare_steps

pytest.importorskip("transformers")

HYBRID = model_spec("tiny-hybrid")


def hf_spec(**config: Any) -> ModelSpec:
    """The tiny hybrid's facts with another configuration."""
    small = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 1024, "max_position_embeddings": 128,
    }  # fmt: skip
    return dataclasses.replace(HYBRID, config=json.dumps(small | config))


GEMMA2 = hf_spec(model_type="gemma2", architectures=["Gemma2ForCausalLM"], final_logit_softcapping=5.0)


def run_on(spec: ModelSpec, **step: Any) -> RunSpec:
    step = {"batch": 2, "seq": 32} | step
    return RunSpec(model=spec, step=StepSpec(**step), device=DeviceSpec(name="cpu", rules="cpu"))


@pytest.mark.parametrize(("spec", "attention"), [(HYBRID, "sdpa"), (HYBRID, "eager"), (GEMMA2, "eager")])
def test_hidden_states_and_head_make_transformers_own_logits(spec: ModelSpec, attention: str) -> None:
    model = build_model(spec, attention=attention)
    assert isinstance(model, HfModel)
    batch = synthetic_batch(run_on(spec), "cpu", 0)
    expected = model.model(input_ids=batch.tokens, use_cache=False).logits
    torch.testing.assert_close(model.head.logits(model(batch)), expected)
    assert model.model.config._attn_implementation == attention


@pytest.mark.parametrize("family", SMALL)
def test_rows_and_head_make_the_logits_of_every_family(family: str) -> None:
    run = small_run(family, layers=0 if family == "qwen3_5_text" else 2)
    model = build_model(run.model, attention=run.step.attention)
    assert isinstance(model, HfModel)
    batch = synthetic_batch(run, "cpu", 0)
    if run.step.workload == "classify":
        expected = model.model(pixel_values=batch.pixels).logits[:, None]
    else:
        expected = model.model(input_ids=batch.tokens, **image_inputs(model.model, batch)).logits
    torch.testing.assert_close(model.head.logits(model(batch)), expected)
    assert expected.shape == (2, batch.labels.size(1), run.model.decoder.vocab)


def test_images_change_what_comes_behind_them() -> None:
    """Pixels of each crop reach the rows behind its tokens, and those of one sample no other sample."""
    for family in ("gemma3", "molmo2"):
        run = small_run(family, images=2, seq=48)
        model, batch = build_model(run.model), synthetic_batch(run, "cpu", 0)
        for name, parameter in model.named_parameters():
            if name.endswith("projection_weight"):  # Gemma 3's begins with zeros
                torch.nn.init.normal_(parameter)
        assert batch.pixels is not None
        batch.pixels.requires_grad_()
        (grad,) = torch.autograd.grad(model(batch)[0, -1].square().sum(), batch.pixels)
        assert grad[0].flatten(1).norm(dim=1).min() > 0
        assert grad[1].norm() == 0


def test_chunks_of_a_batch_with_images_are_forwards_of_their_own() -> None:
    for family in ("gemma3", "molmo2"):
        report = compare(small_run(family, chunks=2, ckpt="full"), torch.device("cpu"))
        assert report.same, report.differences


def test_components_of_transformers_modules_are_frozen() -> None:
    spec = dataclasses.replace(small_spec("molmo2"), frozen=("vision", "embedding"))
    trained = {name for name, parameter in build_model(spec).named_parameters() if parameter.requires_grad}
    assert not any("vision_tower" in name or "embed_tokens" in name for name in trained)
    assert {"model.lm_head.weight", "model.model.language_model.norm.weight"} <= trained
    assert any("multi_modal_projector" in name for name in trained)
    tied = build_model(dataclasses.replace(small_spec("gemma3"), frozen=("blocks", "connector", "vision")))
    assert {name for name, parameter in tied.named_parameters() if parameter.requires_grad} == {
        "model.model.language_model.embed_tokens.weight"
    }


def test_what_transformers_chose_is_said() -> None:
    assert build_step(small_run("mixtral"), torch.device("cpu")).note == "experts by transformers' grouped_mm"
    assert "flash-linear-attention" in build_model(HYBRID).note
    assert build_model(small_spec("llama")).note == ""


def test_the_blocks_are_found_and_named_as_transformers_names_them() -> None:
    step = build_step(run_on(HYBRID, ckpt="full", blocks="model.layers"), torch.device("cpu"))
    assert list(step.blocks) == [f"model.model.layers.{index}" for index in range(4)]
    kinds = [type(block.linear_attn).__name__ for block in list(step.blocks.values())[:3]]
    assert kinds == ["Qwen3_5GatedDeltaNet"] * 3
    assert hasattr(step.blocks["model.model.layers.3"], "self_attn")


@pytest.mark.parametrize(
    "levers",
    [
        {"ckpt": "full"},
        {"ckpt": "every:2"},
        {"ckpt": "submodule"},
        {"ckpt": "full", "precision": "bf16"},
        {"ckpt": "full", "precision": "bf16-mixed"},
        {"chunks": 2},
        {"ckpt": "full", "attention": "eager"},
    ],
)
def test_recurrent_states_are_recomputed_alike(levers: dict[str, Any]) -> None:
    run = run_of("tiny-hybrid", **levers)
    report = compare(run, torch.device("cpu"))
    assert report.same, report.differences
    assert report.num_tensors > 55
    assert (report.tolerance == 0) == ("chunks" not in levers)


def test_checkpointing_engages() -> None:
    step = build_step(run_of("tiny-hybrid", ckpt="full", chunks=2), torch.device("cpu"))
    step.accumulate()
    assert [region.num_calls for region in step.regions] == [4] * 4


def test_a_state_that_a_block_carries_over_is_seen() -> None:
    """A recurrent layer that starts from where it was left, as with a live cache, is not recomputed alike."""
    run = run_of("tiny-hybrid", ckpt="full")
    plain, variant = (build_step(dataclasses.replace(run, step=dataclasses.replace(run.step, ckpt=mode)),
                                 torch.device("cpu")) for mode in ("none", "full"))  # fmt: skip
    for step in (plain, variant):
        layer = step.model.model.model.layers[0].linear_attn
        layer.state = 0.0
        layer.register_forward_hook(carry_over)
    assert not compare_steps(plain, variant).same


def carry_over(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    made = output + layer.state
    layer.state = layer.state + float(output.detach().abs().mean())
    return made


def test_dropout_goes_where_the_configuration_has_it() -> None:
    model = build_model(HYBRID, dropout=0.25)
    assert model.model.config.attention_dropout == 0.25
    gpt2 = hf_spec(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=64, n_head=4, n_layer=2)
    config = build_model(gpt2, dropout=0.25).model.config
    assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (0.25,) * 3


@pytest.mark.parametrize("ckpt", ["none", "full"])
def test_every_block_is_traced(ckpt: str) -> None:
    run = run_of("tiny-hybrid", ckpt=ckpt)
    answer = simulate(run)
    assert not answer.grown
    assert answer.params_total == 844_600


def test_sharing_of_keys_and_values_is_read_from_the_configuration() -> None:
    assert not build_model(HYBRID).shares_kv
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("this transformers has no Gemma 4")
    spec = hf_spec(
        model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], num_kv_shared_layers=1, vocab_size=1024,
        layer_types=["full_attention"] * 3, hidden_size_per_layer_input=8, vocab_size_per_layer_input=1024,
        global_head_dim=16,
    )  # fmt: skip
    model = build_model(spec)
    assert model.shares_kv
    run = run_on(spec, ckpt="full")
    report = compare(run, torch.device("cpu"))
    assert report.same, report.differences
    assert "share keys and values" in build_step(run, torch.device("cpu")).note


# What cannot be is said


def test_without_transformers_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MemplanError, match=r"pip install 'memplan\[hf\]'"):
        build_model(HYBRID)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (GEMMA2, "--attention eager"),
        (hf_spec(model_type="nonsense", architectures=["X"]), "no model of the type 'nonsense'"),
        (hf_spec(model_type="llama", architectures=["Nonsense"]), "has no Nonsense"),
        (hf_spec(model_type="llama"), "has no None"),
        (hf_spec(model_type="granite", architectures=["GraniteForCausalLM"], logits_scaling=8.0), "logits_scaling"),
    ],
)
def test_what_cannot_be_built_is_said(spec: ModelSpec, text: str) -> None:
    with pytest.raises(MemplanError, match=text):
        build_model(spec)
