"""Low-precision parameters with fp32 copies, scaled losses, updates in backward: what each changes, and what not."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from samples import run_of
from torch import Tensor

from memplan.errors import MemplanError
from memplan.spec.step import PRECISIONS, StepSpec
from memplan.step.builder import TrainStep, build_step
from memplan.step.outcome import outcome
from memplan.step.parity import compare
from memplan.step.precision import INITIAL_SCALE
from memplan.step.update import Update, UpdateInBackward

CPU = torch.device("cpu")
SAID = {
    "fp32": ("fp32", "fp32", False, False, False),
    "bf16": ("bf16", "bf16", False, False, False),
    "fp16": ("fp16", "fp16", False, False, True),
    "bf16-mixed": ("fp32", "bf16", True, False, False),
    "fp16-mixed": ("fp32", "fp16", True, False, True),
    "bf16-masters": ("bf16", "bf16", False, True, False),
    "fp16-masters": ("fp16", "fp16", False, True, True),
}
"""What is stored, what is computed, autocast, fp32 copies, a scaled loss."""
SCALED = [precision for precision, said in SAID.items() if said[-1]]


def step_of(**step: Any) -> TrainStep:
    return build_step(run_of("tiny", **({"batch": 2, "seq": 24} | step)), CPU)


def weights(step: TrainStep) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in step.model.named_parameters()}


def test_a_precisions_name_says_it_all() -> None:
    assert SAID.keys() == set(PRECISIONS)
    for precision, said in SAID.items():
        step = StepSpec(batch=1, seq=8, precision=precision)
        assert (step.stored, step.computed, step.autocasts, step.has_masters, step.scales_loss) == said


@pytest.mark.parametrize("precision", ["fp16", "fp16-mixed", "bf16-masters", "fp16-masters"])
def test_the_loss_falls(precision: str) -> None:
    step = step_of(precision=precision)
    losses = [step() for _ in range(4)]
    assert losses[0] == pytest.approx(math.log(step.model.decoder.spec.vocab), abs=0.3)
    assert sorted(losses, reverse=True) == losses
    assert losses[-1] < losses[0] - 0.05


# fp32 copies


@pytest.mark.parametrize("precision", ["bf16-masters", "fp16-masters"])
def test_copies_and_moments_are_fp32_and_parameters_are_the_copies_rounded(precision: str) -> None:
    step = step_of(precision=precision)
    step()
    step()
    pairs = step.update.copies()
    assert len(pairs) == len(list(step.model.parameters()))
    for param, copy in pairs:
        assert copy.dtype == step.optimizer.state[copy]["exp_avg"].dtype == torch.float32
        assert param.grad is None
        assert copy.grad is None
        assert torch.equal(param, copy.to(param.dtype))


def test_a_step_smaller_than_a_rounding_is_not_lost() -> None:
    """Half of what bf16 can tell just below 1 is 2e-3: a step of 1e-3 is lost, five of them are not."""
    plain, copied = step_of(precision="bf16"), step_of(precision="bf16-masters")
    for step in (plain, copied):
        step.optimizer.param_groups[0]["lr"] = 1e-3
        for _ in range(5):
            step()
    norm = "decoder.blocks.0.attn_norm.weight"
    assert torch.equal(weights(plain)[norm], torch.ones_like(weights(plain)[norm]))
    assert not torch.equal(weights(copied)[norm], torch.ones_like(weights(copied)[norm]))


def test_a_low_precision_gradient_is_freed_right_behind_its_cast() -> None:
    """Never two gradients of one parameter for all parameters at once: at each cast those before it are gone."""
    step = step_of(precision="bf16-masters")
    step.accumulate()
    assert isinstance(step.update, Update)
    masters = step.update.masters
    assert masters is not None
    masters.take_gradients()
    assert all(param.grad is None for param in masters.params)
    assert all(copy.grad is not None and copy.grad.dtype == torch.float32 for copy in masters.copies)


# A scaled loss


@pytest.mark.parametrize("precision", SCALED)
def test_gradients_are_scaled_until_the_step_and_the_loss_is_not(precision: str) -> None:
    step, plain = step_of(precision=precision), step_of(precision="fp32")
    assert step.accumulate().item() == pytest.approx(plain.accumulate().item(), rel=1e-3)
    for param, other in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        found = param.grad.float() / INITIAL_SCALE
        assert float((found - other.grad).abs().max() / other.grad.abs().max()) < 0.02
    assert outcome(step)["decoder.norm.weight"].abs().max() < 1


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "muon"])
@pytest.mark.parametrize("precision", SCALED)
def test_a_step_with_an_infinite_gradient_is_left_out_and_the_scale_halves(precision: str, optimizer: str) -> None:
    step = step_of(precision=precision, optimizer=optimizer)
    before = weights(step)
    step.accumulate()
    grad = next(step.model.parameters()).grad
    assert grad is not None
    grad[0, 0] = torch.inf
    step.update()  # type: ignore[operator]
    assert all(torch.equal(before[name], value) for name, value in weights(step).items())
    assert step.update.loss_scale == INITIAL_SCALE / 2
    step()
    assert not all(torch.equal(before[name], value) for name, value in weights(step).items())


@pytest.mark.parametrize("precision", SCALED)
def test_clipping_sees_gradients_without_the_scale(precision: str) -> None:
    step = step_of(precision=precision, clip=0.5)
    norms: list[float] = []

    def hear(*_: Any) -> None:
        grads = [param.grad for param in step.optimizer.param_groups[0]["params"]]
        norms.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in grads)))

    step.optimizer.register_step_pre_hook(hear)
    step()
    assert norms == [pytest.approx(0.5, rel=0.02)]


# Proof


@pytest.mark.parametrize("precision", ["fp16", "fp16-mixed", "bf16-masters", "fp16-masters"])
def test_a_checkpointed_step_is_the_plain_one(precision: str) -> None:
    bitwise = compare(run_of("tiny", batch=2, seq=16, precision=precision, ckpt="full"), CPU)
    assert bitwise.same
    assert bitwise.tolerance == 0
    chunked = compare(run_of("tiny", batch=2, seq=16, precision=precision, chunks=2, loss="chunked-ckpt:2"), CPU)
    assert chunked.same
    assert 0 < chunked.tolerance <= 2**-7


# An update in backward


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adafactor", "muon"])
@pytest.mark.parametrize("ckpt", ["none", "full"])
def test_updates_in_backward_come_to_the_same_weights(optimizer: str, ckpt: str) -> None:
    plain, early = (step_of(optimizer=optimizer, ckpt=ckpt, update=update) for update in ("step", "backward"))
    assert isinstance(early.update, UpdateInBackward)
    for _ in range(2):
        assert plain() == early()
    expected = weights(plain)
    for name, value in weights(early).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)


def test_each_gradient_is_freed_before_the_next_ones_are_there() -> None:
    step = step_of(update="backward")
    most = 0

    def count(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(param.grad is not None for param in step.model.parameters()))

    with step.update.listening():  # type: ignore[union-attr]
        for param in step.model.parameters():
            param.register_post_accumulate_grad_hook(count)
        step.accumulate()
    assert most == 0
    assert step.accumulate().isfinite()
    assert most == len(list(step.model.parameters()))


def test_an_update_in_backward_has_no_phase_of_its_own() -> None:
    heard: list[str] = []
    step_of(update="backward")(heard.append)
    assert heard == ["forward", "loss", "backward"]


@pytest.mark.parametrize(
    ("levers", "said"),
    [
        ({"clip": 1.0}, "Clipping needs the norm of all gradients"),
        ({"chunks": 2}, "no gradient to which 2 chunks could add"),
        ({"precision": "fp16-mixed"}, "With fp16-mixed a step is left out where any gradient overflows"),
        ({"precision": "fp16-masters"}, "learns too late"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(levers: dict[str, Any], said: str) -> None:
    with pytest.raises(MemplanError, match=said):
        run_of(update="backward", **levers)
    with pytest.raises(MemplanError, match=r"Unknown update 'forward'\. Did you mean"):
        run_of(update="forward")


def test_a_run_that_asks_for_none_of_this_keeps_its_identity() -> None:
    run = run_of()
    assert run.step.update == "step"
    facts = run.to_dict()
    assert (
        run.from_dict(facts | {"step": {k: v for k, v in facts["step"].items() if k != "update"}}).run_id == run.run_id
    )
    assert dataclasses.replace(run, step=dataclasses.replace(run.step, update="backward")).run_id != run.run_id
