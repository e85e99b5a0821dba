"""The requests of a ledger as a step makes them, block by block: those of a unit that stands for `n` come `n` times.

A ledger runs few blocks (`stack`). In what order the allocator is asked decides how it breaks up its memory, so here
the events of such a unit are gone through once for each block that it stands for, in forward from the first on and in
backward from the last. A tensor that the unit made in one pass and lets go in another is, in each turn, the turn's own;
what it takes from the unit before it and lets go (`handed`) is what the turn before made of the same shape.

Checked: tests/estimate/test_unroll.py, against ledgers of which every block is run.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from memplan.estimate.tape import Alloc, Row, Tape


@dataclass(slots=True)
class Requests:
    """What the allocator is asked for, in order."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each request."""
    allocs: list[int] = field(default_factory=list)
    """Number of the ledger's allocation that each is of."""
    events: list[int] = field(default_factory=list)
    """Number of a request where it is made, its complement where it ends."""
    start: int = 0
    """Event with which the step begins."""
    late: list[tuple[int, int]] = field(default_factory=list)
    """(event, request): what the first step makes before that event and later ones find there."""
    buckets: list[int] = field(default_factory=list)
    """Requests of DDP's buckets."""


def unrolled(tape: Tape) -> Requests:
    """The requests of a finished ledger, block by block."""
    return Unrolling(tape, tape.rows).requests()


def in_one(tape: Tape) -> Requests:
    """The same with the tensors that one stands for asked for together, where the ledger has them."""
    return Unrolling(tape, ()).requests()


class Unrolling:
    """A ledger that is gone through, the units of `rows` for each block that they stand for."""

    def __init__(self, tape: Tape, rows: Iterable[Row]) -> None:
        self.tape = tape
        self.found = Requests()
        self.alive: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Requests that are alive of each allocation, by the block that they are of."""
        self.rows = sorted(rows, key=lambda row: row.start)
        self.row_of: dict[int, Row] = {
            event: row for row in self.rows for event in tape.events[row.start : row.end] if event >= 0
        }
        """The rows in which allocations are made."""
        self.late: defaultdict[int, list[int]] = defaultdict(list)
        for index, position in tape.made_late.items():
            self.late[position].append(index)
        self.handed = handed(tape, self.rows, self.row_of)
        self.last_heirs = {
            heir: 0 if reverse else self.row_of[heir].copies - 1 for heir, reverse in self.handed.values()
        }
        """Which block's own of what is handed on the unit behind lets go."""

    def requests(self) -> Requests:
        """All of them."""
        tape, found = self.tape, self.found
        at = tape.marks[0][0] if tape.marks else 0
        self.once(0, at)
        found.start = len(found.events)
        buckets = [index for index in self.alive if tape.allocs[index].op == "bucket"]
        found.buckets = [request for index in buckets for request in self.alive[index].values()]
        for row in self.rows:
            self.once(at, row.start)
            for turn in range(row.copies):
                self.turn(row, turn)
            at = row.end
        self.once(at, len(tape.events))
        self.note_late(len(tape.events))
        return found

    def once(self, start: int, end: int) -> None:
        """Goes through events outside of rows. Neighbours that stand for equally many come block by block."""
        tape = self.tape
        cuts = sorted({start, end, *(at for at in self.late if start < at < end)})
        for first, last in pairwise(cuts):
            self.note_late(first)
            events = (event for event in tape.events[first:last] if not (self.rows and rest(tape, event)))
            for copies, some in groupby(events, key=lambda event: tape.allocs[event].copies if event >= 0 else 0):
                if not copies:
                    for event in some:
                        self.end(~event, self.last_heirs.get(~event))
                    continue
                group = list(some)
                for number in range(copies):
                    for index in group:
                        self.begin(index, number)

    def turn(self, row: Row, turn: int) -> None:
        """Goes through the events of a row for its `turn`-th block."""
        tape, backward = self.tape, row.call is not None
        number = row.copies - 1 - turn if backward else turn
        for at in range(row.start, row.end):
            if at in self.late:
                self.note_late(at, number, row.copies)
            event = tape.events[at]
            if rest(tape, event):
                continue
            if event >= 0:
                self.begin(event, number)
                continue
            index = ~event
            home = self.row_of.get(index)
            if home is not None and home.copies == row.copies:
                self.end(index, number)
                continue
            heir, reverse = self.handed.get(index, (-1, backward))
            first = number == (row.copies - 1 if reverse else 0)
            if first if heir >= 0 else not turn:
                self.end(index)
            elif heir >= 0:
                self.end(heir, number + 1 if reverse else number - 1)

    def begin(self, index: int, number: int) -> None:
        """Block `number`'s own of an allocation."""
        alloc, found = self.tape.allocs[index], self.found
        request = len(found.sizes)
        found.sizes.append(alloc.num_bytes // max(alloc.copies, 1))
        found.allocs.append(index)
        found.events.append(request)
        self.alive[index][number] = request

    def end(self, index: int, number: int | None = None) -> None:
        """Ends block `number`'s own of an allocation, or all that are left."""
        alive = self.alive[index]
        if number is None:
            self.found.events += [~request for request in alive.values()]
            alive.clear()
        elif number in alive:
            self.found.events.append(~alive.pop(number))

    def note_late(self, at: int, number: int | None = None, copies: int = 1) -> None:
        """Notes what the first step makes at event `at`: of one block, in a row of so many, or of all."""
        rows = groupby(self.late.get(at, ()), key=lambda index: self.tape.allocs[index].copies)
        for count, group in rows:
            indices = list(group)
            for block in range(count) if number is None or count != copies else (number,):
                self.found.late += [(len(self.found.events), self.alive[index][block]) for index in indices]


def handed(tape: Tape, rows: Iterable[Row], row_of: dict[int, Row]) -> dict[int, tuple[int, bool]]:
    """What a unit takes and lets go, by what it leaves in its place: (allocation, whether blocks come in reverse)."""
    begun = {event: at for at, event in enumerate(tape.events) if event >= 0}
    ended = {~event: at for at, event in enumerate(tape.events) if event < 0}
    passes: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        passes[id(row.call or row)].append(row)
    found: dict[int, tuple[int, bool]] = {}
    for both in passes.values():
        inside = [event for row in both for event in tape.events[row.start : row.end] if not rest(tape, event)]
        left: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for index in inside:
            if index >= 0 and outlives(tape.allocs[index], ended.get(index), both):
                left[kind(tape.allocs[index], reverse=row_of[index].call is not None)].append(index)
        for index in [~event for event in inside if event < 0 and ~event not in row_of]:
            reverse = begun[index] > both[0].start
            heirs = left[kind(tape.allocs[index], reverse=reverse)]
            if heirs:
                found[index] = heirs.pop(0), reverse
    return found


def outlives(alloc: Alloc, end: int | None, passes: Iterable[Row]) -> bool:
    """Whether an allocation is let go behind the passes in which it was made, and is no gradient."""
    return end is not None and alloc.category != "grads" and not any(row.start <= end < row.end for row in passes)


def kind(alloc: Alloc, *, reverse: bool) -> tuple[object, ...]:
    """What an allocation and the one that takes its place have to be equal in."""
    return alloc.op, alloc.part, alloc.shape, alloc.dtype, reverse


def rest(tape: Tape, event: int) -> bool:
    """Whether it is of what other blocks than the one that is run have."""
    return tape.allocs[event if event >= 0 else ~event].rest
