"""Is the variant the plain step? The same weights and batch through both; loss and every gradient compared."""

import dataclasses
import math

import torch
from torch import Tensor

from memplan.record.parity import ParityReport, TensorDifference
from memplan.spec.run import RunSpec
from memplan.spec.rung import Rung
from memplan.step.builder import TrainStep, build_step

SUM_ORDER_TOLERANCE = {"fp32": 2e-5, "bf16": 2**-7, "bf16-mixed": 2**-7}
"""Largest difference between two orders of one sum, over the sum's largest part.

A sum of n fp32 terms moves by some 1e-7 * sqrt(n); gradients of embeddings add at most a few thousand. bf16 keeps 8
bits: one rounding, up to 2**-8, of each of two chunks' parts. Longer bf16 sums err by more, and by how much is the
kernel's affair (torch's CPU layer norm adds its bias's gradient row by row in bf16, and is off by a tenth after some
hundred rows), so there `ROUNDINGS` times the plain step's own distance from fp32 comes on top.
"""
ROUNDINGS = 3
"""The plain step's distance from fp32, and the variant's, which the luck of its order may make twice as large."""


def plain(run: RunSpec) -> RunSpec:
    """`run` with no lever pulled: one chunk, no checkpointing, the loss whole."""
    return dataclasses.replace(run, step=dataclasses.replace(run.step, chunks=1, ckpt="none", loss="full"))


def compare(run: RunSpec, device: torch.device, seed: int = 0) -> ParityReport:
    """Loss and gradients of `run` against those of the plain step: bitwise when both add in the same order."""
    return compare_steps(build_step(plain(run), device, seed), build_step(run, device, seed))


def compare_steps(reference: TrainStep, variant: TrainStep) -> ParityReport:
    """The report on two steps that were built from the same seed."""
    step = variant.run.step
    same_order = step.chunks == 1 and step.loss_kind == "full"
    tolerance = 0.0 if same_order else SUM_ORDER_TOLERANCE[step.precision]
    expected, found = outcome(reference), outcome(variant)
    own = {} if same_order else roundings(reference, expected)
    differences = []
    for name, value in expected.items():
        difference = tensor_difference(name, value, found.get(name), largest_of(name, expected))
        allowed = tolerance + ROUNDINGS * own.get(name, 0.0)
        if not difference.max_rel <= allowed or math.isinf(difference.max_rel):
            differences.append(difference)
    extra = [tensor_difference(name, value, None, 0.0) for name, value in found.items() if name not in expected]
    return ParityReport(
        variant=variant_name(variant.run),
        tolerance=tolerance,
        why="same order of sums: bitwise" if same_order else f"chunks change the order of {step.precision} sums",
        num_tensors=len(expected.keys() | found.keys()),
        differences=tuple(sorted(differences + extra, key=lambda difference: -difference.max_rel)),
    )


def outcome(step: TrainStep) -> dict[str, Tensor]:
    """Loss and gradients by name, after one accumulation from no gradients."""
    step.optimizer.zero_grad(set_to_none=True)
    loss = step.accumulate()
    grads = {name: param.grad for name, param in step.model.named_parameters() if param.grad is not None}
    return {"loss": loss} | grads


def roundings(reference: TrainStep, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each of `reference`'s tensors is from the same step in fp32, as `max_rel`; nothing for an fp32 step."""
    run = reference.run
    if run.step.precision == "fp32":
        return {}
    in_fp32 = dataclasses.replace(run, step=dataclasses.replace(run.step, precision="fp32"))
    model = build_step(in_fp32, reference.batch.tokens.device).model
    model.load_state_dict(reference.model.state_dict())
    exact = TrainStep(in_fp32, model, reference.batch)
    return {
        name: tensor_difference(name, expected[name], value, largest_of(name, expected)).max_rel
        for name, value in outcome(exact).items()
    }


def largest_of(name: str, tensors: dict[str, Tensor]) -> float:
    """Largest absolute value that differences of the tensor called `name` are held against.

    A bias is held against its layer's weight too. A key's bias shifts all scores of a query alike: without rotation its
    true gradient is zero, and what is computed is nothing but rounding.
    """
    weight = tensors.get(name.removesuffix("bias") + "weight") if name.endswith(".bias") else None
    return max(float(tensor.double().abs().max()) for tensor in (tensors[name], weight) if tensor is not None)


def tensor_difference(name: str, expected: Tensor, found: Tensor | None, largest: float) -> TensorDifference:
    """How far `found` is from `expected`, as a fraction of `largest` too; infinitely when it is missing, of another
    shape, or not a number."""
    shape = tuple(expected.shape)
    if found is None or found.shape != expected.shape:
        return TensorDifference(name=name, max_abs=float("inf"), max_rel=float("inf"), shape=shape)
    max_abs = float((expected.double() - found.double()).abs().max())
    if max_abs == 0.0:
        return TensorDifference(name=name, max_abs=0.0, max_rel=0.0, shape=shape)
    max_rel = max_abs / largest if largest > 0 and math.isfinite(max_abs) else float("inf")
    return TensorDifference(name=name, max_abs=max_abs, max_rel=max_rel, shape=shape)


def variant_name(run: RunSpec) -> str:
    """Rung of the variant with its loss: `B4c2@full chunked:2`."""
    step = run.step
    return f"{Rung(batch=step.batch, chunks=step.chunks, ckpt=step.ckpt)} {step.loss}"
