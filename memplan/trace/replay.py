"""Trace times allocator: how much is allocated, active and reserved at every moment, and who is alive at the peak."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memplan.allocator.blocks import OutOfMemory as AllocatorOutOfMemory
from memplan.record.memory import CATEGORIES, MemoryBreakdown
from memplan.record.trace import LiveTensor, OutOfMemory, PhaseTotals, SyncPoint, Timeline, TraceReport
from memplan.trace.events import Alloc, Sync, Trace


class Memory(Protocol):
    """Whose rules turn requests into bytes held."""

    allocated_bytes: int
    num_alloc_retries: int

    @property
    def active_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    def malloc(self, num_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...


class HostMemory:
    """The CPU allocator: every request as it is, nothing kept back."""

    def __init__(self) -> None:
        self.allocated_bytes = self.num_alloc_retries = 0
        self._sizes: dict[int, int] = {}
        self._next = 1

    @property
    def active_bytes(self) -> int:
        """As allocated: no stream delays a free."""
        return self.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """As allocated: nothing is kept back."""
        return self.allocated_bytes

    def malloc(self, num_bytes: int) -> int:
        """A handle."""
        self._next += 1
        self._sizes[self._next] = num_bytes
        self.allocated_bytes += num_bytes
        return self._next

    def free(self, address: int) -> None:
        """Ends an allocation."""
        self.allocated_bytes -= self._sizes.pop(address)


@dataclass(slots=True)
class Peaks:
    """The largest moment so far."""

    allocated_bytes: int = 0
    active_bytes: int = 0
    reserved_bytes: int = 0
    at: int = -1
    """Event after which the allocated bytes were largest."""

    def see(self, memory: Memory, at: int) -> None:
        """Takes down what `memory` holds after event `at`."""
        if memory.allocated_bytes > self.allocated_bytes or self.at < 0:
            self.allocated_bytes, self.at = memory.allocated_bytes, at
        self.active_bytes = max(self.active_bytes, memory.active_bytes)
        self.reserved_bytes = max(self.reserved_bytes, memory.reserved_bytes)


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a replay found in the window from event `start` on."""

    trace: Trace
    """The story."""
    start: int
    """First event of the window."""
    start_bytes: int = 0
    """Allocated bytes before it."""
    peaks: Peaks = field(default_factory=Peaks)
    """Over the whole window."""
    phases: dict[str, Peaks] = field(default_factory=dict)
    """By phase."""
    block_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that each allocation took, rounding included."""
    num_alloc_retries: int = 0
    """Times that all cached memory had to go back to the driver before a request found room."""
    out_of_memory: tuple[int, AllocatorOutOfMemory] | None = None
    """Event at which the memory ran out, and what the allocator said."""


def replay(trace: Trace, memory: Memory, *, start: int = 0, stop: int | None = None) -> Replay:
    """Plays `trace` through `memory`, up to event `stop`. Peaks count from event `start` on, with what is alive then;
    the replay stops where the memory runs out."""
    found = Replay(trace=trace, start=start)
    addresses: dict[int, int] = {}
    block_bytes, allocs = found.block_bytes, trace.allocs
    malloc, free = memory.malloc, memory.free
    marks = iter([*trace.marks, None])
    mark = next(marks)
    phase, retries_before = Peaks(), 0
    for at, event in enumerate(trace.events[:stop]):
        if at == start:
            found.start_bytes, retries_before = memory.allocated_bytes, memory.num_alloc_retries
            found.peaks.see(memory, at - 1)
        while mark is not None and mark.at <= at:
            phase = found.phases.setdefault(mark.phase, Peaks()) if at >= start else Peaks()
            if at >= start:
                phase.see(memory, at - 1)
            mark = next(marks)
        if event < 0:
            free(addresses.pop(~event))
            continue
        before = memory.allocated_bytes
        try:
            addresses[event] = malloc(allocs[event].num_bytes)
        except AllocatorOutOfMemory as error:
            found.out_of_memory = (at, error)
            return found
        block_bytes[event] = memory.allocated_bytes - before
        if at >= start:
            found.peaks.see(memory, at)
            phase.see(memory, at)
    if start >= len(trace.events):
        found.start_bytes = memory.allocated_bytes
        found.peaks.see(memory, start - 1)
    else:
        found.num_alloc_retries = memory.num_alloc_retries - retries_before
    return found


def alive_at(found: Replay, at: int) -> list[int]:
    """Allocations alive after event `at`."""
    alive: dict[int, None] = {}
    for event in found.trace.events[: at + 1]:
        if event >= 0:
            alive[event] = None
        else:
            del alive[~event]
    return list(alive)


def report(
    found: Replay,
    *,
    limited: Replay | None = None,
    syncs: Sequence[Sync] = (),
    attention: dict[str, int] | None = None,
) -> TraceReport:
    """The answer sheet of a replay without limit; `limited` is the same trace under a card's capacity."""
    trace, at = found.trace, found.peaks.at
    alive = alive_at(found, at)
    last = op_at(found, at)
    return TraceReport(
        peak_allocated_bytes=found.peaks.allocated_bytes,
        peak_active_bytes=found.peaks.active_bytes,
        peak_reserved_bytes=found.peaks.reserved_bytes,
        phase=phase_at(trace, max(at, found.start)),
        op="" if last is None else last.op,
        module="" if last is None else last.module,
        breakdown=breakdown(found, alive),
        phases={name: phase_totals(found, peaks) for name, peaks in found.phases.items()},
        static_bytes=found.start_bytes,
        between=tuple(grouped(trace.allocs[index] for index in alive_at(found, found.start - 1))),
        alive=tuple(grouped(trace.allocs[index] for index in alive)),
        syncs=tuple(counted(syncs)),
        out_of_memory=None if limited is None else ran_out(limited),
        num_alloc_retries=0 if limited is None else limited.num_alloc_retries,
        attention=attention or {},
    )


