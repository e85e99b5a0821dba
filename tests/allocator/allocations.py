"""Helpers for the allocator's tests: its invariants, a slow twin, random workloads, and its history as a snapshot."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from memplan.allocator.blocks import DeviceMemory, OutOfMemory
from memplan.allocator.caching import CachingAllocator
from memplan.allocator.config import AllocatorConfig
from memplan.units import MIB

Step = tuple[str, int, int]
"""What is done (`malloc`, `free`, `use`, `pass`, `empty`), a number, a stream."""

SIZES = st.one_of(
    st.integers(1, 4000),
    st.integers(MIB - 1024, MIB + 1024),
    st.integers(MIB + 1, 12 * MIB),
    st.integers(9 * MIB, 70 * MIB),
)
WHOLE_SIZES = st.one_of(st.integers(1, MIB), st.integers(1, 40).map(lambda pairs: pairs * 2 * MIB))
"""Small requests, and large ones that leave no rest that is too small to be split off."""


def workloads(sizes: st.SearchStrategy[int] = SIZES, max_size: int = 60) -> st.SearchStrategy[list[Step]]:
    """Requests and frees in random order on two streams, with uses by another stream in between."""
    streams = st.sampled_from((0, 0, 0, 7))
    picks = st.integers(0, 1000)
    return st.lists(
        st.one_of(
            st.tuples(st.just("malloc"), sizes, streams),
            st.tuples(st.just("malloc"), sizes, streams),
            st.tuples(st.just("free"), picks, st.just(0)),
            st.tuples(st.sampled_from(("free", "use", "pass", "empty")), picks, st.just(3)),
        ),
        max_size=max_size,
    )


class NotedDevice(DeviceMemory):
    """A card without end that writes what it is asked for into a history."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[dict[str, Any]] = []
        self.stream = 0
        self.streams: dict[int, int] = {}

    def note(self, action: str, address: int, num_bytes: int, stream: int) -> None:
        """Adds an event."""
        self.events.append({"action": action, "addr": address, "size": num_bytes, "stream": stream})

    def allocate(self, num_bytes: int) -> int | None:
        address = super().allocate(num_bytes)
        assert address is not None
        self.streams[address] = self.stream
        self.note("segment_alloc", address, num_bytes, self.stream)
        return address

    def release(self, address: int, num_bytes: int) -> None:
        super().release(address, num_bytes)
        self.note("segment_free", address, num_bytes, self.streams[address])

    def map(self, address: int, num_bytes: int) -> bool:
        self.note("segment_map", address, num_bytes, self.stream)
        return super().map(address, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        super().unmap(address, num_bytes)
        self.note("segment_unmap", address, num_bytes, 0)


class Player:
    """Does the steps of a workload, one at a time, and notes them when its card does."""

    def __init__(self, allocator: CachingAllocator, card: NotedDevice | None = None) -> None:
        self.allocator = allocator
        self.card = card
        self.requests: dict[int, tuple[int, int]] = {}
        self.live: list[int] = []
        self.used: set[int] = set()
        self.waiting: list[int] = []

    def do(self, step: Step) -> int | None:
        """The address that a request was given; None when it failed and for every other step."""
        what, number, stream = step
        if what == "malloc":
            return self._malloc(number, stream)
        if what == "free" and self.live:
            self._free(self.live.pop(number % len(self.live)))
        elif what == "use" and self.live:
            address = self.live[number % len(self.live)]
            self.allocator.record_stream(address, stream)
            if stream != self.requests[address][1]:
                self.used.add(address)
        elif what == "pass" and self.waiting:
            address = self.waiting.pop(number % len(self.waiting))
            self.allocator.process_events(address)
            self._note("free_completed", address)
        elif what == "empty":
            for address in self.waiting:
                self._note("free_completed", address)
            self.waiting.clear()
            self.allocator.empty_cache()
        return None

    def _malloc(self, num_bytes: int, stream: int) -> int | None:
        if self.card is not None:
            self.card.stream = stream
        try:
            address = self.allocator.malloc(num_bytes, stream)
        except OutOfMemory:
            address = None
        if address is None or self.allocator.awaiting_bytes == 0:
            self.waiting.clear()  # a retry has completed all frees
        if address is not None:
            self.live.append(address)
            self.requests[address] = (num_bytes, stream)
            self._note("alloc", address)
        return address

    def _free(self, address: int) -> None:
        self.allocator.free(address)
        self._note("free_requested", address)
        if address in self.used:
            self.used.remove(address)
            self.waiting.append(address)
        else:
            self._note("free_completed", address)

    def _note(self, action: str, address: int) -> None:
        if self.card is not None:
            self.card.note(action, address, *self.requests[address])


def recorded(steps: Iterable[Step], settings: str = "") -> dict[str, Any]:
    """The history of `steps` in the form of `torch.cuda.memory._snapshot()`."""
    card = NotedDevice()
    allocator = CachingAllocator(AllocatorConfig.parse(settings), device=card)
    player = Player(allocator, card)
    for step in steps:
        player.do(step)
    return {
        "device_traces": [card.events],
        "segments": [
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.num_bytes,
                "stream": segment.stream,
                "segment_type": segment.pool,
                "segment_pool_id": (0, 0),
                "is_expandable": segment.is_expandable,
                "blocks": [
                    {"size": block.num_bytes, "requested_size": block.requested_bytes, "state": block.state}
                    for block in segment.blocks
                ],
            }
            for segment in allocator.segments()
        ],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings},
    }


