"""A step of many blocks, told from the trace of a few.

Where the blocks of a stack repeat, one by one or in units of several kinds, they tell the same story again and again:
in forward in the order of the blocks, in backward in the reverse. `grow` cuts a trace into such sweeps, checks that the
inner units' stories are equal event for event, sizes, ops, shapes and the relative place of every freed tensor
included, and inserts as many more as asked for. Where it cannot show that, it says None, and the whole step must be
traced.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from memplan.trace.events import Alloc, Mark, Trace

UNITS = 4
"""A first, a last and two inner units to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A list of blocks, some of which repeat: `UNITS` units of `period` blocks from block `first` on. What stands
    before them is a unit of its own, and so is what stands behind them."""

    path: str
    """Path of the container: `decoder.blocks`."""
    first: int = 0
    """Blocks before the repetition."""
    period: int = 1
    """Blocks of a unit: 2 where every second one is recomputed."""
    traced: int
    """Blocks in the trace."""
    wanted: int
    """Blocks asked for; a multiple of `period` more than `traced`."""

    @property
    def added(self) -> int:
        """Units to insert."""
        return (self.wanted - self.traced) // self.period

    @property
    def num_units(self) -> int:
        """Units in the trace."""
        return self.inner.stop + 1 + (self.traced > self.first + UNITS * self.period)

    @property
    def inner(self) -> range:
        """The units that are compared: those that repeat, without their first and their last."""
        start = (self.first > 0) + 1
        return range(start, start + UNITS - 2)

    def unit(self, block: int) -> int:
        """The unit of a block in the trace."""
        if block < self.first:
            return 0
        return min((self.first > 0) + (block - self.first) // self.period, self.num_units - 1)

    def block(self, path: str) -> int | None:
        """The number of the block that `path` leads into."""
        match = re.search(rf"(?:^|\.){re.escape(self.path)}\.(\d+)(?:\.|$)", path)
        return int(match[1]) if match else None


def repetition(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """The longest part of `kinds` that repeats in units: where it begins, kinds of a unit, and units to leave out so
    that `UNITS` of them remain; no units where leaving some out saves nothing."""
    best, count = (0, 1, 0), len(kinds)
    for period in range(1, count // UNITS + 1):
        alike = [kinds[index] == kinds[index + period] for index in range(count - period)]
        at = 0
        for same, group in itertools.groupby(alike):
            length = sum(1 for _ in group)
            spare = length // period + 1 - UNITS
            if same and spare * period > best[1] * best[2]:
                best = (at, period, spare)
            at += length
    return best


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive events of one unit, or of none."""

    unit: int | None
    start: int
    end: int
    sweep: int | None = None


Birth = tuple[int, int, int]
"""Sweep, unit and number among that run's allocations."""


def grow(trace: Trace, stack: Stack) -> Trace | None:
    """The trace with `stack.wanted` blocks, or None where it is not shown that they repeat."""
    if stack.added == 0:
        return trace
    if stack.added < 0 or stack.traced < stack.first + UNITS * stack.period:
        return None
    runs = sweeps(trace, stack)
    if runs is None:
        return None
    births = birth_places(trace, runs)
    stories: dict[tuple[int, int], list[object]] = {}
    for run in runs:
        if run.sweep is not None and run.unit is not None:
            stories[run.sweep, run.unit] = story(trace, run, births, stack)
    inner = stack.inner
    numbers = {sweep for sweep, _ in stories}
    if any(stories[sweep, unit] != stories[sweep, inner[0]] for sweep in numbers for unit in inner):
        return None
    for run in runs:  # outside of sweeps, only the ends of the stack may be spoken of
        if run.sweep is None and any(
            births[~event][1] in inner for event in trace.events[run.start : run.end] if event < 0 and ~event in births
        ):
            return None
    return Builder(trace, stack, births).build(runs)


def sweeps(trace: Trace, stack: Stack) -> list[Run] | None:
    """The trace's runs, those of blocks with the number of their sweep; None where a block's run is in no sweep."""
    units = unit_numbers(trace, stack)
    runs, start = [], 0
    for unit, events in itertools.groupby(units):
        end = start + sum(1 for _ in events)
        runs.append(Run(unit, start, end))
        start = end
    found: list[Run] = []
    number, at, last = 0, 0, stack.num_units - 1
    while at < len(runs):
        if runs[at].unit is None:
            found.append(runs[at])
            at += 1
            continue
        group = runs[at : at + stack.num_units]
        order = [run.unit for run in group]
        if order not in (list(range(last + 1)), list(range(last, -1, -1))):
            # What lies beside the stack frees tensors of its ends, such as the last block's output.
            run = runs[at]
            if run.unit not in (0, last) or any(event >= 0 for event in trace.events[run.start : run.end]):
                return None
            found.append(run)
            at += 1
            continue
        found += [replace(run, sweep=number) for run in group]
        number += 1
        at += stack.num_units
    return found


