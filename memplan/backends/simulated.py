"""A card that is not there: the real step on fake tensors under the card's rules, replayed through its allocator.

Of equal blocks only a few are traced; the others' stories follow from theirs, or else every block is traced.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from memplan.backends.listening import listened, on_host
from memplan.errors import MemplanError
from memplan.record.trace import TracedRun, TracedSteps, TraceReport
from memplan.spec.device import DeviceSpec
from memplan.spec.run import RunSpec
from memplan.step.sharding import fake_world
from memplan.trace.events import Sync, Trace, settle
from memplan.trace.frames import raised_at
from memplan.trace.growth import MIN_UNITS, Stack, grow
from memplan.trace.known import KnownValues
from memplan.trace.replay import Replay, alive_at, replay, report, timeline
from memplan.trace.tracing import Tracing, new_memory

BLOCKS = "decoder.blocks"
"""Path of the decoder's blocks in the models of `memplan.models`."""

COMPILED = "blocks are traced eagerly: an upper bound of the compiled step"


def simulate(run: RunSpec, *, grow_blocks: bool = True) -> TracedRun:
    """What `run` needs on its device, without it; with `grow_blocks` False every block is traced.

    A compiled step is traced eagerly, which is an upper bound: the answer's note says so.
    """
    if run.step.compile == "on":
        eager = dataclasses.replace(run, step=dataclasses.replace(run.step, compile="off"))
        return dataclasses.replace(simulate(eager, grow_blocks=grow_blocks), run=run, note=COMPILED)
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
    attention = attention_calls(trace, start)
    total, trainable = (count.of(run) for count in (story.params, story.trainable))
    return TracedRun(
        run=run,
        params_total=total,
        params_trainable=trainable,
        steps=two_steps(
            trace, run.device, trace.marks[0].at, start, story.num_syncs, attention, host_bytes=story.host_bytes
        ),
        grown=grown,
        note=story.note,
    )


def simulate_entry(make_step: Callable[[], Callable[[], object]], device: DeviceSpec) -> TracedSteps:
    """What a step of anybody's needs on `device`: `make_step` builds and returns it, and it is called twice."""
    with Tracing(device, frames=False) as tracing:
        try:
            step = make_step()
            if not callable(step):
                raise MemplanError(
                    f"make_step returned {type(step).__name__}, which cannot be called.", "Let it return the step."
                )
            tracing.reset_peak()
            first_start = len(tracing.trace.events)
            step()
            tracing.reset_peak()
            start, num_syncs = len(tracing.trace.events), len(tracing.trace.syncs)
            step()
        except MemplanError:
            raise
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0].rstrip(".")
            raise MemplanError(
                f"The step raised {type(error).__name__} at {raised_at(error)}: {first_line}.", advice_on(error)
            ) from error
    settle(tracing.trace)
    return two_steps(tracing.trace, device, first_start, start, num_syncs, attention_calls(tracing.trace, start))


def advice_on(error: Exception) -> str:
    """What to type instead, where the reason is plain."""
    if "cuda" in str(error).lower():
        return 'Leave .cuda() and device="cuda" out: inside a trace every tensor stands for one on the card.'
    return "It runs on fake CPU tensors; try it on real ones with a small model first."


def two_steps(
    trace: Trace,
    device: DeviceSpec,
    first_start: int,
    start: int,
    num_syncs: int,
    attention: dict[str, int],
    *,
    host_bytes: int = 0,
) -> TracedSteps:
    """The answer sheets of a settled trace whose two steps begin at `first_start` and `start`."""
    first = replay(trace, new_memory(device), start=first_start, stop=start)
    steady = replay(trace, new_memory(device), start=start)
    reports = (
        _report(first, device, trace.syncs[:num_syncs], attention, stop=start),
        _report(steady, device, trace.syncs[num_syncs:], attention),
    )
    first_step, later = (dataclasses.replace(found, host_bytes=host_bytes) for found in reports)
    return TracedSteps(
        device=device,
        first_step=first_step,
        steady=later,
        timeline=timeline(steady),
    )


def kept_per_sample(run: RunSpec) -> int:
    """Bytes that one more sample of a chunk keeps for backward: what is alive when the forward of two samples ends,
    less what is alive after that of one. Head and loss are part of it."""
    return alive_after_forward(run, 2) - alive_after_forward(run, 1)


