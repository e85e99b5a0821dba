"""The requests of a ledger as a step makes them, block by block: those of a unit that stands for `n` come `n` times.

A ledger runs few blocks (`stack`). In what order the allocator is asked decides how it breaks up its memory, so here
the events of such a unit are gone through once for each block that it stands for, in forward from the first on and in
backward from the last. A tensor that the unit made in one pass and lets go in another is, in each turn, the turn's own;
what it takes from the unit before it and lets go (`handed`) is what the turn before made of the same shape.

Checked: tests/estimate/test_unroll.py, against ledgers of which every block is run.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from memplan.estimate.tape import Alloc, Row, Tape

BEGINS_AND_ENDS, BEGINS, ENDS, ENDS_OWN, TAKES, MAKES_LATE = (
    "begins, and ends in the same turn", "begins", "ends in the turn in which it began", "ends in another pass",
    "is handed on, and ends", "is made late",
)  # fmt: skip
"""What happens to an allocation in a unit's turn."""

AGAIN = -1


@dataclass(slots=True)
class Requests:
    """What the allocator is asked for, in order."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each request."""
    allocs: list[int] = field(default_factory=list)
    """Number of the ledger's allocation that each is of, `AGAIN` where it is asked for another time."""
    lasting: set[int] = field(default_factory=set)
    """Allocations of which all blocks have their own at the same time."""
    events: list[int] = field(default_factory=list)
    """Number of a request where it is made, its complement where it ends."""
    start: int = 0
    """Event with which the step begins."""
    late: list[tuple[int, int]] = field(default_factory=list)
    """(event, request): what the first step makes before that event and later ones find there."""
    buckets: list[int] = field(default_factory=list)
    """Requests of DDP's buckets."""

    def most_bytes(self) -> int:
        """Most bytes that are asked for at once."""
        alive_bytes = most_bytes = 0
        for event in self.events:
            if event < 0:
                alive_bytes -= self.sizes[~event]
                continue
            alive_bytes += self.sizes[event]
            if alive_bytes > most_bytes:
                most_bytes = alive_bytes
        return most_bytes


