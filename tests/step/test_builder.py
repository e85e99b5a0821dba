"""The step trains: phases in order, gradients summed as one batch's, dtypes as the precision says, nothing left."""

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import run_of
from torch import Tensor, nn

from memplan.models.batch import IGNORED, Batch
from memplan.models.decoder import Decoder
from memplan.step import builder
from memplan.step.builder import TrainStep, build_step

CPU = torch.device("cpu")


def step_of(model: str = "tiny", seed: int = 0, **step: Any) -> TrainStep:
    return build_step(run_of(model, **{"batch": 4, "seq": 24} | step), CPU, seed)


def grads_of(step: TrainStep) -> dict[str, Tensor]:
    return {name: param.grad for name, param in step.model.named_parameters() if param.grad is not None}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all tensors, as a fraction of each one's largest value."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in expected.items())


# Training


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("model", ["tiny", "tiny-wide", "tiny-gpt2", "tiny-molmo2"])
def test_the_loss_starts_at_a_uniform_guess_and_falls(model: str, precision: str) -> None:
    """The same batch again and again is learnt by heart."""
    images = 1 if model == "tiny-molmo2" else 0
    step = step_of(model, precision=precision, images=images)
    vocab = step.model.decoder.spec.vocab
    losses = [step() for _ in range(5)]
    assert losses[0] == pytest.approx(math.log(vocab), abs=0.3)
    assert all(math.isfinite(loss) for loss in losses)
    assert sorted(losses, reverse=True) == losses
    assert losses[-1] < losses[0] - 0.05


def test_the_loss_is_the_mean_over_the_targets() -> None:
    step = step_of("tiny-molmo2", images=1, chunks=2)
    with torch.no_grad():
        logits = step.model.decoder.logits(step.model(step.batch))
    expected = F.cross_entropy(logits.flatten(0, 1), step.batch.labels.flatten(), ignore_index=IGNORED)
    assert step.num_targets == 4 * (24 - 8) < step.batch.labels.numel()
    assert step() == pytest.approx(expected.item(), rel=1e-5)


def test_the_same_seed_gives_the_same_step_and_another_seed_another() -> None:
    assert step_of()() == step_of()()
    assert step_of()() != step_of(seed=1)()


def test_building_leaves_the_default_dtype_alone_even_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    step_of(precision="bf16")
    assert torch.get_default_dtype() == torch.float32

    def fail(*args: Any, **options: Any) -> nn.Module:
        assert torch.get_default_dtype() == torch.bfloat16
        raise MemoryError

    monkeypatch.setattr(builder, "build_model", fail)
    with pytest.raises(MemoryError):
        step_of(precision="bf16")
    assert torch.get_default_dtype() == torch.float32


def test_the_decoder_is_found_wherever_it_is() -> None:
    for model in ("tiny", "tiny-molmo2"):
        assert isinstance(step_of(model).model.decoder, Decoder)


# Phases


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_phases_are_heard_in_order(chunks: int) -> None:
    heard: list[str] = []
    step_of(chunks=chunks)(heard.append)
    assert heard == ["forward", "loss", "backward"] * chunks + ["optimizer"]


def test_a_phase_is_heard_before_its_work_is_done() -> None:
    """At `backward` there is no gradient yet, at `optimizer` all are there and no weight has moved."""
    step = step_of()
    weights = [param.detach().clone() for param in step.model.parameters()]
    seen: dict[str, int] = {}
    moved: list[bool] = []

    def listen(phase: str) -> None:
        seen[phase] = len(grads_of(step))
        moved.append(any(not torch.equal(*pair) for pair in zip(weights, step.model.parameters(), strict=True)))

    step(listen)
    assert seen == {"forward": 0, "loss": 0, "backward": 0, "optimizer": len(weights)}
    assert not any(moved)


def test_gradients_are_released_at_the_end() -> None:
    step = step_of(chunks=2)
    step.accumulate()
    assert grads_of(step)
    step.optimizer.zero_grad(set_to_none=True)
    step()
    assert not grads_of(step)


def test_a_chunks_graph_is_gone_before_the_next_ones_forward() -> None:
    """Hidden states of one chunk that outlived it would double the peak that chunks are there to lower."""
    step = step_of(chunks=2)
    alive: list[int] = []
    outputs: list[weakref.ref[Tensor]] = []
    step.model.decoder.norm.register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(out)))

    def listen(phase: str) -> None:
        if phase in ("forward", "optimizer"):
            alive.append(sum(output() is not None for output in outputs))

    step(listen)
    assert len(outputs) == 2
    assert alive == [0, 0, 0]


# Chunks


def with_labels(step: TrainStep, change: Callable[[Tensor], None]) -> TrainStep:
    """`step` on a batch whose labels `change` has edited."""
    labels = step.batch.labels.clone()
    change(labels)
    return TrainStep(step.run, step.model, dataclasses.replace(step.batch, labels=labels))


