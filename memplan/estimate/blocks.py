"""What CUDA's caching allocator makes of a ledger: blocks larger than what was asked for, segments that stay reserved.

A freed block of more than 1 MiB is given whole to a request that leaves 1 MiB of it or less. Which requests meet such
blocks is told by their order alone, so they go through the model of the allocator: the model is built, the first step
makes the optimizer's state and cuBLAS's workspaces where they are first needed, DDP deals its one bucket anew behind
it, and a second step is the steady one. Held against the trace by tests/benchmarks/estimate_agreement.py.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from memplan.allocator.caching import CachingAllocator
from memplan.allocator.config import SMALL_BYTES, SMALL_SEGMENT_BYTES
from memplan.estimate.reading import peak_bytes
from memplan.estimate.tape import Tape
from memplan.estimate.unroll import AGAIN, Requests, in_one, unrolled

MOST_OFF = 200
"""Of the ledger's peak, the share by which requests block by block may hold more or less at theirs. They do where a
gradient is moved into what is another's: under ZeRO-2, and with masters under ZeRO-1 and DDP's views."""
FEW_SMALL = 50
"""Times what small requests take at once that a step has to need for them to be summed up alone."""


def place(tape: Tape) -> int:
    """Gives each allocation of a finished ledger the bytes of its blocks in a steady step, and returns the most bytes
    that are reserved in one. The CPU's allocator gives what is asked for and keeps nothing."""
    return placed(tape, unrolled)


def place_few(tape: Tape) -> int:
    """The same in a third of the time, as if equal tensors were asked for together: near to it for the bytes of blocks
    (0.2 %), further from it for what is reserved (10 %)."""
    return placed(tape, in_one)


def placed(tape: Tape, requests: Callable[[Tape, Sequence[bool]], Requests]) -> int:
    """Either of them."""
    if tape.rules == "cpu":
        return int(peak_bytes(tape))
    large = [alloc.num_bytes > SMALL_BYTES * alloc.copies for alloc in tape.allocs]
    small_bytes, large_bytes, most_bytes = peaks(tape, large)
    few = small_bytes * FEW_SMALL < most_bytes  # which then have segments of their own
    wanted = large if few else [True] * len(large)
    asked, told_bytes = requests(tape, wanted), large_bytes if few else most_bytes
    if abs(asked.most_bytes() - told_bytes) * MOST_OFF > told_bytes:
        asked = in_one(tape, wanted)
    placing = Placing(asked)
    placing.two_steps()
    placing.tell(tape)
    segments = -(-small_bytes // SMALL_SEGMENT_BYTES) if few else 0
    return placing.allocator.peak_reserved_bytes + segments * SMALL_SEGMENT_BYTES


def peaks(tape: Tape, large: Sequence[bool]) -> tuple[int, int, int]:
    """Most bytes that requests of up to 1 MiB hold at once, those that are not `large`, that large ones hold, and that
    all hold."""
    small_bytes = all_bytes = most_small = most_large = most = 0
    for event in tape.events:
        index = event if event >= 0 else ~event
        num_bytes = tape.allocs[index].num_bytes
        if event < 0:
            num_bytes = -num_bytes
        elif all_bytes + num_bytes > most:
            most = all_bytes + num_bytes
        all_bytes += num_bytes
        if not large[index]:
            small_bytes += num_bytes
            if small_bytes > most_small:
                most_small = small_bytes
        elif all_bytes - small_bytes > most_large:
            most_large = all_bytes - small_bytes
    return most_small, most_large, most


class Placing:
    """Requests in an allocator."""

    def __init__(self, asked: Requests) -> None:
        self.asked = asked
        self.allocator = CachingAllocator()
        self.blocks: list[Any] = [None] * len(asked.sizes)
        self.block_bytes = list(asked.sizes)
        """Bytes of the block of each request, as given last."""

    def two_steps(self) -> None:
        """Builds the model, and takes the first step and a steady one."""
        asked = self.asked
        step = asked.events[asked.start :]
        later = {request for _, request in asked.late}.union(asked.buckets)
        self.follow(event for event in asked.events[: asked.start] if event not in later)
        first_bucket = self.allocator.malloc(sum(asked.sizes[request] for request in asked.buckets))
        at = asked.start
        for position, made in groupby(asked.late, key=itemgetter(0)):
            self.follow(asked.events[at:position])
            self.follow(request for _, request in made)
            at = position
        self.follow(asked.events[at:])
        made_then = {event for event in step if event >= 0}
        self.follow(~request for request in made_then.difference(~event for event in step))
        self.allocator.free(first_bucket)
        self.follow(asked.buckets)
        self.follow(step)

    def follow(self, events: Iterable[int]) -> None:
        """Does what `events` say, and notes the bytes of each block."""
        sizes, blocks, block_bytes = self.asked.sizes, self.blocks, self.block_bytes
        take, give, (small, large) = self.allocator.take, self.allocator.give, self.allocator.free_lists()
        for event in events:
            if event < 0:
                give(blocks[~event])
                continue
            num_bytes = sizes[event]
            blocks[event] = block = take(large if num_bytes > SMALL_BYTES else small, num_bytes, num_bytes)
            block_bytes[event] = block.num_bytes

    def tell(self, tape: Tape) -> None:
        """Gives each allocation of the ledger the bytes of its blocks: one of a row that speaks for others those of the
        first block, and the others' theirs; where nobody speaks of these, all, if they are there at the same time, or
        else the largest."""
        asked, first = self.asked, set[int]()
        more: dict[int, int] = {}
        for index, num_bytes, got_bytes in zip(asked.allocs, asked.sizes, self.block_bytes, strict=True):
            if index == AGAIN:
                continue
            target, rest = index, got_bytes - num_bytes
            if index in tape.rest_of and index in first:
                target = tape.rest_of[index]
            first.add(index)
            if rest:
                known = more.get(target, 0)
                more[target] = known + rest if index in asked.lasting else max(known, rest)
        for index, num_bytes in more.items():
            tape.allocs[index].num_bytes += num_bytes
