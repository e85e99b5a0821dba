"""What CUDA's caching allocator makes of a ledger: blocks larger than what was asked for, segments that stay reserved.

A freed block of more than 1 MiB is given whole to a request that leaves 1 MiB of it or less. Which requests meet such
blocks is told by their order alone, so the ledger's events go through the model of the allocator: the model is built,
the first step makes the optimizer's state at its end, DDP deals its one bucket anew behind it, and a second one is the
steady step.

Tensors that one stands for (`stack`) are asked for one behind the other, where a step has other requests between them:
blocks and segments of a deep model are near to the real ones, those of few blocks are the real ones. Held against the
trace by tests/benchmarks/estimate_agreement.py.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from memplan.allocator.caching import CachingAllocator
from memplan.allocator.config import SMALL_BYTES, SMALL_SEGMENT_BYTES
from memplan.estimate.reading import peak_bytes
from memplan.estimate.tape import Tape


def place(tape: Tape) -> int:
    """Gives each allocation of a finished ledger the bytes of its blocks in a steady step, and returns the most bytes
    that are reserved in one. The CPU's allocator gives what is asked for and keeps nothing."""
    if tape.rules == "cpu":
        return int(peak_bytes(tape))
    placing, start = Placing(tape), tape.marks[0][0]
    late = tape.made_late
    buckets = [event for event in tape.events[:start] if tape.allocs[event].op == "bucket"]
    after = {*late, *buckets}
    placing.follow(event for event in tape.events[:start] if event not in after)
    before = {*placing.alive, *after}
    first_bucket = placing.allocator.malloc(sum(tape.allocs[event].num_bytes for event in buckets)) if buckets else None
    at = start
    for position, made in groupby(late, key=late.__getitem__):
        placing.follow(tape.events[at:position])
        placing.follow(made)
        at = position
    placing.follow(tape.events[at:])
    for index in [index for index in placing.alive if index not in before]:
        placing.end(index)
    if first_bucket is not None:
        placing.allocator.free(first_bucket)
        placing.follow(buckets)
    placing.allocator.reset_peak()
    placing.follow(tape.events[start:])
    return placing.reserved_bytes


class Placing:
    """A ledger's requests in an allocator.

    Those of up to 1 MiB get what they ask for out of segments of their own, and are summed up alone."""

    def __init__(self, tape: Tape) -> None:
        self.allocs = tape.allocs
        self.asked = [alloc.num_bytes for alloc in tape.allocs]
        self.allocator = CachingAllocator()
        self.alive: dict[int, Sequence[int]] = {}
        """Addresses of the blocks of each allocation that is alive, none of small ones."""
        self.small_bytes = self.most_small_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Most bytes that were reserved."""
        small_segments = -(-self.most_small_bytes // SMALL_SEGMENT_BYTES)
        return self.allocator.peak_reserved_bytes + small_segments * SMALL_SEGMENT_BYTES

    def follow(self, events: Iterable[int]) -> None:
        """Does what `events` say, and notes the bytes of each block."""
        allocator, allocs, asked, alive = self.allocator, self.allocs, self.asked, self.alive
        malloc = allocator.malloc
        for event in events:
            if event < 0:
                self.end(~event)
                continue
            alloc, num_bytes = allocs[event], asked[event]
            copies = alloc.copies
            each = num_bytes if copies == 1 else num_bytes // max(copies, 1)
            if each <= SMALL_BYTES:
                alive[event] = ()
                self.small_bytes += num_bytes
                if self.small_bytes > self.most_small_bytes:
                    self.most_small_bytes = self.small_bytes
                continue
            held = allocator.allocated_bytes
            alive[event] = (malloc(each),) if copies == 1 else [malloc(each) for _ in range(copies)]
            alloc.num_bytes = allocator.allocated_bytes - held

    def end(self, index: int) -> None:
        """Gives back the blocks of an allocation."""
        blocks = self.alive.pop(index)
        if not blocks:
            self.small_bytes -= self.asked[index]
        for address in blocks:
            self.allocator.free(address)