def phase_totals(found: Replay, peaks: Peaks) -> PhaseTotals:
    """The largest moments of a phase."""
    last = op_at(found, peaks.at)
    return PhaseTotals(
        allocated_bytes=peaks.allocated_bytes,
        active_bytes=peaks.active_bytes,
        reserved_bytes=peaks.reserved_bytes,
        op="" if last is None else last.op,
        module="" if last is None else last.module,
        breakdown=breakdown(found, alive_at(found, peaks.at)),
    )


def op_at(found: Replay, at: int) -> Alloc | None:
    """What event `at` of the window begins; None where it lies before it or ends something."""
    event = found.trace.events[at] if at >= found.start else -1
    return found.trace.allocs[event] if event >= 0 else None


def breakdown(found: Replay, alive: Sequence[int]) -> MemoryBreakdown:
    """Bytes of some allocations by category, as the memory took them."""
    totals: Counter[str] = Counter()
    for index in alive:
        totals[found.trace.allocs[index].category] += found.block_bytes[index]
    return MemoryBreakdown(**totals)


def timeline(found: Replay, *, num_points: int = 1500) -> Timeline:
    """Bytes by category over the window, one point for each stretch of events at its largest moment."""
    trace, allocs = found.trace, found.trace.allocs
    live = dict.fromkeys(CATEGORIES, 0)
    series: dict[str, list[int]] = {name: [] for name in CATEGORIES}
    stride = max(1, (len(trace.events) - found.start) // num_points)
    highest, best, points = -1, dict(live), 0
    phases: list[tuple[int, str]] = []
    marks = {mark.at: mark.phase for mark in trace.marks}
    for at, event in enumerate(trace.events):
        if at in marks and at >= found.start and (not phases or phases[-1][1] != marks[at]):
            phases.append((points, marks[at]))
        index = max(event, ~event)
        live[allocs[index].category] += found.block_bytes[index] if event >= 0 else -found.block_bytes[index]
        if at < found.start:
            continue
        if (total := sum(live.values())) > highest:
            highest, best = total, dict(live)
        if (at - found.start) % stride == stride - 1:
            for name, values in series.items():
                values.append(best[name])
            highest, points = -1, points + 1
    kept = {name: tuple(values) for name, values in series.items() if any(values)}
    return Timeline(bytes_by_category=kept, phases=tuple(phases))


def phase_at(trace: Trace, at: int) -> str:
    """The phase of event `at`."""
    phase = "init"
    for mark in trace.marks:
        if mark.at > at:
            break
        phase = mark.phase
    return phase


def ran_out(found: Replay) -> OutOfMemory | None:
    """Where a limited replay stopped."""
    if found.out_of_memory is None:
        return None
    at, error = found.out_of_memory
    alloc = found.trace.allocs[found.trace.events[at]]
    return OutOfMemory(
        phase=phase_at(found.trace, at),
        op=alloc.op,
        module=alloc.module,
        requested_bytes=error.requested_bytes,
        allocated_bytes=error.allocated_bytes,
        reserved_bytes=error.reserved_bytes,
    )


BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def grouped(allocs: Iterator[Alloc]) -> list[LiveTensor]:
    """Storages alike in everything but the number of their block, counted together, the largest first."""
    counts: Counter[LiveTensor] = Counter()
    for alloc in allocs:
        counts[
            LiveTensor(
                num_bytes=alloc.num_bytes,
                category=alloc.category,
                module=BLOCK_NUMBER.sub("*", alloc.module),
                op=alloc.op,
                shape=alloc.shape,
                dtype=alloc.dtype,
            )
        ] += 1
    together = [dataclasses.replace(tensor, count=count) for tensor, count in counts.items()]
    return sorted(together, key=lambda tensor: -tensor.total_bytes)


def counted(syncs: Sequence[Sync]) -> list[SyncPoint]:
    """Reads at the same place, counted together."""
    counts = Counter(syncs)
    return [
        SyncPoint(where=sync.where, op=sync.op, phase=sync.phase, count=count, assumed=sync.assumed)
        for sync, count in counts.items()
    ]
