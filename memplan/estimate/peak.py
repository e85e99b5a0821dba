"""The largest moment of every phase: static memory, kept activations, gradients so far, and what stands on top.

Letters as in `activations`. A step of C chunks is judged by its last chunk, when every gradient exists already.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.errors import MemplanError
from memplan.estimate import activations, overhead, states
from memplan.estimate.covers import uncovered
from memplan.estimate.logits import LossCost, loss_cost
from memplan.estimate.parts import Stage, Widths
from memplan.estimate.vision import vision_cost
from memplan.record.memory import PHASES, Estimate, MemoryBreakdown, PhasePeak
from memplan.spec.run import RunSpec


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive at one moment beyond the static memory, bytes by category."""

    phase: str
    name: str
    grads: int
    kept: int
    logits: int = 0
    temps: int = 0

    @property
    def total(self) -> int:
        """Sum over the categories."""
        return self.grads + self.kept + self.logits + self.temps


def estimate(run: RunSpec) -> Estimate:
    """What the formulas say about `run`; MemplanError where they know nothing of a part of it."""
    if unknown := uncovered(run):
        raise MemplanError(f"estimate has no formulas for {unknown}.", "Type memplan trace, which runs the real step.")
    largest: dict[str, Moment] = {}
    for moment in moments(run):
        if moment.phase not in largest or moment.total > largest[moment.phase].total:
            largest[moment.phase] = moment
    static = overhead.static_memory(run)
    return Estimate(
        run=run,
        params_total=states.count_total(run.model),
        params_trainable=states.count_trainable(run.model),
        params_embedding=states.count_embedding(run.model),
        static=static,
        phases=tuple(phase_peak(largest[phase], static) for phase in PHASES if phase in largest),
        per_sample_bytes=kept_by(run, 2) - kept_by(run, 1),
        per_chunk_bytes=copies_bytes(run),
        logits_per_sample_bytes=loss_of(run, samples=1).saved,
    )


def phase_peak(moment: Moment, static: MemoryBreakdown) -> PhasePeak:
    """`moment` on top of the static memory."""
    return PhasePeak(
        phase=moment.phase,
        moment=moment.name,
        breakdown=MemoryBreakdown(
            params=static.params,
            buffers=static.buffers,
            optimizer=static.optimizer,
            other=static.other,
            grads=moment.grads,
            activations=moment.kept,
            logits=moment.logits,
            temps=moment.temps,
        ),
    )


def moments(run: RunSpec) -> Iterator[Moment]:
    """Every moment of one chunk that can be a phase's largest, in the order of a step."""
    step, spec, widths = run.step, run.model.decoder, Widths.of(run)
    samples = step.micro_batch
    stream = widths.residual * samples * step.seq * spec.hidden
    all_grads = states.grad_bytes(run)
    grads = all_grads if step.chunks > 1 else 0
    made = 0 if step.chunks > 1 else 1  # whether a gradient stays where it is made, or is added and dropped
    blocks, loss = decoder_stages(run, samples), loss_of(run, samples)
    final = activations.norm("norm", samples * step.seq, spec, widths, step.norm)
    head, pending = head_grads(run)

    kept = overhead.tables_bytes(run)
    passing = overhead.passing_bytes(run)
    cached = 0  # autocast keeps the copies of recomputed blocks' weights until it is left
    yield from images_forward(run, samples, grads, kept)
    kept += images_kept(run, samples)
    yield Moment("forward", "embedding", grads, kept, temps=stream + overhead.table_bytes(run))
    for index, (stage, recomputed) in enumerate(blocks):
        top = stage.unkept_forward if recomputed else stage.forward
        yield Moment("forward", f"block {index}", grads, kept + cached, temps=passing + top)
        cached += stage.casts if recomputed else 0
        kept += stage.entry if recomputed else stage.saved + stage.casts
    yield Moment("forward", "final norm", grads, kept + cached, temps=passing + final.forward)
    kept += final.saved
    copy = stream if widths.mixed and step.loss_kind != "chunked-ckpt" else 0
    yield Moment("loss", "cross-entropy", grads, kept + loss.hidden + loss.cached + cached, loss.forward, copy)

    kept += loss.kept_hidden
    yield Moment("backward", "loss", grads, kept + loss.casts, loss.loss - loss.casts)
    yield Moment("backward", "head", grads, kept, loss.head)
    kept -= loss.kept_hidden
    grads += made * head
    yield Moment("backward", "final norm", grads, kept, temps=pending + stream + final.backward)
    kept -= final.saved
    grads += made * final.grads
    for index, (stage, recomputed) in reversed(list(enumerate(blocks))):
        kept -= stage.entry if recomputed else stage.saved + stage.casts
        entry = stage.entry if recomputed and not stage.entry_saved else 0
        if recomputed:
            again = stage.saved + stage.casts + entry
            yield Moment("recompute", f"block {index}", grads, kept + again, temps=pending + stage.carried + stage.held)
        left, done, temps = stage.backward(accumulated=not made)
        yield Moment("backward", f"block {index}", grads + done, kept + left + entry, temps=pending + temps)
        grads += made * stage.grads
    kept -= overhead.tables_bytes(run)
    positions = states.grad_bytes(run, ("positions",))
    yield Moment("backward", "positions", grads, kept, temps=pending + stream + positions)
    grads += made * positions
    yield Moment("backward", "embedding", grads, kept, temps=stream + overhead.embedding_grad_bytes(run, pending))
    grads += made * states.grad_bytes(run, ("embedding", "extra"))
    yield from images_backward(run, samples, grads, kept, made)
    yield Moment("optimizer", step.optimizer, all_grads, 0, temps=states.optimizer_temps_bytes(run))


