"""Blocks that share keys and values, windows, and what a decoder's newer facts leave alone."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import run_of
from torch import Tensor

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.models.attention import rotate
from memplan.models.batch import synthetic_batch
from memplan.models.factory import LanguageModel, build_model
from memplan.models.registry import model_spec
from memplan.spec import DecoderSpec, RunSpec
from memplan.step.builder import build_step
from memplan.step.parity import compare

TINY = model_spec("tiny-gemma")


def changed(**changes: Any) -> LanguageModel:
    """The tiny Gemma with `changes`, every parameter random."""
    torch.manual_seed(0)
    model = build_model(dataclasses.replace(TINY, decoder=dataclasses.replace(TINY.decoder, **changes)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    assert isinstance(model, LanguageModel)
    return model


def test_who_shares_with_whom() -> None:
    spec = TINY.decoder
    assert [spec.slides(index) for index in range(5)] == [True, False, True, False, True]
    assert [spec.kv_source(index) for index in range(5)] == [None, None, None, 1, 2]
    assert [spec.leaves_kv(index) for index in range(5)] == [False, True, True, False, False]
    assert build_model(TINY).shares_kv
    assert not build_model(model_spec("tiny")).shares_kv
    blocks = build_model(TINY).decoder.blocks
    assert all(hasattr(blocks[index].attn, "k") == (index < 3) for index in range(5))


def test_a_kind_that_no_earlier_block_has_cannot_be_shared() -> None:
    with pytest.raises(MemplanError, match="Block 1 shares keys"):
        dataclasses.replace(TINY.decoder, kv_shared=4)


def test_a_sharing_block_reads_the_earlier_keys_and_values() -> None:
    """The last block by hand, of a two-block decoder that shares: its gradient reaches the first block's keys."""
    model = changed(num_layers=2, kv_shared=1, window=0)
    decoder = model.decoder
    x = torch.randn(2, 9, 128)
    found = decoder.trunk(x)
    gradients = torch.autograd.grad(found.square().sum(), [*decoder.blocks.parameters()])
    rope = decoder.rope_tables(x)
    first, last = decoder.blocks
    middle = first(x, rope, None)
    normed = first.attn_norm(x)
    shape = (-1, 32)
    k = rotate(first.attn.k_norm(first.attn.k(normed).unflatten(-1, shape)).transpose(1, 2), rope, False)
    v = first.attn.v(normed).unflatten(-1, shape).transpose(1, 2)

    def last_by_hand(hidden: Tensor) -> Tensor:
        q = last.attn.q_norm(last.attn.q(last.attn_norm(hidden)).unflatten(-1, shape)).transpose(1, 2)
        out = F.scaled_dot_product_attention(rotate(q, rope, False), k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + last.attn_out_norm(last.attn.out(out.transpose(1, 2).flatten(2)))
        return hidden + last.mlp_out_norm(last.mlp(last.mlp_norm(hidden)))

    expected = decoder.norm(last_by_hand(middle))
    torch.testing.assert_close(found, expected)
    by_hand = torch.autograd.grad(expected.square().sum(), [*decoder.blocks.parameters()])
    for one, other in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(one, other)


def test_the_store_is_empty_when_the_blocks_are_done() -> None:
    model = changed()
    batch = synthetic_batch(run_of("tiny-gemma"), "cpu", 0)
    seen = []
    model.decoder.blocks[-1].register_forward_hook(lambda *_: seen.append(sorted(model.decoder.kv_store)))
    model(batch)
    assert seen == [[1, 2]]
    assert model.decoder.kv_store == {}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_hides_what_is_older(attention: str) -> None:
    model = build_model(
        dataclasses.replace(TINY, decoder=dataclasses.replace(TINY.decoder, num_layers=1, kv_shared=0, window=4)),
        attention=attention,
    )
    x = torch.randn(1, 12, 128)
    before = model.decoder.trunk(x)
    x[0, 2] += 1.0
    same = (model.decoder.trunk(x) - before).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 2 + [False] * 4 + [True] * 6


@pytest.mark.parametrize("size", [1, 3])
def test_a_window_reaches_into_the_cache(size: int) -> None:
    decoder = build_model(TINY).decoder
    whole = decoder.causal_mask(torch.zeros(1, 40 + size, 8), 0, 32)
    tail = decoder.causal_mask(torch.zeros(1, size, 8), 40, 32)
    assert torch.equal(tail, whole[:, :, 40:])


@pytest.mark.parametrize(
    "levers",
    [
        {"ckpt": "full"},
        {"ckpt": "submodule"},
        {"chunks": 2},
        {"ckpt": "full", "precision": "bf16"},
        {"ckpt": "full", "norm": "fused", "attention": "eager"},
    ],
)
def test_levers_leave_the_step_as_it_is(levers: dict[str, object]) -> None:
    run = run_of("tiny-gemma", **levers)
    report = compare(run, torch.device("cpu"))
    assert report.same, report.differences
    assert report.num_tensors > 61


def test_unequal_blocks_are_all_traced_and_counted() -> None:
    answer = simulate(run_of("tiny-gemma", ckpt="full"))
    assert not answer.grown
    assert answer.params_total == 838_528


def test_checkpointing_falls_back_to_sub_modules() -> None:
    step = build_step(run_of("tiny-gemma", ckpt="full"), torch.device("cpu"))
    assert "share keys and values" in step.note
    assert not any(region.name.endswith(".attn") for region in step.regions)
    assert len(step.regions) == 5 * 5


def test_newer_facts_at_their_defaults_leave_a_run_as_it_was() -> None:
    run = run_of("tiny")
    assert run.run_id == "4df600572191"  # as before any of them was there
    old = run.to_dict()
    for name in [field.name for field in dataclasses.fields(DecoderSpec)]:
        if name in ("experts", "experts_per_token", "expert_ffn", "window", "full_every", "kv_shared", "head_softcap"):
            del old["model"]["decoder"][name]
    assert RunSpec.from_dict(old) == run
    decoder = dataclasses.replace(run.model.decoder, window=8)
    assert dataclasses.replace(run, model=dataclasses.replace(run.model, decoder=decoder)).run_id != run.run_id


def test_experts_need_their_numbers() -> None:
    with pytest.raises(MemplanError, match="8 experts go with"):
        dataclasses.replace(model_spec("tiny-moe").decoder, experts_per_token=0)
