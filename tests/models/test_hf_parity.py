"""The reference modules compute what transformers computes: same weights, same logits, same gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers_twin import Weights, hf_decoder, hf_molmo2, map_gpt2, map_llama, map_molmo2

from memplan.models.batch import Batch, synthetic_batch
from memplan.models.factory import build_model
from memplan.models.registry import model_spec
from memplan.spec import DecoderSpec, DeviceSpec, ModelSpec, RopeScaling, RunSpec, StepSpec

TOLERANCE = 1e-5
"""Largest difference over the largest value, fp32: the two sum in another order, over at most a few hundred terms."""

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)


def decoder_spec(**changes: Any) -> DecoderSpec:
    """A small decoder of Llama's kind, with `changes`."""
    small: dict[str, Any] = {
        "num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 101,
        "max_positions": 64, "norm_eps": 1e-5, "tied": False,
    }  # fmt: skip
    return DecoderSpec(**small | changes)


GEMMA: dict[str, Any] = {
    "num_layers": 3, "mlp": "geglu", "norm_offset": True, "sandwich": True, "scale_embedding": True, "window": 8,
    "full_every": 2, "tied": True,
}  # fmt: skip

DECODERS = {
    "llama": decoder_spec(),
    "llama-scaled": decoder_spec(rope_scaling=SCALING, tied=True),
    "qwen2": decoder_spec(qkv_bias=True, tied=True),
    "qwen3": decoder_spec(qk_norm=True, head_dim=24),
    "mistral": decoder_spec(num_kv_heads=4),
    "moe": decoder_spec(qk_norm=True, experts=6, experts_per_token=3, expert_ffn=40),
    "gemma2": decoder_spec(**GEMMA, head_softcap=5.0),
    "gemma3": decoder_spec(**GEMMA, qk_norm=True, head_dim=24, num_kv_heads=1),
    "gpt2": decoder_spec(
        num_kv_heads=4, norm="layer", norm_bias=True, positions="learned", mlp="gelu-tanh", qkv_bias=True,
        out_bias=True, mlp_bias=True, tied=True,
    ),
}  # fmt: skip


def model_of(name: str, decoder: DecoderSpec) -> ModelSpec:
    return ModelSpec(name=name, family=name.split("-")[0], decoder=decoder, seq=21, precision="fp32", source="a test")


def batch_for(spec: ModelSpec, seq: int = 21) -> Batch:
    step = StepSpec(batch=2, seq=seq, images=spec.images, workload="vlm" if spec.images else "lm")
    return synthetic_batch(RunSpec(model=spec, step=step, device=DeviceSpec(name="cpu", rules="cpu")), "cpu", 1)


# The comparison


