"""Every lever leaves the step's result alone, and a step whose result is not the plain one is found out and named."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from samples import run_of
from torch import Tensor

from memplan.models.batch import Batch
from memplan.models.decoder import Block
from memplan.record import ParityReport
from memplan.spec import RunSpec
from memplan.step.builder import Mark, TrainStep, build_step
from memplan.step.outcome import outcome
from memplan.step.parity import compare, compare_steps, largest_of, nudged, plain, roundings, tensor_difference

CPU = torch.device("cpu")
BUFFERS = 1
"""The rotary frequencies of `tiny`, which are compared too."""
LEVERS = [
    pytest.param(chunks, ckpt, loss, id=f"c{chunks}@{ckpt} {loss}")
    for ckpt, chunks, loss in itertools.product(
        ("none", "full", "every:2"), (1, 2), ("full", "chunked", "chunked-ckpt")
    )
    if (chunks, ckpt, loss) != (1, "none", "full")
]
LOW_LEVERS = [
    pytest.param(1, "full", "full", id="c1@full"),
    pytest.param(2, "every:2", "chunked-ckpt", id="c2@every:2 chunked-ckpt"),
]


def small_run(model: str, *, chunks: int = 1, ckpt: str = "none", loss: str = "full", **step: object) -> RunSpec:
    """A run of 50 rows; a chunked loss is made in 3 parts, which divide neither 50 rows nor the 25 of a chunk."""
    images = 2 if model == "tiny-molmo2" else 0
    loss = loss if loss == "full" else f"{loss}:3"
    return run_of(model, batch=2, seq=25, images=images, chunks=chunks, ckpt=ckpt, loss=loss, **step)


def assert_same(report: ParityReport) -> None:
    assert report.same, f"{report.variant}: {report.recomputed} {report.faults} {report.differences[:3]}"


@pytest.mark.parametrize(("chunks", "ckpt", "loss"), LEVERS)
@pytest.mark.parametrize("model", ["tiny", "tiny-wide", "tiny-gpt2", "tiny-molmo2"])
def test_every_lever_gives_the_plain_loss_and_gradients(model: str, chunks: int, ckpt: str, loss: str) -> None:
    report = compare(small_run(model, chunks=chunks, ckpt=ckpt, loss=loss), CPU)
    assert_same(report)
    assert (report.tolerance == 0.0) == (chunks == 1 and loss == "full")


@pytest.mark.parametrize(("chunks", "ckpt", "loss"), LOW_LEVERS)
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("model", ["tiny", "tiny-wide", "tiny-gpt2", "tiny-molmo2"])
def test_levers_hold_in_low_precision(model: str, precision: str, chunks: int, ckpt: str, loss: str) -> None:
    assert_same(compare(small_run(model, chunks=chunks, ckpt=ckpt, loss=loss, precision=precision), CPU))


@pytest.mark.parametrize(("attention", "norm"), [("eager", "eager"), ("sdpa", "fused")])
def test_levers_hold_for_the_other_attention_and_norm(attention: str, norm: str) -> None:
    assert_same(compare(small_run("tiny-wide", ckpt="full", attention=attention, norm=norm), CPU))
    assert_same(compare(small_run("tiny-wide", chunks=2, loss="chunked-ckpt", attention=attention, norm=norm), CPU))


def test_blocks_behind_a_frozen_embedding_train_when_checkpointed() -> None:
    """Their input carries no gradient; torch's reentrant checkpoint would leave the first block without any."""
    run = small_run("tiny-wide", ckpt="full")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, frozen=("embedding",)))
    report = compare(run, CPU)
    assert_same(report)
    assert report.num_tensors == len(list(build_step(run, CPU).model.parameters())) + BUFFERS


def test_loss_every_trainable_gradient_and_buffers_are_compared() -> None:
    for model in ("tiny", "tiny-molmo2"):
        run = small_run(model, ckpt="full")
        trainable = [param for param in build_step(run, CPU).model.parameters() if param.requires_grad]
        assert compare(run, CPU).num_tensors == 1 + len(trainable) + BUFFERS


def test_another_order_of_sums_is_not_bitwise() -> None:
    """Were chunks bitwise the plain step, their tolerance would hide nothing and should be zero."""
    run = small_run("tiny", chunks=2)
    expected, found = (outcome(build_step(one, CPU)) for one in (plain(run), run))
    assert any(not torch.equal(value, found[name]) for name, value in expected.items())


# Planted errors

Scaled = Callable[[Tensor, int], Tensor]