def in_one(tape: Tape, asked: Sequence[bool]) -> Requests:
    """The requests of a finished ledger for what of its allocations is `asked` about, with the tensors that one stands
    for asked for together, where it has them."""
    found, ranges = Requests(), dict[int, range]()
    sizes, allocs, events = found.sizes, found.allocs, found.events
    start = tape.marks[0][0] if tape.marks else 0
    late = {position: list(some) for position, some in groupby(tape.made_late, key=tape.made_late.__getitem__)}
    for at, event in enumerate(tape.events):
        if at == start:
            found.start = len(events)
            found.buckets = [one for index in ranges if tape.allocs[index].op == "bucket" for one in ranges[index]]
        if at in late:
            found.late += [(len(events), request) for index in late.pop(at) for request in ranges.get(index, ())]
        if not asked[event if event >= 0 else ~event]:
            continue
        if event < 0:
            events += [~request for request in ranges.pop(~event)]
            continue
        alloc = tape.allocs[event]
        copies = alloc.copies
        ranges[event] = range(len(sizes), len(sizes) + copies)
        events += ranges[event]
        sizes += [alloc.num_bytes // max(copies, 1)] * copies
        allocs += [event] * copies
        if copies > 1:
            found.lasting.add(event)
    found.late += [(len(events), one) for some in late.values() for index in some for one in ranges.get(index, ())]
    return found


def unrolled(tape: Tape, asked: Sequence[bool]) -> Requests:
    """The same block by block."""
    return Unrolling(tape, asked).requests()


class Unrolling:
    """A ledger that is gone through, its units for each block that they stand for."""

    def __init__(self, tape: Tape, asked: Sequence[bool]) -> None:
        self.tape = tape
        self.own = [wanted and not alloc.rest for alloc, wanted in zip(tape.allocs, asked, strict=True)]
        """Whether an allocation is asked about and no other block's than the one that is run."""
        self.found = Requests()
        self.alive: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Requests that are alive of each allocation, by the block that they are of."""
        self.reached: dict[int, int] = {}
        """Events outside of rows, by how many events of requests come before them."""
        self.rows = sorted(tape.rows, key=lambda row: row.start)
        self.row_of: dict[int, Row] = {
            event: row for row in self.rows for event in tape.events[row.start : row.end] if event >= 0
        }
        """The rows in which allocations are made."""
        self.late: defaultdict[int, list[int]] = defaultdict(list)
        for index, position in tape.made_late.items():
            self.late[position].append(index)
        self.handed = handed(tape, self.rows, self.row_of, self.own)
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
            self.turns(row)
            at = row.end
        self.once(at, len(tape.events))
        self.note_late(len(tape.events))
        if set(tape.again) <= self.reached.keys():
            again(found, *(self.reached[at] for at in tape.again))
        return found

    def once(self, start: int, end: int) -> None:
        """Goes through events outside of rows. Neighbours that stand for equally many come block by block."""
        tape = self.tape
        cuts = sorted({start, end, *(at for at in (*self.late, *tape.again) if start < at < end)})
        for first, last in pairwise(cuts):
            self.reached[first] = len(self.found.events)
            self.note_late(first)
            events = (event for event in tape.events[first:last] if self.own[event if event >= 0 else ~event])
            for copies, some in groupby(events, key=lambda event: tape.allocs[event].copies if event >= 0 else 0):
                if not copies:
                    for event in some:
                        self.end(~event, self.last_heirs.get(~event))
                    continue
                group = list(some)
                for number in range(copies):
                    for index in group:
                        self.begin(index, number)

    def turns(self, row: Row) -> None:
        """Goes through the events of a row once for each block."""
        reverse = row.call is not None
        story = self.story(row)
        allocs, sizes, events = self.found.allocs, self.found.sizes, self.found.events
        for turn in range(row.copies):
            number = row.copies - 1 - turn if reverse else turn
            passing: dict[int, int] = {}
            for act, index, size in story:
                if act is BEGINS_AND_ENDS:
                    passing[index] = request = len(sizes)
                    sizes.append(size)
                    allocs.append(index)
                    events.append(request)
                elif act is ENDS:
                    events.append(~passing[index])
                elif act is BEGINS:
                    self.begin(index, number)
                elif act is ENDS_OWN:
                    self.end(index, number)
                elif act is TAKES:
                    self.take(index, number, row, first=not turn)
                else:
                    self.note_late(index, number, row.copies)

    def story(self, row: Row) -> list[tuple[str, int, int]]:
        """What a block does in a row, in order: (act, allocation or event, bytes)."""
        tape, story = self.tape, []
        ended = {~event for event in tape.events[row.start : row.end] if event < 0}
        for at in range(row.start, row.end):
            if at in self.late:
                story.append((MAKES_LATE, at, 0))
            event = tape.events[at]
            index = event if event >= 0 else ~event
            if not self.own[index]:
                continue
            alloc, home = tape.allocs[index], self.row_of.get(index)
            if event >= 0:
                size = alloc.num_bytes // max(alloc.copies, 1)
                story.append((BEGINS_AND_ENDS if index in ended else BEGINS, index, size))
            elif home is row:
                story.append((ENDS, index, 0))
            else:
                story.append((ENDS_OWN if home is not None and home.copies == row.copies else TAKES, index, 0))
        return story

    def take(self, index: int, number: int, row: Row, *, first: bool) -> None:
        """Ends what block `number` takes from the one before it, which for the `first` of a row is `index` itself."""
        if index not in self.handed:
            if first:
                self.end(index)
            return
        heir, reverse = self.handed[index]
        if number == (row.copies - 1 if reverse else 0):
            self.end(index)
        else:
            self.end(heir, number + 1 if reverse else number - 1)

    def begin(self, index: int, number: int) -> None:
        """Block `number`'s own of an allocation."""
        alloc, found = self.tape.allocs[index], self.found
        request = len(found.sizes)
        found.sizes.append(alloc.num_bytes // max(alloc.copies, 1))
        found.allocs.append(index)
        found.events.append(request)
        alive, home = self.alive[index], self.row_of.get(index)
        alive[number] = request
        if len(alive) > 1 and len(alive) == (alloc.copies if home is None else home.copies):
            found.lasting.add(index)

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
            indices, blocks = list(group), range(count) if number is None or count != copies else (number,)
            for block in blocks:
                own = [self.alive[index].get(block) for index in indices]
                self.found.late += [(len(self.found.events), request) for request in own if request is not None]
            if len(blocks) == count:  # not again in another turn
                self.late[at] = [index for index in self.late[at] if index not in indices]


def again(found: Requests, start: int, end: int) -> None:
    """Repeats the events of a chunk that stands for several once, behind which what is reserved grows no more (seen
    with 3 to 12 chunks); what begins or ends there alone is left out."""
    events, anew = found.events[start:end], dict[int, int]()
    inside = {event for event in events if event >= 0} & {~event for event in events if event < 0}
    more: list[int] = []
    for event in events:
        request = event if event >= 0 else ~event
        if request not in inside:
            continue
        if event >= 0:
            anew[request] = len(found.sizes)
            found.sizes.append(found.sizes[request])
            found.allocs.append(AGAIN)
        more.append(anew[request] if event >= 0 else ~anew[request])
    found.events[end:end] = more
    found.late = [(at + len(more) * (at >= end), request) for at, request in found.late]


def handed(tape: Tape, rows: Iterable[Row], row_of: dict[int, Row], own: Sequence[bool]) -> dict[int, tuple[int, bool]]:
    """What a unit takes and lets go, by what it leaves in its place: (allocation, whether blocks come in reverse)."""
    begun = {event: at for at, event in enumerate(tape.events) if event >= 0}
    ended = {~event: at for at, event in enumerate(tape.events) if event < 0}
    passes: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        passes[id(row.call or row)].append(row)
    found: dict[int, tuple[int, bool]] = {}
    for both in passes.values():
        events = [event for row in both for event in tape.events[row.start : row.end]]
        inside = [event for event in events if own[event if event >= 0 else ~event]]
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