def sizes_mib(allocator: CachingAllocator) -> list[list[float]]:
    """MiB of each segment's blocks, in use as positive numbers and free as negative ones."""
    return [
        [block.num_bytes / MIB * (-1 if block.state == "inactive" else 1) for block in segment.blocks]
        for segment in allocator.segments()
    ]


def check(allocator: CachingAllocator) -> None:
    """Asserts everything that must hold between two calls."""
    segments = allocator.segments()
    ends = 0
    for segment in segments:
        assert segment.address >= ends, "segments overlap"
        cursor = segment.address
        for block in segment.blocks:
            assert block.address == cursor, "blocks leave a gap or overlap"
            assert block.num_bytes % 512 == 0
            assert block.num_bytes >= max(block.requested_bytes, 512)
            cursor += block.num_bytes
        assert cursor == segment.address + segment.num_bytes, "blocks do not fill their segment"
        ends = cursor
        states = [block.state for block in segment.blocks]
        assert ("inactive", "inactive") not in pairwise(states), "free neighbours did not merge"
    blocks = [block for segment in segments for block in segment.blocks]
    active = [block for block in blocks if block.state != "inactive"]
    stats = allocator.stats
    assert stats.requested_bytes == sum(block.requested_bytes for block in active)
    assert stats.active_bytes == sum(block.num_bytes for block in active)
    assert stats.allocated_bytes == sum(block.num_bytes for block in active if block.state == "active_allocated")
    assert stats.reserved_bytes == sum(segment.num_bytes for segment in segments)
    assert stats.peak_requested_bytes >= stats.requested_bytes
    assert stats.peak_allocated_bytes >= stats.allocated_bytes
    assert stats.peak_active_bytes >= max(stats.active_bytes, stats.peak_allocated_bytes)
    assert stats.peak_reserved_bytes >= stats.reserved_bytes >= stats.active_bytes >= stats.allocated_bytes
    for block in allocator._live.values():
        assert block.prev is None or block.prev.next is block
        assert block.next is None or block.next.prev is block
    free = [*allocator._small.free_blocks(), *allocator._large.free_blocks()]
    assert sorted(block.address for block in free) == sorted(
        block.address for block in blocks if block.state == "inactive"
    )
    for pool in (allocator._small, allocator._large):
        for free_list in pool.free_lists.values():
            order = [(block.num_bytes, block.address) for block in free_list.blocks]
            assert order == sorted(order)


@dataclass(slots=True)
class SlowTwin:
    """The default rules once more, as plainly as they can be written: one list of ranges, looked through every time.

    A range is `[segment, start, bytes, small, stream, address or None when free]`.
    """

    ranges: list[list[Any]] = field(default_factory=list)
    next_address: int = 1 << 33

    def malloc(self, num_bytes: int, stream: int) -> int:
        """Address of the new block."""
        size = (num_bytes + 511) // 512 * 512
        small = size <= MIB
        fits = [item for item in self.ranges if item[3:] == [small, stream, None] and item[2] >= size]
        if fits:
            taken = min(fits, key=lambda item: (item[2], item[1]))
        else:
            segment_bytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) >> 21 << 21
            taken = [self.next_address, self.next_address, segment_bytes, small, stream, None]
            self.next_address += segment_bytes + 2 * MIB
            self.ranges.append(taken)
        rest = taken[2] - size
        if rest >= 512 if small else rest > MIB:
            self.ranges.append([taken[0], taken[1] + size, rest, small, stream, None])
            taken[2] = size
        taken[5] = taken[1]
        return int(taken[1])

    def free(self, address: int) -> None:
        """Ends the allocation at `address` and joins what is free and side by side."""
        next(item for item in self.ranges if item[5] == address)[5] = None
        joined: list[list[Any]] = []
        for item in sorted(self.ranges, key=lambda item: item[1]):
            if joined and item[5] is None and joined[-1][5] is None and joined[-1][0] == item[0]:
                joined[-1][2] += item[2]
            else:
                joined.append(item)
        self.ranges = joined