def scale_losses(step: TrainStep, scaled: Scaled) -> None:
    """Gives each chunk's loss and its index to `scaled`, and trains on what comes back."""
    original, index = step.chunk_loss, itertools.count()

    def chunk_loss(part: Batch, mark: Mark) -> Tensor:
        return scaled(original(part, mark), next(index))

    step.chunk_loss = chunk_loss  # type: ignore[method-assign]


def report_on(plant: Callable[[TrainStep], None], **levers: object) -> ParityReport:
    """The plain tiny step against a variant in which `plant` broke something."""
    run = small_run("tiny", **levers)  # type: ignore[arg-type]
    variant = build_step(run, CPU)
    plant(variant)
    return compare_steps(build_step(plain(run), CPU), variant)


def names(report: ParityReport) -> list[str]:
    return [difference.name for difference in report.differences]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_a_dropped_chunk_is_found_in_the_loss_and_in_every_gradient(precision: str) -> None:
    def drop_last(step: TrainStep) -> None:
        scale_losses(step, lambda loss, index: loss * (index == 0))

    report = report_on(drop_last, chunks=2, precision=precision)
    assert len(names(report)) == report.num_tensors - BUFFERS


def test_a_chunk_that_gives_its_loss_but_no_gradient_is_found_in_the_gradients_alone() -> None:
    def without_gradient(step: TrainStep) -> None:
        scale_losses(step, lambda loss, index: loss if index == 0 else loss.detach() + 0 * loss)

    report = report_on(without_gradient, chunks=2)
    assert len(names(report)) == report.num_tensors - 1 - BUFFERS
    assert "loss" not in names(report)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_chunk_scaled_by_its_own_targets_is_found(precision: str) -> None:
    """The classic: each chunk's mean instead of its share of the batch's mean, so that C chunks weigh C times."""

    def own_mean(step: TrainStep) -> None:
        scale_losses(step, lambda loss, index: loss * step.run.step.chunks)

    report = report_on(own_mean, chunks=2, precision=precision)
    assert len(names(report)) == report.num_tensors - BUFFERS
    assert report.differences[0].max_rel == pytest.approx(1.0, abs=0.05)


def test_one_chunk_scaled_by_a_thousandth_is_found() -> None:
    def slightly_off(step: TrainStep) -> None:
        scale_losses(step, lambda loss, index: loss * (1.001 if index else 1.0))

    assert "loss" in names(report_on(slightly_off, chunks=2))


def test_a_missing_gradient_is_named_first() -> None:
    def freeze(step: TrainStep) -> None:
        step.model.decoder.blocks[1].attn.k.weight.requires_grad_(False)

    report = report_on(freeze, ckpt="full")
    assert names(report) == ["decoder.blocks.1.attn.k.weight"]
    assert report.differences[0].max_rel == float("inf")


def test_a_gradient_that_the_plain_step_does_not_have_is_named() -> None:
    run = small_run("tiny-molmo2", ckpt="full")
    variant = build_step(run, CPU)
    variant.model.decoder.embedding.weight.requires_grad_(True)
    report = compare_steps(build_step(plain(run), CPU), variant)
    assert names(report) == ["decoder.embedding.weight"]


@pytest.mark.parametrize("levers", [{"ckpt": "full"}, {"chunks": 2}, {"chunks": 2, "precision": "bf16"}], ids=str)
def test_a_nan_is_found_at_every_tolerance(levers: dict[str, object]) -> None:
    def poison(step: TrainStep) -> None:
        weight = step.model.decoder.blocks[2].mlp.up.weight
        weight.register_hook(lambda grad: torch.where(torch.arange(grad.size(1)) == 5, float("nan"), grad))

    assert names(report_on(poison, **levers)) == ["decoder.blocks.2.mlp.up.weight"]


def test_a_nan_in_both_steps_is_no_agreement() -> None:
    """The plain step's distance from fp32 is infinite then, and must not widen what is allowed."""
    run = small_run("tiny", chunks=2, precision="bf16")
    steps = build_step(plain(run), CPU), build_step(run, CPU)
    for step in steps:
        step.model.decoder.norm.weight.register_hook(lambda grad: grad * float("nan"))
    assert names(compare_steps(*steps)) == ["decoder.norm.weight"]


def test_a_block_that_recomputes_with_another_weight_is_found() -> None:
    """What the recomputed block keeps for backward is wrong, so its own gradients and those before it are; the loss and
    what lies behind it are not."""

    def move_weight_before_backward(step: TrainStep) -> None:
        weight = step.model.decoder.blocks[2].mlp.up.weight

        def moved(loss: Tensor, index: int) -> Tensor:
            weight.data = weight.data * 1.01
            return loss

        scale_losses(step, moved)

    report = report_on(move_weight_before_backward, ckpt="full")
    found = set(names(report))
    assert "decoder.blocks.2.mlp.down.weight" in found
    assert "decoder.blocks.0.attn.q.weight" in found
    assert "loss" not in found
    assert "decoder.blocks.3.mlp.down.weight" not in found


