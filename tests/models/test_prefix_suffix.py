"""A prefix encoded once into a live cache, a suffix that reads it: the same numbers as one sequence."""

import dataclasses

import pytest
import torch
from samples import asked
from torch import Tensor

from memplan.models.cache import KVCache
from memplan.models.generation import generate
from memplan.step.builder import TrainStep, build_step

CPU = torch.device("cpu")
PREFIX, SUFFIX = 24, 7


def built(model: str, ckpt: str = "none", chunks: int = 1, **step: object) -> TrainStep:
    values = {"seq": PREFIX, "suffix": SUFFIX, "workload": "prefix-suffix", "ckpt": ckpt, "precision": "fp32"} | step
    images = 1 if model == "tiny-molmo2" else 0
    return build_step(asked(model, f"B2c{chunks}", images=images, **values), CPU)


def grads(step: TrainStep) -> dict[str, Tensor]:
    step.accumulate()
    return {name: param.grad for name, param in step.model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("model", ["tiny", "tiny-wide", "tiny-gpt2"])
def test_prefix_and_suffix_are_one_sequence_in_two_parts(model: str) -> None:
    """The loss over the suffix, and every gradient, are those of the whole sequence whose prefix carries no label."""
    parts = built(model)
    whole = built(model)
    assert parts.batch.suffix is not None
    tokens = torch.cat((parts.batch.tokens, parts.batch.suffix), dim=1)
    labels = torch.cat((torch.full_like(parts.batch.tokens, -100), parts.batch.labels), dim=1)
    whole.batch = dataclasses.replace(parts.batch, tokens=tokens, labels=labels, suffix=None)
    expected, found = grads(whole), grads(parts)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=2e-5 * float(grad.abs().max()), msg=name)


def test_gradients_reach_the_prefix_through_the_cache() -> None:
    """The embedding of a token that stands in the prefix alone gets a gradient."""
    step = built("tiny")
    assert step.batch.suffix is not None
    behind = set(step.batch.suffix.flatten().tolist())
    only_prefix = [token for token in step.batch.tokens.flatten().tolist() if token not in behind]
    seen: list[KVCache] = []
    step.model.on_cache = seen.append
    hidden = step.model(step.batch)
    rows = torch.autograd.grad(hidden.square().sum(), step.model.decoder.embedding.weight)[0]  # no head in this graph
    assert all(float(rows[token].abs().max()) > 0 for token in only_prefix)
    (cache,) = seen
    assert cache.num_tokens == PREFIX + SUFFIX
    assert all(piece.grad_fn is not None for layer in cache.layers.values() for piece in (*layer.keys, *layer.values))


@pytest.mark.parametrize("ckpt", ["full", "every:2", "first:1", "submodule"])
@pytest.mark.parametrize("model", ["tiny", "tiny-molmo2"])
def test_a_checkpointed_block_appends_once(model: str, ckpt: str) -> None:
    """Cache contents, loss and every gradient are bitwise those of the plain step, in which each block runs once."""
    plain, variant = built(model), built(model, ckpt)
    caches: list[KVCache] = []
    for step in (plain, variant):
        step.model.on_cache = caches.append
    expected, found = grads(plain), grads(variant)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    first, second = caches
    assert second.layers.keys() == first.layers.keys()
    for index, layer in first.layers.items():
        other = second.layers[index]
        assert [piece.size(2) for piece in other.keys] == [PREFIX, SUFFIX]
        pairs = zip((*layer.keys, *layer.values), (*other.keys, *other.values), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    if ckpt == "full":
        # The last block's output over the prefix has no reader but its keys and values have: it runs again too.
        assert [region.num_calls for region in variant.regions] == [4] * len(variant.regions)


def test_generation_continues_the_sequence_and_enters_no_checkpoint() -> None:
    step = build_step(asked("tiny", "B2c1@full", seq=PREFIX, precision="fp32"), CPU)
    decoder, tokens = step.model.decoder, step.batch.tokens
    made = generate(decoder, tokens, 4)
    for _ in range(4):
        with torch.no_grad():
            following = decoder.logits(decoder.trunk(decoder.embed(tokens))[:, -1:]).argmax(-1)
        tokens = torch.cat((tokens, following), dim=1)
    assert torch.equal(made, tokens[:, PREFIX:])
    assert sum(region.num_checkpointed for region in step.regions) == 0
