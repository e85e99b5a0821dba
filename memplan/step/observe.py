"""What can be seen of a variant while it runs: what it comes to, who enters checkpointing, and what is recomputed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from memplan.models.decoder import Decoder
from memplan.models.generation import generate
from memplan.record.parity import Mutation, RecomputeDifference
from memplan.step.builder import TrainStep, no_mark
from memplan.step.outcome import buffers_kept, outcome, twin
from memplan.step.precision import autocast
from memplan.step.region import Region
from memplan.step.witness import Witness

NUM_GENERATED = 2
"""Tokens that are generated to see that generation is left alone: the first and one behind it go through a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A variant that ran once by itself and once under a witness."""

    outcome: dict[str, Tensor]
    """Loss, gradients, buffers, caches; empty where the step failed."""
    num_entered: int
    """Calls that entered checkpointing."""
    num_runs: int
    """Runs of checkpointed regions."""
    num_recomputed: int
    """Results compared with their originals."""
    recomputed: RecomputeDifference | None
    """The first that differs."""
    mutations: tuple[Mutation, ...]
    """What is written in place before a recomputation reads or writes it."""
    faults: tuple[str, ...]
    """What else is wrong, in words."""
    note: str
    """What was done instead, in words."""


def observe(variant: TrainStep) -> Seen:
    """Runs `variant`, and again under a witness. What happens in compiled code nobody sees: an eager twin stands in.

    An error of the recomputation is a fault, not an error, where torch says so itself or the witness knows why.
    """
    regions = [*variant.regions, variant.loss_region]
    before = num_entered(regions), num_runs(regions)
    error: RuntimeError | None = None
    found: dict[str, Tensor] = {}
    try:
        found = outcome(variant)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as raised:
        error = raised
    entered, runs = num_entered(regions) - before[0], num_runs(regions) - before[1]
    compiled = variant.run.step.compile == "on"
    watched = twin(variant, compile="off") if compiled else variant
    witness, error_watched = watch(watched)
    error = error or error_watched
    known = witness.first is not None or witness.mutations or isinstance(error, CheckpointError)
    if error is not None and not known:
        raise error
    if error is not None:
        faults = [f"torch stops: {one_line(error)}"]
    else:
        faults = idle(variant, entered, runs) + without_gradients(watched)
    notes = [variant.note] if variant.note else []
    notes += ["recomputed tensors are those of the eager step"] if compiled and entered else []
    return Seen(
        outcome=found,
        num_entered=entered,
        num_runs=runs,
        num_recomputed=witness.num_compared,
        recomputed=witness.first,
        mutations=witness.mutations,
        faults=tuple(faults),
        note="; ".join(notes),
    )


def watch(step: TrainStep) -> tuple[Witness, RuntimeError | None]:
    """A witness that has seen one accumulation of `step`, and the error that ended it, if one did."""
    witness, error = Witness(step.model), None
    regions = [*step.regions, step.loss_region]
    for region in regions:
        region.watch = witness
    try:
        with witness:
            outcome(step)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as raised:
        error = raised
    finally:
        for region in regions:
            region.watch = None
    return witness, error


def num_entered(regions: Sequence[Region]) -> int:
    """Calls of `regions` that entered checkpointing so far."""
    return sum(region.num_checkpointed for region in regions)


def num_runs(regions: Sequence[Region]) -> int:
    """Runs of `regions` so far, as far as Python sees them."""
    return sum(region.num_calls for region in regions)


def idle(step: TrainStep, entered: int, runs: int) -> list[str]:
    """Says so where `step` asks for checkpointing and nothing was recomputed."""
    asks = step.run.step.checkpointing.kind not in ("none", "offload")
    parts = list(step.regions) if asks else []
    parts += [step.loss_region] if step.run.step.loss_kind == "chunked-ckpt" else []
    seen = all(region.compiled is None for region in parts)
    if not (asks or parts) or (entered and (runs > entered or not seen)):
        return []
    return [
        f"checkpointing never engaged: {len(parts)} regions, {entered} calls entered it, {runs - entered} ran again"
    ]


def without_gradients(step: TrainStep) -> list[str]:
    """Says so where a forward without gradients enters checkpointing, or fails: in training, evaluation, generation."""
    regions = [*step.regions, step.loss_region]
    part = step.batch.chunk(0, step.run.step.chunks)
    decoder = getattr(step.model, "decoder", None)

    def generation() -> None:
        if isinstance(decoder, Decoder):
            generate(decoder, part.tokens[:, :1], NUM_GENERATED)

    def forward() -> None:
        step.chunk_loss(part, no_mark)

    faults = []
    for way, function in (("training", forward), ("evaluation", forward), ("generation", generation)):
        before = num_entered(regions)
        step.model.train(way == "training")
        try:
            with (
                torch.no_grad(),
                buffers_kept(step.model),
                autocast(step.run.step, part.tokens.device),
            ):
                function()
        except RuntimeError as error:
            faults.append(f"{way} without gradients fails: {one_line(error)}")
        if num_entered(regions) > before:
            faults.append(f"{way} without gradients enters checkpointing")
    step.model.train()
    return faults


def one_line(error: RuntimeError) -> str:
    """The first sentence of an error of torch, without the module that raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removeprefix("torch.utils.checkpoint: ") if lines else type(error).__name__
