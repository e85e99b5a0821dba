"""A card that is not there: the real step on fake tensors under the card's rules, replayed through its allocator.

Of equal blocks only a few are traced; the others' stories follow from theirs, or else every block is traced.
"""

import dataclasses
from dataclasses import dataclass

import torch

from memplan.record.trace import TraceReport
from memplan.spec.device import DeviceSpec
from memplan.spec.run import RunSpec
from memplan.step.builder import build_step
from memplan.trace.events import Trace, settle
from memplan.trace.growth import MIN_UNITS, Stack, grow
from memplan.trace.replay import replay, report
from memplan.trace.tracing import Tracing, new_memory

BLOCKS = "decoder.blocks"
"""Path of the decoder's blocks in the models of `memplan.models`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Two steps on an imagined card: the first, in which the optimizer makes its state, and one like all later ones."""

    first_step: TraceReport
    """The first step."""
    steady: TraceReport
    """Every later step."""
    trace: Trace
    """The story of both."""
    start: int
    """First event of the steady step."""
    grown: bool
    """Whether equal blocks were told from a few."""


def simulate(run: RunSpec, *, grow_blocks: bool = True) -> Simulation:
    """What `run` needs on its device, without it; with `grow_blocks` False every block is traced."""
    few = fewer_blocks(run) if grow_blocks else run
    story = trace_steps(few)
    trace = story.trace
    grown = few is not run
    if grown:
        longer = grow(trace, stack_of(few, run))
        if longer is None:
            return simulate(run, grow_blocks=False)
        trace = longer
    settle(trace)
    start = trace.marks[story.num_marks].at
    attention = {name: count * run.model.decoder.num_layers // few.model.decoder.num_layers
                 for name, count in story.attention.items()} if grown else story.attention  # fmt: skip
    first, steady = (
        _report(trace, run.device, start=at, sync_start=syncs, sync_end=end, attention=attention)
        for at, syncs, end in ((trace.marks[0].at, 0, story.num_syncs), (start, story.num_syncs, None))
    )
    return Simulation(first_step=first, steady=steady, trace=trace, start=start, grown=grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A traced run of two steps."""

    trace: Trace
    """What happened."""
    num_marks: int
    """Marks before the second step."""
    num_syncs: int
    """Syncs before the second step."""
    attention: dict[str, int]
    """Attention kernels chosen in the second step, with the number of calls."""


def trace_steps(run: RunSpec) -> Story:
    """The story of building `run`'s step and taking it twice."""
    tracing = Tracing(run.device, frames=False, logits_width=run.model.decoder.vocab, guess_phases=False)
    with tracing:
        step = build_step(run, torch.device("cpu"))
        tracing.recorder.claim_model(step.model)
        step(tracing.mark)
        marks, syncs, before = len(tracing.trace.marks), len(tracing.trace.syncs), tracing.attention
        step(tracing.mark)
    after = {name: count - before.get(name, 0) for name, count in tracing.attention.items()}
    return Story(trace=tracing.trace, num_marks=marks, num_syncs=syncs, attention=after)


def fewer_blocks(run: RunSpec) -> RunSpec:
    """`run` with just the blocks that show how they repeat; itself when it has no more."""
    every = run.step.ckpt_every or 1
    blocks = run.model.decoder.num_layers
    few = MIN_UNITS * every + blocks % every
    if few >= blocks:
        return run
    decoder = dataclasses.replace(run.model.decoder, num_layers=few)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, decoder=decoder))


def stack_of(few: RunSpec, run: RunSpec) -> Stack:
    """The stack of blocks in the trace of `few`, to be grown to that of `run`."""
    return Stack(
        path=BLOCKS,
        period=run.step.ckpt_every or 1,
        traced=few.model.decoder.num_layers,
        wanted=run.model.decoder.num_layers,
    )


def _report(
    trace: Trace, device: DeviceSpec, *, start: int, sync_start: int, sync_end: int | None, attention: dict[str, int]
) -> TraceReport:
    found = replay(trace, new_memory(device), start=start)
    limited = None
    if device.capacity_bytes is not None and found.peaks.reserved_bytes > device.capacity_bytes:
        limited = replay(trace, new_memory(device, limited=True), start=start)
    return report(found, limited=limited, syncs=trace.syncs[sync_start:sync_end], attention=attention)
