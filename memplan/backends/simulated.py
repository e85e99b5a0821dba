"""A card that is not there: the real step on fake tensors under the card's rules, replayed through its allocator.

Of equal blocks only a few are traced; the others' stories follow from theirs, or else every block is traced.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from memplan.backends.fewer import Fewer, fewer_blocks
from memplan.backends.listening import listened, on_host
from memplan.backends.own_code import errors_told
from memplan.backends.stand_in import SizesOf, stand_in, with_sgd
from memplan.errors import MemplanError
from memplan.record.trace import TracedRun, TracedSteps, TraceReport
from memplan.spec.device import DeviceSpec
from memplan.spec.run import RunSpec
from memplan.step.sharding import fake_world
from memplan.trace.events import Alloc, Sync, Trace, settle
from memplan.trace.known import KnownValues
from memplan.trace.replay import Replay, alive_at, replay, report, timeline
from memplan.trace.tracing import Tracing, new_memory

COMPILED = "blocks are traced eagerly: an upper bound of the compiled step"


def simulate(run: RunSpec, *, grow_blocks: bool = True, sizes_of: SizesOf | None = None) -> TracedRun:
    """What `run` needs on its device, without it; with `grow_blocks` False every block is traced. Where `sizes_of` says
    what the optimizer keeps and makes, it is stood in for.

    A compiled step is traced eagerly, which is an upper bound: the answer's note says so.
    """
    if run.step.compile == "on":
        eager = dataclasses.replace(run, step=dataclasses.replace(run.step, compile="off"))
        answer = simulate(eager, grow_blocks=grow_blocks, sizes_of=sizes_of)
        return dataclasses.replace(answer, run=run, note=COMPILED)
    few = fewer_blocks(run) if grow_blocks else Fewer(run=run)
    story = trace_steps(few.run, sizes_of)
    few = few.named(story.block_paths)
    trace = few.grown(story.trace)
    if trace is None:
        return simulate(run, grow_blocks=False, sizes_of=sizes_of)
    settle(trace)
    start = trace.marks[story.num_marks].at
    attention = attention_calls(trace, start)
    return TracedRun(
        run=run,
        params_total=few.counted((name, size) for name, size, _ in story.params),
        params_trainable=few.counted((name, size) for name, size, trains in story.params if trains),
        steps=two_steps(
            trace, run.device, trace.marks[0].at, start, story.num_syncs, attention, host_bytes=story.host_bytes
        ),
        grown=bool(few.stacks),
        note=story.note,
    )


def simulate_entry(make_step: Callable[[], Callable[[], object]], device: DeviceSpec) -> TracedSteps:
    """What a step of anybody's needs on `device`: `make_step` builds and returns it, and it is called twice."""
    with Tracing(device, frames=False) as tracing, errors_told("The step"):
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
    settle(tracing.trace)
    return two_steps(tracing.trace, device, first_start, start, num_syncs, attention_calls(tracing.trace, start))


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


def kept_per_sample(run: RunSpec, vocab: int) -> tuple[int, int]:
    """Bytes that one more sample of a chunk keeps for backward, head and loss apart, and theirs: what is alive when the
    forward of two samples ends, less what is alive after that of one."""
    (one, logits_of_one), (two, logits_of_two) = (kept_by(run, samples, vocab) for samples in (1, 2))
    return two - one, logits_of_two - logits_of_one


def kept_by(run: RunSpec, samples: int, vocab: int) -> tuple[int, int]:
    """Bytes that a forward over `samples` keeps for backward: head and loss apart, and theirs."""
    alive = [one for one in forward_leaves(with_sgd(run), samples) if one.category != "other"]  # workspaces stay
    logits = sum(one.num_bytes for one in alive if one.phase == "loss" and one.shape[1:] and one.shape[-1] == vocab)
    return sum(one.num_bytes for one in alive) - logits, logits


def alive_after_forward(run: RunSpec, samples: int) -> int:
    """Bytes of activations, logits and what else a forward over `samples` leaves alive, every block counted."""
    return sum(alloc.num_bytes for alloc in forward_leaves(run, samples))


def forward_leaves(run: RunSpec, samples: int, *, grow_blocks: bool = True) -> list[Alloc]:
    """What a forward over `samples` makes and leaves alive."""
    asked = dataclasses.replace(run, step=dataclasses.replace(run.step, batch=samples, chunks=1, compile="off"))
    few = fewer_blocks(asked) if grow_blocks else Fewer(run=asked)
    tracing = Tracing(run.device, frames=False, guess_phases=False)
    with fake_world(run.step.world), tracing, known_values(few.run, tracing), users_errors(run):
        step = listened(few.run, tracing)
        tracing.mark("forward")
        loss = step.chunk_loss(step.batch, tracing.mark)
        tracing.mark("end")
    del loss
    trace = few.named(step.model.block_paths).grown(tracing.trace)
    if trace is None:
        return forward_leaves(run, samples, grow_blocks=False)
    start = trace.marks[0].at
    alive = set(alive_at(replay(trace, new_memory(run.device)), len(trace.events) - 1))
    made = {event for event in trace.events[start:] if event >= 0}
    return [trace.allocs[index] for index in alive & made]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A traced run of two steps."""

    trace: Trace
    """What happened."""
    num_marks: int
    """Marks before the second step."""
    num_syncs: int
    """Syncs before the second step."""
    params: tuple[tuple[str, int, bool], ...]
    """Name, elements, and whether it trains, of each parameter."""
    block_paths: tuple[str, ...]
    """Paths of the model's lists of blocks."""
    host_bytes: int = 0
    """Most that waited on the host at once."""
    note: str = ""
    """What the step does instead of what was asked for."""


def trace_steps(run: RunSpec, sizes_of: SizesOf | None = None) -> Story:
    """The story of building `run`'s step and taking it twice."""
    run = run if sizes_of is None else with_sgd(run)
    tracing = Tracing(run.device, frames=False, logits_width=run.model.decoder.vocab, guess_phases=False)
    with fake_world(run.step.world), tracing, known_values(run, tracing), users_errors(run):
        step = listened(run, tracing)
        if sizes_of is not None:
            stand_in(step, sizes_of)
        step(tracing.mark)
        marks, syncs = len(tracing.trace.marks), len(tracing.trace.syncs)
        step(tracing.mark)
    return Story(
        trace=tracing.trace,
        num_marks=marks,
        num_syncs=syncs,
        params=tuple((name, one.numel(), one.requires_grad) for name, one in step.model.named_parameters()),
        block_paths=step.model.block_paths,
        host_bytes=on_host(step),
        note=step.note,
    )


def known_values(run: RunSpec, tracing: Tracing) -> AbstractContextManager[object]:
    """Values beside fake tensors where a model of transformers picks rows by them."""
    reads = run.step.images or run.step.rows != "full"
    return KnownValues(tracing.recorder) if run.model.impl == "hf" and reads else nullcontext()


def users_errors(run: RunSpec) -> AbstractContextManager[object]:
    """A place in which what a user's module raises is told."""
    return errors_told(run.model.name) if run.model.impl == "user" else nullcontext()


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


def _report(
    found: Replay, device: DeviceSpec, syncs: list[Sync], attention: dict[str, int], *, stop: int | None = None
) -> TraceReport:
    """The answer sheet of a replay, with where the device's memory ends."""
    limited = None
    if device.usable_bytes is not None and found.peaks.reserved_bytes > device.usable_bytes:
        limited = replay(found.trace, new_memory(device, limited=True), start=found.start, stop=stop)
    return report(found, limited=limited, syncs=syncs, attention=attention)