def images_forward(run: RunSpec, samples: int, grads: int, kept: int) -> Iterator[Moment]:
    """Moments of tower and connector, on top of `kept`."""
    images = vision_cost(run, samples)
    if images is None:
        return
    yield Moment("forward", "patches", grads, kept, temps=max(images.entry.forward, images.frozen_forward))
    kept += images.entry.saved + images.entry.casts
    for index, stage in enumerate(images.blocks):
        yield Moment("forward", f"vision block {index}", grads, kept, temps=stage.forward)
        kept += stage.saved + stage.casts
    yield Moment("forward", "connector", grads, kept, temps=images.features + images.connector.forward)


def images_kept(run: RunSpec, samples: int) -> int:
    """Bytes that tower and connector keep for backward."""
    images = vision_cost(run, samples)
    if images is None:
        return 0
    stages = (*images.blocks, images.connector)
    return images.entry.saved + images.entry.casts + sum(stage.saved + stage.casts for stage in stages)


def images_backward(run: RunSpec, samples: int, grads: int, kept: int, made: int) -> Iterator[Moment]:
    """Moments of connector and tower, whose tensors `kept` still holds, with `grads` made before them."""
    images = vision_cost(run, samples)
    if images is None:
        return
    stages = [*(("vision block", stage) for stage in images.blocks), ("connector", images.connector)]
    for index, (name, stage) in reversed(list(enumerate(stages))):
        kept -= stage.saved + stage.casts
        left, done, temps = stage.backward(accumulated=not made)
        name = name if name == "connector" else f"{name} {index}"
        yield Moment("backward", name, grads + done, kept + left, temps=temps + images.features)
        grads += made * stage.grads
    yield Moment("backward", "patches", grads, kept, temps=images.entry.backward)


def copies_bytes(run: RunSpec) -> int:
    """Bytes of autocast's low-precision copies of weights that one chunk keeps for backward, whatever its samples."""
    images = vision_cost(run, run.step.micro_batch)
    stages = [stage for stage, recomputed in decoder_stages(run, 1) if not recomputed]
    if images is not None:
        stages += [*images.blocks, images.connector]
    entry = images.entry.casts if images is not None else 0
    return sum(stage.casts for stage in stages) + entry + loss_of(run, run.step.micro_batch).casts


def decoder_stages(run: RunSpec, samples: int) -> list[tuple[Stage, bool]]:
    """The decoder's blocks in forward order, each with whether it is recomputed in backward."""
    step = run.step
    stage = activations.decoder_block(
        samples, step.seq, run.model.decoder, Widths.of(run), kind=step.attention, norms=step.norm
    )
    return [(stage, step.checkpointing.treats(index)) for index in range(run.model.decoder.num_layers)]


def loss_of(run: RunSpec, samples: int) -> LossCost:
    """Head and loss over `samples` of one chunk."""
    spec, trains = run.model.decoder, any(head_grads(run))
    return loss_cost(samples * run.step.seq, spec.hidden, spec.vocab, run.step, Widths.of(run), trains=trains)


def head_grads(run: RunSpec) -> tuple[int, int]:
    """Bytes of the head's gradient that is there from its backward on, and of one that waits instead.

    A tied head's gradient waits in the embedding's accumulator until the embedding's own arrives at the end of
    backward. Source: InputBuffer::accumulate, torch/csrc/autograd/input_buffer.cpp, torch 2.13.
    """
    groups = {group.name: group for group in states.param_groups(run.model)}
    matrix = groups["embedding"] if run.model.decoder.tied else groups["head"]
    if not matrix.trainable:
        return 0, 0
    num_bytes = states.rounded(matrix.numel * states.param_width(run), run.device.rules)
    return (0, num_bytes) if run.model.decoder.tied else (num_bytes, 0)


def kept_by(run: RunSpec, samples: int) -> int:
    """Bytes that `samples` of one chunk keep for backward, head and loss apart."""
    widths, spec = Widths.of(run), run.model.decoder
    blocks = sum(stage.entry if recomputed else stage.saved for stage, recomputed in decoder_stages(run, samples))
    final = activations.norm("norm", samples * run.step.seq, spec, widths, run.step.norm).saved
    return blocks + images_kept(run, samples) + final + loss_of(run, samples).kept_hidden
