"""The largest moment of every phase: static memory, kept activations, gradients so far, and what stands on top.

Letters as in `activations`. A step of C chunks is judged by its last chunk, when every gradient exists already.
"""

from collections.abc import Iterator

from memplan.estimate import activations, overhead, states
from memplan.estimate.logits import LossCost, loss_cost
from memplan.estimate.parts import Part, Stage, Widths
from memplan.record.memory import PHASES, Estimate, MemoryBreakdown, PhasePeak
from memplan.spec.run import RunSpec


def estimate(run: RunSpec) -> Estimate:
    """What the formulas say about `run`."""
    static = MemoryBreakdown(
        params=states.param_bytes(run),
        buffers=states.buffer_bytes(run),
        optimizer=states.optimizer_bytes(run),
        other=overhead.batch_bytes(run),
    )
    best: dict[str, tuple[int, str, MemoryBreakdown]] = {}
    for phase, moment, grads, kept, logits, temps in moments(run):
        total = grads + kept + logits + temps
        if phase not in best or total > best[phase][0]:
            at = MemoryBreakdown(
                params=static.params,
                buffers=static.buffers,
                optimizer=static.optimizer,
                other=static.other,
                grads=grads,
                activations=kept,
                logits=logits,
                temps=temps,
            )
            best[phase] = (total, moment, at)
    phases = (
        PhasePeak(phase=phase, moment=best[phase][1], breakdown=best[phase][2]) for phase in PHASES if phase in best
    )
    return Estimate(
        run=run,
        params_total=states.count_total(run.model),
        params_trainable=states.count_trainable(run.model),
        params_embedding=states.count_embedding(run.model),
        static=static,
        phases=tuple(phases),
        per_sample_bytes=kept_per_sample(run),
        logits_per_sample_bytes=loss_of(run, samples=1).saved,
    )


Moment = tuple[str, str, int, int, int, int]
"""Phase, name, and bytes of gradients, kept activations, logits and temporaries."""


def moments(run: RunSpec) -> Iterator[Moment]:
    """Every moment of one chunk that can be a phase's largest, in the order of a step."""
    widths = Widths.of(run)
    step = run.step
    samples = step.micro_batch
    spec = run.model.decoder
    accumulated = step.chunks > 1
    all_grads = states.grad_bytes(run)
    grads = all_grads if accumulated else 0
    blocks = decoder_stages(run, samples)
    loss = loss_of(run, samples)
    kept = overhead.surroundings_bytes(run)
    stream = widths.residual * samples * step.seq * spec.hidden

    cached = 0  # autocast keeps the copies of recomputed blocks' weights until it is left
    yield "forward", "embedding", grads, kept, 0, stream + overhead.table_bytes(run)
    for index, (stage, recomputed) in enumerate(blocks):
        top = stage.unkept_forward if recomputed else stage.forward
        yield "forward", f"block {index}", grads, kept + cached, 0, top
        cached += stage.casts if recomputed else 0
        kept += stage.entry if recomputed else stage.saved + stage.casts
    final = activations.norm("norm", samples * step.seq, spec, widths, step.norm)
    yield "forward", "final norm", grads, kept, 0, stream + final.forward
    kept += final.saved + loss.hidden
    copy = stream if widths.mixed and step.loss_kind != "chunked-ckpt" else 0
    yield "loss", "cross-entropy", grads, kept + loss.cached + cached, loss.forward, copy

    yield "backward", "loss", grads, kept + loss.casts, loss.loss, 0
    yield "backward", "head", grads, kept, loss.head, 0
    kept -= loss.hidden
    head, pending = head_grads(run)
    if not accumulated:
        grads += head
    yield "backward", "final norm", grads, kept, 0, pending + stream + final.backward
    kept -= final.saved
    if not accumulated:
        grads += final.grads
    for index, (stage, recomputed) in reversed(list(enumerate(blocks))):
        kept -= 0 if recomputed else stage.saved + stage.casts
        left, made, temps = stage.backward(accumulated=accumulated)
        shared = stage.entry if recomputed and stage.entry_saved else 0
        if recomputed:
            again = stage.saved + stage.casts - shared
            yield "recompute", f"block {index}", grads, kept + again, 0, pending + stage.carried + stage.held
        yield "backward", f"block {index}", grads + made, kept + left - shared, 0, pending + temps
        kept -= stage.entry if recomputed else 0
        if not accumulated:
            grads += stage.grads
    dense = overhead.embedding_grad_bytes(run)
    yield "backward", "embedding", grads, kept, 0, pending + stream + dense
    yield "optimizer", step.optimizer, all_grads, 0, 0, states.optimizer_temps_bytes(run)


def decoder_stages(run: RunSpec, samples: int) -> list[tuple[Stage, bool]]:
    """The decoder's blocks in forward order, each with whether it is recomputed in backward."""
    step = run.step
    stage = activations.decoder_block(
        samples, step.seq, run.model.decoder, Widths.of(run), kind=step.attention, norms=step.norm
    )
    every = step.ckpt_every
    return [(stage, every is not None and index % every == 0) for index in range(run.model.decoder.num_layers)]


def loss_of(run: RunSpec, samples: int) -> LossCost:
    """Head and loss over `samples` of one chunk."""
    spec, widths = run.model.decoder, Widths.of(run)
    trains = any(head_grads(run))
    return loss_cost(samples * run.step.seq, spec.hidden, spec.vocab, run.step, widths, trains=trains)


def head_grads(run: RunSpec) -> tuple[int, int]:
    """Bytes of the head's gradient that is kept from its backward on, and of the one that waits beside it.

    A tied head's gradient waits in the embedding's accumulator until the embedding's own arrives at the end of
    backward. Source: InputBuffer::accumulate, torch/csrc/autograd/input_buffer.cpp, torch 2.13.
    """
    groups = {group.name: group for group in states.param_groups(run.model)}
    matrix = groups["embedding"] if run.model.decoder.tied else groups["head"]
    if not matrix.trainable:
        return 0, 0
    num_bytes = states.rounded(matrix.numel * states.param_width(run), run.device.rules)
    return (0, num_bytes) if run.model.decoder.tied else (num_bytes, 0)


def kept_per_sample(run: RunSpec) -> int:
    """Bytes that one more sample keeps for backward outside head and loss."""
    widths = Widths.of(run)
    stages = decoder_stages(run, 1)
    spec = run.model.decoder
    final: Part = activations.norm("norm", run.step.seq, spec, widths, run.step.norm)
    blocks = sum(stage.entry if recomputed else stage.saved for stage, recomputed in stages)
    return blocks + final.saved + widths.compute * run.step.seq * spec.hidden
