"""Is the variant the plain step? The same weights and batch through both; loss and every gradient compared."""

import dataclasses

import torch
from torch import Tensor

from memplan.record.outcome import ParityReport, TensorDifference
from memplan.spec.run import RunSpec
from memplan.spec.rung import Rung
from memplan.step.builder import TrainStep, build_step

# A sum of n fp32 terms in another order differs by some 1e-7 * sqrt(n) of its largest part; gradients of embeddings
# add at most a few thousand. bf16 keeps 8 bits, so one rounding is 4e-3, and a chunk adds one more.
SUM_ORDER_TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "bf16-mixed": 3e-2}


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
    differences = []
    for name, value in expected.items():
        difference = tensor_difference(name, value, found.get(name))
        if not difference.max_rel <= tolerance:
            differences.append(difference)
    extra = [tensor_difference(name, value, None) for name, value in found.items() if name not in expected]
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


def tensor_difference(name: str, expected: Tensor, found: Tensor | None) -> TensorDifference:
    """How far `found` is from `expected`; infinitely when it is missing, of another shape, or not a number."""
    shape = tuple(expected.shape)
    if found is None or found.shape != expected.shape:
        return TensorDifference(name=name, max_abs=float("inf"), max_rel=float("inf"), shape=shape)
    max_abs = float((expected.double() - found.double()).abs().max())
    if max_abs == 0.0:
        return TensorDifference(name=name, max_abs=0.0, max_rel=0.0, shape=shape)
    scale = float(expected.double().abs().max())
    max_rel = max_abs / scale if scale and max_abs == max_abs else float("inf")
    return TensorDifference(name=name, max_abs=max_abs, max_rel=max_rel, shape=shape)


def variant_name(run: RunSpec) -> str:
    """Rung of the variant with its loss: `B4c2@full chunked:2`."""
    step = run.step
    return f"{Rung(batch=step.batch, chunks=step.chunks, ckpt=step.ckpt)} {step.loss}"
