"""Is the variant the plain step? The same weights, batch and random numbers through both; loss, every gradient, buffers
and caches compared, and inside the variant every recomputed tensor with its original."""

import dataclasses
import math

import torch
from torch import Tensor

from memplan.record.parity import ParityReport, TensorDifference
from memplan.spec.run import RunSpec
from memplan.spec.rung import Rung
from memplan.step.builder import TrainStep, build_step
from memplan.step.observe import observe
from memplan.step.outcome import is_state, outcome, twin
from memplan.step.results import same_bits

SUM_ORDER_TOLERANCE = {"fp32": 2e-5, "bf16": 2**-7, "fp16": 2**-10}
"""Largest difference between two orders of one sum, over the sum's largest part, by the dtype of its parts.

A sum of n fp32 terms moves by some 1e-7 * sqrt(n); gradients of embeddings add at most a few thousand. bf16 keeps 8
bits: one rounding, up to 2**-8, of each of two chunks' parts; fp16 keeps 11. Longer sums err by more, and by how much
is the kernel's affair (torch's CPU layer norm adds its bias's gradient row by row in bf16, and is off by a tenth after
some hundred rows), so there `ROUNDINGS` times the plain step's own distance from fp32 comes on top.
"""
ROUNDINGS = 3
"""The plain step's distance from fp32, and the variant's, which the luck of its order may make twice as large. For
compiled code likewise: the decays of a recurrent layer have gradients that are sums of large parts that cancel; a last
bit moves them by 6e-4 of themselves, and compiling them by 9e-4 (tiny-hybrid, torch 2.13)."""
NUDGES = 2
"""Draws of last bits that are tried."""


def plain(run: RunSpec) -> RunSpec:
    """`run` with no lever pulled: one chunk, no checkpointing, the loss whole, nothing compiled. With dropout its
    chunks stay, for each draws a mask of its own."""
    chunks = run.step.chunks if run.step.dropout > 0 else 1
    return dataclasses.replace(
        run, step=dataclasses.replace(run.step, chunks=chunks, ckpt="none", loss="full", compile="off")
    )


def compare(run: RunSpec, device: torch.device, seed: int = 0) -> ParityReport:
    """`run` against the plain step from the same state, bitwise when both add in the same order, and what it recomputes
    against its originals, always bitwise."""
    return compare_steps(build_step(plain(run), device, seed), build_step(run, device, seed))


def compare_steps(reference: TrainStep, variant: TrainStep) -> ParityReport:
    """The report on two steps that were built from the same seed."""
    step = variant.run.step
    why = other_order(reference.run, variant.run)
    tolerance = SUM_ORDER_TOLERANCE[step.computed] if why else 0.0
    expected = outcome(reference)
    seen = observe(variant)
    found = seen.outcome
    own = roundings(reference, expected, compiled=step.compile == "on") if why else {}
    differences = []
    for name, value in expected.items() if found else ():
        other = found.get(name)
        if is_state(name) and other is not None and other.shape == value.shape and same_bits(value, other):
            continue
        difference = tensor_difference(name, value, other, largest_of(name, expected))
        allowed = tolerance + ROUNDINGS * own.get(name, 0.0)
        if not difference.max_rel <= allowed or math.isinf(difference.max_rel):
            differences.append(difference)
    extra = [tensor_difference(name, value, None, 0.0) for name, value in found.items() if name not in expected]
    held = held_fixed(reference.run, variant.run)
    return ParityReport(
        variant=variant_name(variant.run),
        tolerance=tolerance,
        why=(why or "same order of sums: bitwise") + (f"; {held}" if held else ""),
        num_tensors=len(expected.keys() | found.keys()),
        differences=tuple(sorted(differences + extra, key=lambda difference: -difference.max_rel)),
        num_recomputed=seen.num_recomputed,
        recomputed=seen.recomputed,
        mutations=seen.mutations,
        faults=seen.faults,
        num_entered=seen.num_entered,
        num_runs=seen.num_runs,
        note=seen.note,
    )


def other_order(reference: RunSpec, variant: RunSpec) -> str:
    """Why the two steps add in different orders, or empty where they do not."""
    causes = [] if variant.step.chunks == reference.step.chunks else ["chunks"]
    causes += [] if variant.step.loss_kind == "full" else [f"the loss {variant.step.loss_kind}"]
    causes += [] if variant.step.compile == "off" else ["compiled code"]
    if not causes:
        return ""
    return f"another order of {variant.step.precision} sums by {' and '.join(causes)}"


def held_fixed(reference: RunSpec, variant: RunSpec) -> str:
    """What is held fixed for the sake of dropout, in words, or empty."""
    if variant.step.dropout == 0:
        return ""
    parts = [f"{reference.step.chunks} chunks in both"] if reference.step.chunks > 1 else []
    parts += ["compiled code draws as eager code"] if variant.step.compile == "on" else []
    return " and ".join(parts) + ", for the same dropout" if parts else ""


def roundings(reference: TrainStep, expected: dict[str, Tensor], *, compiled: bool = False) -> dict[str, float]:
    """How far rounding moves each of `reference`'s tensors, as `max_rel`.

    Of a step in low precision, how far it is from the same step in fp32; of one in fp32 whose variant is `compiled`,
    how far it goes when the last bit of every weight is another, for compiled code rounds every op in its own way; of
    other fp32 steps nothing.
    """
    if reference.run.step.precision != "fp32":
        others = [outcome(twin(reference, precision="fp32"))]
    elif compiled:
        others = [outcome(nudged(reference, seed)) for seed in range(NUDGES)]
    else:
        return {}
    return {
        name: max(tensor_difference(name, value, other[name], largest_of(name, expected)).max_rel for other in others)
        for name, value in expected.items()
    }


def nudged(step: TrainStep, seed: int) -> TrainStep:
    """A twin of `step` in which the last bit of every fp32 weight is moved up or down, as `seed` draws."""
    other = twin(step)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter)
            parameter.mul_(1 + (2 * up - 1) * torch.finfo(torch.float32).eps)
    return other


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