def differences(
    ours: nn.Module, theirs: nn.Module, batch: Batch, convert: Callable[[Weights], Weights], **inputs: Tensor
) -> dict[str, float]:
    """Largest relative difference of the logits and of each gradient, after `theirs` gave `ours` its weights."""
    ours.load_state_dict(convert(dict(theirs.state_dict())))
    logits = ours.decoder.logits(ours(batch))
    expected = theirs(input_ids=batch.tokens, use_cache=False, **inputs).logits
    found = {"logits": relative(logits, expected, expected)}
    for one in (logits, expected):
        F.cross_entropy(one.flatten(0, 1), batch.labels.flatten()).backward()
    gradients = convert({name: grad_of(parameter) for name, parameter in theirs.named_parameters()})
    own = {name: grad_of(parameter) for name, parameter in ours.named_parameters()}
    assert own.keys() == gradients.keys()
    for name, gradient in own.items():
        # A key's bias shifts all scores of a query alike: without rotation its true gradient is zero and all there is
        # is rounding, so it is held against the gradient of the key's weights.
        scale = gradients[name.replace("bias", "weight")] if name.endswith(".k.bias") else gradients[name]
        found[name] = relative(gradient, gradients[name], scale)
    return found


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def relative(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    return ((found - expected).abs().max() / scale.abs().max()).item()


def compare(name: str, spec: DecoderSpec, attention: str = "sdpa", norm: str = "eager") -> dict[str, float]:
    model = model_of(name, spec)
    convert = map_gpt2 if name == "gpt2" else map_llama
    ours = build_model(model, attention=attention, norm=norm)
    return differences(ours, hf_decoder(name, spec), batch_for(model), lambda weights: convert(weights, spec))


def compare_molmo2(
    spec: ModelSpec, attention: str = "sdpa", norm: str = "eager", front: int = 0, hf_spec: ModelSpec | None = None
) -> dict[str, float]:
    """As `compare`, with the image tokens starting at position `front`."""
    batch, num_tokens = batch_for(spec, seq=32), spec.image_tokens(spec.images)
    batch = Batch(
        tokens=batch.tokens.roll(front, 1), labels=batch.labels.roll(front, 1), pixels=batch.pixels,
        pooled_idx=batch.pooled_idx, image_index=batch.image_index + front, image_mask=batch.image_mask.roll(front, 1),
    )  # fmt: skip
    num_patches = spec.images * spec.vision.num_patches
    offset = torch.arange(2)[:, None, None] * num_patches
    return differences(
        build_model(spec, attention=attention, norm=norm), hf_molmo2(hf_spec or spec), batch,
        lambda weights: map_molmo2(weights, spec),
        pixel_values=batch.pixels.flatten(0, 1),
        image_token_pooling=torch.where(batch.pooled_idx >= 0, batch.pooled_idx + offset, -1).flatten(0, 1),
        image_grids=torch.tensor([[num_tokens, 1, 0, 0]] * 2),
        mm_token_type_ids=batch.image_mask.long(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def molmo2() -> ModelSpec:
    """The tiny Molmo2 with everything trainable and a head of its own, as transformers has it."""
    spec = model_spec("tiny-molmo2")
    return dataclasses.replace(spec, decoder=dataclasses.replace(spec.decoder, tied=False), frozen=())


@pytest.mark.parametrize("norm", ["eager", "fused"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("projections", ["separate", "fused"])
@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt2"])
def test_decoder_equals_transformers(name: str, projections: Any, attention: str, norm: str) -> None:
    spec = dataclasses.replace(DECODERS[name], projections=projections)
    found = compare(name, spec, attention, norm)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("projections", ["separate", "fused"])
def test_gpt2_equals_transformers(projections: Any, attention: str) -> None:
    found = compare("gpt2", dataclasses.replace(DECODERS["gpt2"], projections=projections), attention)
    assert max(found.values()) < TOLERANCE, found


def test_dense_mask_and_fp32_rotation_change_nothing_in_fp32() -> None:
    spec = dataclasses.replace(DECODERS["qwen3"], mask="dense", rope_fp32=True)
    assert max(compare("qwen3", spec).values()) < TOLERANCE


@pytest.mark.parametrize("norm", ["eager", "fused"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("projections", ["separate", "fused"])
def test_molmo2_equals_transformers(molmo2: ModelSpec, projections: Any, attention: str, norm: str) -> None:
    spec = dataclasses.replace(molmo2, decoder=dataclasses.replace(molmo2.decoder, projections=projections))
    found = compare_molmo2(spec, attention, norm)
    assert max(found.values()) < TOLERANCE, found


def test_molmo2_image_tokens_may_stand_anywhere(molmo2: ModelSpec) -> None:
    assert max(compare_molmo2(molmo2, front=7).values()) < TOLERANCE


# Each check can fail


def swap(weights: Weights, one: str, other: str) -> Weights:
    return {name: weights[name.replace(one, other) if one in name else name.replace(other, one)] for name in weights}


@pytest.mark.parametrize("pair", [("attn.q", "attn.k"), ("mlp.gate", "mlp.up"), ("attn_norm", "mlp_norm")])
def test_swapped_weights_are_seen(monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]) -> None:
    right = map_llama
    monkeypatch.setitem(globals(), "map_llama", lambda weights, spec: swap(right(weights, spec), *pair))
    assert compare("mistral", DECODERS["mistral"])["logits"] > 100 * TOLERANCE


@pytest.mark.parametrize(
    "change",
    [{"window": 7}, {"full_every": 3}, {"norm_offset": False}, {"scale_embedding": False}, {"head_softcap": 6.0}],
)
def test_a_wrong_fact_of_gemmas_is_seen(change: dict[str, Any]) -> None:
    ours = build_model(model_of("gemma2", dataclasses.replace(DECODERS["gemma2"], **change)))
    theirs = hf_decoder("gemma2", DECODERS["gemma2"])
    batch = batch_for(model_of("gemma2", DECODERS["gemma2"]))
    found = differences(ours, theirs, batch, lambda weights: map_llama(weights, DECODERS["gemma2"]))
    assert found["logits"] > 10 * TOLERANCE


def test_experts_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # 42 tokens through 3 of 6 experts, as if each expert had been picked equally often
    monkeypatch.setattr(torch, "searchsorted", lambda found, numbers, **_: (numbers.int() + 1) * 21)
    assert compare("moe", DECODERS["moe"])["logits"] > 100 * TOLERANCE


@pytest.mark.parametrize("change", [{"rope_theta": 20000.0}, {"norm_eps": 1e-3}])
def test_a_wrong_constant_is_seen(change: dict[str, Any]) -> None:
    ours = build_model(model_of("llama", dataclasses.replace(DECODERS["llama"], **change)))
    theirs = hf_decoder("llama", DECODERS["llama"])
    batch = batch_for(model_of("llama", DECODERS["llama"]))
    found = differences(ours, theirs, batch, lambda weights: map_llama(weights, DECODERS["llama"]))
    assert found["logits"] > 10 * TOLERANCE


def test_layers_read_in_the_wrong_order_are_seen(molmo2: ModelSpec) -> None:
    wrong = dataclasses.replace(molmo2, vision=dataclasses.replace(molmo2.vision, layers_read=(1, 2)))
    assert compare_molmo2(wrong, hf_spec=molmo2)["logits"] > 100 * TOLERANCE


def test_a_causal_mask_over_the_image_is_seen(molmo2: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.models.molmo2.Molmo2.mask", lambda model, batch: None)
    assert compare_molmo2(molmo2)["logits"] > 100 * TOLERANCE
