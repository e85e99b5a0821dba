"""What CUDA's caching allocator makes of a ledger: blocks larger than what was asked for, segments that stay reserved.

A freed block of more than 1 MiB is given whole to a request that leaves 1 MiB of it or less. Which requests meet such
blocks is told by their order alone, so they go through the model of the allocator: the model is built, the first step
makes the optimizer's state and cuBLAS's workspaces where they are first needed, DDP deals its one bucket anew behind
it, and a second step is the steady one. Held against the trace by tests/benchmarks/estimate_agreement.py.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from memplan.allocator.caching import CachingAllocator
from memplan.allocator.config import SMALL_BYTES, SMALL_SEGMENT_BYTES
from memplan.estimate.reading import peak_bytes
from memplan.estimate.tape import Tape
from memplan.estimate.unroll import Requests, in_one, unrolled


def place(tape: Tape) -> int:
    """Gives each allocation of a finished ledger the bytes of its blocks in a steady step, and returns the most bytes
    that are reserved in one, both as if equal tensors were asked for together. The CPU's allocator gives what is asked
    for and keeps nothing."""
    if tape.rules == "cpu":
        return int(peak_bytes(tape))
    placing = Placing(in_one(tape))
    placing.two_steps()
    placing.tell(tape)
    return placing.reserved_bytes


def reserved(tape: Tape) -> int:
    """The most bytes that are reserved in a steady step of a finished ledger, its tensors asked for block by block."""
    if tape.rules == "cpu":
        return int(peak_bytes(tape))
    placing = Placing(unrolled(tape))
    placing.two_steps()
    return placing.reserved_bytes


class Placing:
    """Requests in an allocator. Those of up to 1 MiB get what they ask for out of segments of their own, and are summed
    up alone."""

    def __init__(self, asked: Requests) -> None:
        self.asked = asked
        self.allocator = CachingAllocator()
        self.addresses = [0] * len(asked.sizes)
        self.block_bytes = list(asked.sizes)
        """Bytes of the block of each request, as given last."""
        self.small_bytes = self.most_small_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Most bytes that were reserved."""
        small_segments = -(-self.most_small_bytes // SMALL_SEGMENT_BYTES)
        return self.allocator.peak_reserved_bytes + small_segments * SMALL_SEGMENT_BYTES

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

    def tell(self, tape: Tape) -> None:
        """Gives each allocation of the ledger the bytes of its blocks."""
        sums: dict[int, int] = {}
        for index, num_bytes in zip(self.asked.allocs, self.block_bytes, strict=True):
            sums[index] = sums.get(index, 0) + num_bytes
        for index, num_bytes in sums.items():
            tape.allocs[index].num_bytes = num_bytes

    def follow(self, events: Iterable[int]) -> None:
        """Does what `events` say, and notes the bytes of each block."""
        sizes, addresses, block_bytes, allocator = self.asked.sizes, self.addresses, self.block_bytes, self.allocator
        malloc, free = allocator.malloc, allocator.free
        for event in events:
            if event >= 0:
                num_bytes = sizes[event]
                if num_bytes > SMALL_BYTES:
                    held = allocator.allocated_bytes
                    addresses[event] = malloc(num_bytes)
                    block_bytes[event] = allocator.allocated_bytes - held
                    continue
                self.small_bytes += num_bytes
                if self.small_bytes > self.most_small_bytes:
                    self.most_small_bytes = self.small_bytes
            elif sizes[~event] > SMALL_BYTES:
                free(addresses[~event])
            else:
                self.small_bytes -= sizes[~event]