def uneven(labels: Tensor) -> None:
    """Leaves the first chunk of two 2 targets, the second 40."""
    labels[0, :] = IGNORED
    labels[1, 2:] = IGNORED
    labels[3, ::3] = IGNORED


@pytest.mark.parametrize("loss", ["full", "chunked:3", "chunked-ckpt:3"])
@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_with_unequal_numbers_of_targets_give_the_whole_batchs_gradients(chunks: int, loss: str) -> None:
    whole, parts = with_labels(step_of(), uneven), with_labels(step_of(chunks=chunks, loss=loss), uneven)
    assert whole.num_targets == 2 + 24 + 16
    assert parts.accumulate().item() == pytest.approx(whole.accumulate().item(), rel=1e-6)
    assert largest_difference(grads_of(parts), grads_of(whole)) < 2e-5


def test_each_chunks_own_mean_would_give_other_gradients() -> None:
    """The check above can fail: with unequal numbers of targets the mean of means is not the mean."""
    whole, parts = with_labels(step_of(), uneven), with_labels(step_of(chunks=2), uneven)
    original = parts.chunk_loss

    def own_mean(part: Batch, mark: Callable[[str], None]) -> Tensor:
        targets = int((part.labels != IGNORED).sum())
        return original(part, mark) * parts.num_targets / targets / 2

    parts.chunk_loss = own_mean  # type: ignore[method-assign]
    whole.accumulate()
    parts.accumulate()
    assert largest_difference(grads_of(parts), grads_of(whole)) > 0.1


def test_a_chunk_without_any_target_adds_nothing() -> None:
    def none_in_first(labels: Tensor) -> None:
        labels[:2] = IGNORED

    whole, parts = with_labels(step_of(), none_in_first), with_labels(step_of(chunks=2), none_in_first)
    assert parts.accumulate().item() == pytest.approx(whole.accumulate().item(), rel=1e-6)
    assert largest_difference(grads_of(parts), grads_of(whole)) < 2e-5


# Clipping


def norm_at_the_optimizer(step: TrainStep) -> float:
    """Total gradient norm as the optimizer finds it."""
    norms: list[float] = []
    step.optimizer.register_step_pre_hook(lambda *_: norms.append(total_norm(step.model)))
    step()
    return norms[0]


def total_norm(model: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


def test_clipping_bounds_the_gradients_and_keeps_their_direction() -> None:
    free = norm_at_the_optimizer(step_of())
    assert free > 0.5
    assert norm_at_the_optimizer(step_of(clip=0.5)) == pytest.approx(0.5, rel=1e-4)
    assert norm_at_the_optimizer(step_of(clip=0.5, chunks=2)) == pytest.approx(0.5, rel=1e-4)
    assert norm_at_the_optimizer(step_of(clip=2 * free)) == pytest.approx(free, rel=1e-6)


def test_clipping_takes_the_norm_of_all_chunks_together() -> None:
    one, parts = step_of("tiny", clip=0.5, optimizer="sgd"), step_of("tiny", clip=0.5, optimizer="sgd", chunks=4)
    before = [param.detach().clone() for param in one.model.parameters()]
    one()
    parts()
    for param, other, start in zip(one.model.parameters(), parts.model.parameters(), before, strict=True):
        torch.testing.assert_close(param - start, other - start, rtol=0, atol=1e-7)


# Precision


def dtypes(tensors: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}


@pytest.mark.parametrize(
    ("precision", "stored", "computed"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("fp16", torch.float16, torch.float16),
        ("fp16-mixed", torch.float32, torch.float16),
    ],
)
@pytest.mark.parametrize("model", ["tiny", "tiny-gpt2", "tiny-molmo2"])
def test_precision_says_what_is_stored_and_what_is_computed(
    model: str, precision: str, stored: torch.dtype, computed: torch.dtype
) -> None:
    """A mixed precision keeps fp32 parameters, gradients and moments, and multiplies in the lower one."""
    step = step_of(model, precision=precision, images=1 if model == "tiny-molmo2" else 0)
    products: list[Tensor] = []
    for module in step.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, out: products.append(out))
    loss = step.accumulate()
    assert loss.dtype == torch.float32
    assert dtypes(products) == {computed}
    assert dtypes(step.model.parameters()) == {stored}
    assert dtypes(grads_of(step).values()) == {stored}
    step.optimizer.step()
    assert dtypes(state["exp_avg"] for state in step.optimizer.state.values()) == {stored}


def test_rotation_frequencies_stay_fp32_in_bf16() -> None:
    assert dtypes(step_of(precision="bf16").model.buffers()) == {torch.float32}


def test_autocast_does_not_leak_out_of_a_step() -> None:
    step_of(precision="bf16-mixed")()
    assert not torch.is_autocast_enabled("cpu")


# Levers reach the model


def test_attention_and_norm_reach_the_model() -> None:
    decoder = step_of("tiny", attention="eager", norm="fused").model.decoder
    assert decoder.attention == "eager"
    assert decoder.blocks[0].attn.kind == "eager"
    assert decoder.blocks[0].attn_norm.kind == decoder.norm.kind == "fused"