def unit_numbers(trace: Trace, stack: Stack) -> list[int | None]:
    """The unit of each event: where it happened, or else whose tensor it speaks of."""
    known: dict[str, int | None] = {}

    def unit(path: str) -> int | None:
        if path not in known:
            block = stack.block(path)
            known[path] = None if block is None else stack.unit(block)
        return known[path]

    numbers = []
    for event, place in zip(trace.events, trace.places, strict=True):
        number = unit(place)
        numbers.append(unit(trace.allocs[max(event, ~event)].module) if number is None else number)
    fill_building(numbers, trace.marks[0].at)
    return numbers


def fill_building(numbers: list[int | None], end: int) -> None:
    """Gives the temporaries of a block that is being built, before event `end`, its unit: they are in no module yet."""
    last = None
    for at in range(end):
        number = numbers[at]
        if number is None:
            continue
        if last is not None and numbers[last] == number:
            numbers[last:at] = [number] * (at - last)
        last = at


def birth_places(trace: Trace, runs: list[Run]) -> dict[int, Birth]:
    """For each allocation made in a sweep, where."""
    births: dict[int, Birth] = {}
    for run in runs:
        if run.sweep is None or run.unit is None:
            continue
        made = (event for event in trace.events[run.start : run.end] if event >= 0 and not is_once(trace.allocs[event]))
        births.update((event, (run.sweep, run.unit, number)) for number, event in enumerate(made))
    return births


def is_once(alloc: Alloc) -> bool:
    """Whether an allocation is made once and for good by whichever op comes first, such as a workspace."""
    return alloc.op.startswith("hidden:") and not alloc.died


def story(trace: Trace, run: Run, births: dict[int, Birth], stack: Stack) -> list[object]:
    """A run's events in words that do not depend on its unit."""
    assert run.unit is not None
    told: list[object] = []
    for event in trace.events[run.start : run.end]:
        if event >= 0:
            alloc = trace.allocs[event]
            name = moved(alloc.module, stack, -run.unit)
            told.append(
                (alloc.num_bytes, alloc.op, alloc.phase, alloc.died, name, alloc.shape, alloc.dtype, alloc.category)
            )
        elif ~event in births:
            sweep, unit, number = births[~event]
            told.append((sweep, unit - run.unit, number))
        else:
            told.append(~event)
    return told


def moved(path: str, stack: Stack, units: int) -> str:
    """`path` with its block's number moved by `units` units."""
    head, found, tail = path.partition(f"{stack.path}.")
    if not found:
        return path
    number, dot, rest = tail.partition(".")
    return f"{head}{found}{int(number) + units * stack.period}{dot}{rest}"


class Builder:
    """Writes the longer trace, run by run."""

    def __init__(self, trace: Trace, stack: Stack, births: dict[int, Birth]) -> None:
        self._old = trace
        self._stack = stack
        self._births = births
        self._new = Trace(syncs=trace.syncs)
        self._outside: dict[int, int] = {}  # old allocation outside of sweeps -> new
        self._inside: dict[Birth, int] = {}  # sweep, new unit, number -> new
        self._marks: dict[int, list[Mark]] = defaultdict(list)
        for mark in trace.marks:
            self._marks[mark.at].append(mark)

    def build(self, runs: list[Run]) -> Trace:
        """The longer trace."""
        inner, added = self._stack.inner, self._stack.added
        for sweep, group in itertools.groupby(runs, key=lambda run: run.sweep):
            members = list(group)
            if sweep is None:
                for run in members:
                    self._copy(run, 0)
                continue
            by_unit = {run.unit: run for run in members}
            new_units = range(self._stack.num_units + added)
            for unit in new_units if members[0].unit == 0 else reversed(new_units):
                # The ends are their own; every unit between them is as the first inner one.
                template = unit if unit < inner.start else max(inner.start, unit - added)
                if template in inner:
                    template = inner.start
                self._copy(by_unit[template], unit - template)
        for mark in self._marks.pop(len(self._old.events), []):
            self._new.marks.append(replace(mark, at=len(self._new.events)))
        return self._new

    def _copy(self, run: Run, shift: int) -> None:
        new, number = self._new, 0
        for at in range(run.start, run.end):
            for mark in self._marks.pop(at, []):
                new.marks.append(replace(mark, at=len(new.events)))
            event, place = self._old.events[at], moved(self._old.places[at], self._stack, shift)
            if event >= 0:
                index = len(new.allocs)
                new.allocs.append(self._moved_alloc(self._old.allocs[event], shift))
                if run.sweep is not None and run.unit is not None and not is_once(self._old.allocs[event]):
                    self._inside[run.sweep, run.unit + shift, number] = index
                    number += 1
                else:
                    self._outside[event] = index
                new.events.append(index)
            elif ~event in self._births:
                sweep, unit, ordinal = self._births[~event]
                # Outside of sweeps only ends are spoken of; the last one has moved by what was added.
                step = shift if run.sweep is not None else self._stack.added * (unit >= self._stack.inner.stop)
                new.events.append(~self._inside.pop((sweep, unit + step, ordinal)))
            else:
                new.events.append(~self._outside.pop(~event))
            new.places.append(place)

    def _moved_alloc(self, alloc: Alloc, shift: int) -> Alloc:
        return replace(alloc, module=moved(alloc.module, self._stack, shift))