def alive_after_forward(run: RunSpec, samples: int) -> int:
    """Bytes of activations, logits and what else a forward over `samples` leaves alive, every block counted."""
    asked = dataclasses.replace(run, step=dataclasses.replace(run.step, batch=samples, chunks=1, compile="off"))
    few = fewer_blocks(asked)
    tracing = Tracing(run.device, frames=False, guess_phases=False)
    with fake_world(run.step.world), tracing, known_values(few, tracing):
        step = listened(few, tracing)
        tracing.mark("forward")
        loss = step.chunk_loss(step.batch, tracing.mark)
        tracing.mark("end")
    del loss
    trace = tracing.trace
    if few is not asked:
        longer = grow(trace, stack_of(few, asked))
        if longer is None:
            raise MemplanError("The blocks do not repeat.", "Leave per-sample figures out.")
        trace = longer
    start = trace.marks[0].at
    alive = set(alive_at(replay(trace, new_memory(run.device)), len(trace.events) - 1))
    made = {event for event in trace.events[start:] if event >= 0}
    return sum(trace.allocs[index].num_bytes for index in alive & made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A traced run of two steps."""

    trace: Trace
    """What happened."""
    num_marks: int
    """Marks before the second step."""
    num_syncs: int
    """Syncs before the second step."""
    params: "Count"
    """All parameters."""
    trainable: "Count"
    """Those that train."""
    host_bytes: int = 0
    """Most that waited on the host at once."""
    note: str = ""
    """What the step does instead of what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Parameters of a model, whose blocks are equal where not all of them are traced."""

    traced: int
    """Of the model that was traced."""
    num_blocks: int
    """Its blocks."""
    a_block: int
    """Of its first block."""

    def of(self, run: RunSpec) -> int:
        """Parameters of the model that `run` asks for."""
        return self.traced + self.a_block * (run.model.decoder.num_layers - self.num_blocks)


def count(parameters: Iterable[tuple[str, nn.Parameter]], run: RunSpec) -> Count:
    """The count of the named parameters of `run`'s model; the first block speaks for those that are not traced."""
    sizes = [(name, parameter.numel()) for name, parameter in parameters]
    a_block = sum(size for name, size in sizes if name.startswith(f"{BLOCKS}.0."))
    return Count(traced=sum(size for _, size in sizes), num_blocks=run.model.decoder.num_layers, a_block=a_block)


def trace_steps(run: RunSpec) -> Story:
    """The story of building `run`'s step and taking it twice."""
    tracing = Tracing(run.device, frames=False, logits_width=run.model.decoder.vocab, guess_phases=False)
    with fake_world(run.step.world), tracing, known_values(run, tracing):
        step = listened(run, tracing)
        step(tracing.mark)
        marks, syncs = len(tracing.trace.marks), len(tracing.trace.syncs)
        step(tracing.mark)
    named = list(step.model.named_parameters())
    return Story(
        trace=tracing.trace,
        num_marks=marks,
        num_syncs=syncs,
        params=count(named, run),
        trainable=count([one for one in named if one[1].requires_grad], run),
        host_bytes=on_host(step),
        note=step.note,
    )


def known_values(run: RunSpec, tracing: Tracing) -> AbstractContextManager[object]:
    """Values beside fake tensors where a model of transformers picks rows by them."""
    return KnownValues(tracing.recorder) if run.model.impl == "hf" and run.step.images else nullcontext()


ATTENTION = re.compile(r"aten\._scaled_dot_product_(flash|efficient|cudnn|fused)\w*attention(?!.*backward)")
"""Ops of the attention kernels; the math path is known by its softmax."""


def attention_calls(trace: Trace, start: int) -> dict[str, int]:
    """Attention kernels met from event `start` on, with the number of calls, recomputed ones included."""
    calls: Counter[str] = Counter()
    for event in trace.events[start:]:
        alloc = trace.allocs[event] if event >= 0 else None
        if alloc is None or len(alloc.shape) != 4 or alloc.shape[-1] == 1:
            continue
        if match := ATTENTION.match(alloc.op):
            calls[match[1]] += 1
        elif alloc.op.startswith("aten._safe_softmax"):
            calls["math"] += 1
    return dict(calls)


def fewer_blocks(run: RunSpec) -> RunSpec:
    """`run` with just the blocks that show how they repeat; itself when it has no more.

    Clipping stacks the norms of all tensors in one, whose size depends on their number: no block tells it, so every
    block is traced. So it is where blocks are not equal, and where the host's share is asked for too.
    """
    unequal = run.model.impl != "memplan" or run.model.decoder.window > 0 or run.model.decoder.kv_shared > 0
    unequal = unequal or run.step.sharding.sharded
    if unequal or run.step.clip is not None or run.step.checkpointing.kind in ("first", "offload"):
        return run
    every = period_of(run)
    blocks = run.model.decoder.num_layers
    few = MIN_UNITS * every + blocks % every
    if few >= blocks:
        return run
    decoder = dataclasses.replace(run.model.decoder, num_layers=few)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, decoder=decoder))


def period_of(run: RunSpec) -> int:
    """Blocks after which the next are treated alike: K of `every:K`."""
    mode = run.step.checkpointing
    return mode.count or 1 if mode.kind == "every" else 1


def stack_of(few: RunSpec, run: RunSpec) -> Stack:
    """The stack of blocks in the trace of `few`, to be grown to that of `run`."""
    return Stack(
        path=BLOCKS,
        period=period_of(run),
        traced=few.model.decoder.num_layers,
        wanted=run.model.decoder.num_layers,
    )


def _report(
    found: Replay, device: DeviceSpec, syncs: list[Sync], attention: dict[str, int], *, stop: int | None = None
) -> TraceReport:
    """The answer sheet of a replay, with where the device's memory ends."""
    limited = None
    if device.usable_bytes is not None and found.peaks.reserved_bytes > device.usable_bytes:
        limited = replay(found.trace, new_memory(device, limited=True), start=found.start, stop=stop)
    return report(found, limited=limited, syncs=syncs, attention=attention)