def test_a_block_that_recomputes_other_activations_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through the block's own forward: its second run is not its first."""
    calls: dict[Block, int] = {}
    original = Block.forward

    def unsteady(self: Block, x: Tensor, *rest: Tensor | None) -> Tensor:
        calls[self] = calls.get(self, 0) + 1
        return original(self, x if calls[self] == 1 else x + 0.01, *rest)  # type: ignore[arg-type]

    run = small_run("tiny", ckpt="every:2")
    reference = build_step(plain(run), CPU)
    expected = compare_steps(reference, build_step(run, CPU))
    monkeypatch.setattr(Block, "forward", unsteady)
    report = compare_steps(reference, build_step(run, CPU))
    assert expected.same
    assert "decoder.blocks.2.attn.q.weight" in names(report)
    assert "decoder.blocks.3.attn.q.weight" not in names(report)


# How differences are measured


def test_the_largest_difference_stands_first() -> None:
    def freeze_and_scale(step: TrainStep) -> None:
        step.model.decoder.norm.weight.requires_grad_(False)
        step.model.decoder.blocks[0].attn.q.weight.register_hook(lambda grad: 3 * grad)
        step.model.decoder.blocks[0].attn.v.weight.register_hook(lambda grad: 2 * grad)

    report = report_on(freeze_and_scale, chunks=2)
    assert names(report) == ["decoder.norm.weight", "decoder.blocks.0.attn.q.weight", "decoder.blocks.0.attn.v.weight"]
    assert [round(one.max_rel, 3) for one in report.differences[1:]] == [2.0, 1.0]


def test_a_difference_is_a_fraction_of_the_largest_value() -> None:
    expected, found = torch.tensor([1.0, -4.0]), torch.tensor([1.5, -4.0])
    difference = tensor_difference("w", expected, found, 4.0)
    assert (difference.max_abs, difference.max_rel, difference.shape) == (0.5, 0.125, (2,))


@pytest.mark.parametrize("largest", [0.0, 1.0])
@pytest.mark.parametrize(
    "found", [None, torch.zeros(3), torch.tensor([1.0, float("nan")])], ids=["none", "shape", "nan"]
)
def test_no_tensor_another_shape_and_a_nan_are_infinitely_far(found: Tensor | None, largest: float) -> None:
    assert tensor_difference("w", torch.zeros(2), found, largest).max_rel == float("inf")


def test_anything_but_zero_is_infinitely_far_from_zero() -> None:
    assert tensor_difference("w", torch.zeros(2), torch.tensor([0.0, 1e-30]), 0.0).max_rel == float("inf")
    assert tensor_difference("w", torch.zeros(2), torch.zeros(2), 0.0).max_rel == 0.0


def test_only_a_bias_is_held_against_its_layers_weight() -> None:
    tensors = {"k.weight": torch.tensor([-3.0]), "k.bias": torch.tensor([1e-9]), "q.weight": torch.tensor([1e-9])}
    assert [largest_of(name, tensors) for name in tensors] == [3.0, pytest.approx(3.0), pytest.approx(1e-9)]
    assert largest_of("k.bias", {"k.bias": torch.tensor([2.0])}) == 2.0


def test_a_low_precision_step_is_measured_against_fp32_with_its_own_weights_and_batch() -> None:
    run = small_run("tiny", precision="bf16")
    step = build_step(run, CPU, seed=1)
    step.model.decoder.norm.weight.data *= -2
    found = roundings(step, outcome(step))
    assert found.keys() == outcome(step).keys()
    assert 0 < max(found.values()) < 0.05
    in_fp32 = build_step(dataclasses.replace(run, step=dataclasses.replace(run.step, precision="fp32")), CPU)
    assert roundings(in_fp32, outcome(in_fp32)) == {}


def test_what_a_last_bit_moves_is_allowed_to_compiled_code() -> None:
    step = build_step(small_run("tiny"), CPU)
    other, same = nudged(step, 0), nudged(step, 0)
    for name, weight in step.model.state_dict().items():
        moved = other.model.state_dict()[name]
        assert torch.equal(moved, same.model.state_dict()[name])
        assert torch.allclose(moved, weight, rtol=2**-22, atol=0)
    found = roundings(step, outcome(step), compiled=True)
    assert 0 < max(found.values()) < 1e-4
