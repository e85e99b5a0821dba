"""The caching allocator: its rules by hand with small numbers, its invariants, and a slow twin that knows only rules.

Sources are functions of c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
"""

import pytest
from allocations import Player, SlowTwin, Step, check, sizes_mib, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.allocator.blocks import OutOfMemory
from memplan.allocator.caching import CachingAllocator
from memplan.allocator.config import AllocatorConfig
from memplan.errors import MemplanError
from memplan.units import MIB

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:40,max_non_split_rounding_mb:30",
    "roundup_power2_divisions:[1:2,4:4,>:8]",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "expandable_segments:True,roundup_power2_divisions:4,per_process_memory_fraction:0.9",
    "large_segment_size_mb:14,max_split_size_mb:30",
)


@pytest.mark.parametrize(
    ("num_bytes", "allocated_bytes", "reserved_bytes", "pool"),
    [
        (1, 512, 2 * MIB, "small"),
        (513, 1024, 2 * MIB, "small"),
        (MIB, MIB, 2 * MIB, "small"),
        (MIB + 1, MIB + 512, 20 * MIB, "large"),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, "large"),
        (10 * MIB, 10 * MIB, 10 * MIB, "large"),
        (11 * MIB, 12 * MIB, 12 * MIB, "large"),  # a rest of 1 MiB is not split off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB, "large"),  # 1 MiB and 512 bytes are
    ],
)
def test_one_request(num_bytes: int, allocated_bytes: int, reserved_bytes: int, pool: str) -> None:
    """Source: round_size, get_pool, get_allocation_size, should_split."""
    allocator = CachingAllocator()
    allocator.malloc(num_bytes)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (num_bytes, allocated_bytes)
    assert allocator.reserved_bytes == reserved_bytes
    assert [segment.pool for segment in allocator.segments()] == [pool]


def test_no_bytes_need_no_block() -> None:
    """Source: NativeCachingAllocator::allocate asks for nothing when the size is 0; free of a null pointer returns."""
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.segments() == ()
    with pytest.raises(MemplanError, match="cannot be allocated"):
        allocator.malloc(-1)
    with pytest.raises(MemplanError, match="Nothing is allocated at 0x200"):
        allocator.free(512)


def test_small_blocks_are_split_down_to_512_bytes() -> None:
    """A rest of 512 bytes is a block of its own. Source: should_split: remaining >= kMinBlockSize in the small pool."""
    allocator = CachingAllocator()
    for num_bytes in (MIB, MIB - 512, 512):
        allocator.malloc(num_bytes)
    assert sizes_mib(allocator) == [[1, 1 - 512 / MIB, 512 / MIB]]
    assert allocator.reserved_bytes == 2 * MIB


def test_the_smallest_hole_that_is_enough() -> None:
    """Holes of 4, 6 and 8 MiB: 5 MiB go into the one of 6, whose rest of 1 MiB stays on. Source: get_free_block."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MIB))  # all that follows is cut from one segment
    holes = []
    for mib in (8, 4, 6):
        holes.append(allocator.malloc(mib * MIB))
        allocator.malloc(2 * MIB)  # keeps the holes apart
    for address in holes:
        allocator.free(address)
    assert allocator.malloc(5 * MIB) == holes[2]
    assert allocator.allocated_bytes == 12 * MIB
    assert allocator.malloc(4 * MIB - 512) == holes[1]
    assert allocator.malloc(4 * MIB) == holes[0]  # the rest of 4 MiB is split off
    assert allocator.malloc(4 * MIB) == holes[0] + 4 * MIB


def test_the_lowest_address_among_equals() -> None:
    """Source: BlockComparatorSize: stream, then size, then address."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(12 * MIB) for _ in range(3)]
    for address in (blocks[2], blocks[0], blocks[1]):
        allocator.free(address)
    assert [allocator.malloc(12 * MIB) for _ in range(3)] == blocks


def test_free_neighbours_grow_together() -> None:
    """The middle one, freed last, joins both sides. Source: free_block, try_merge_blocks."""
    allocator = CachingAllocator()
    first, middle, last = (allocator.malloc(size * MIB) for size in (4, 6, 8))
    allocator.free(first)
    allocator.free(last)
    assert sizes_mib(allocator) == [[-4, 6, -10]]
    assert allocator.inactive_split_bytes == 14 * MIB
    allocator.free(middle)
    assert sizes_mib(allocator) == [[-20]]
    assert allocator.inactive_split_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_stream_keeps_its_blocks() -> None:
    """A hole of one stream serves no other. Source: get_free_block: the found block's stream must be the request's."""
    allocator = CachingAllocator()
    address = allocator.malloc(16 * MIB, stream=1)
    allocator.free(address)
    assert allocator.malloc(16 * MIB, stream=2) != address
    assert allocator.malloc(16 * MIB, stream=1) == address
    assert [segment.stream for segment in allocator.segments()] == [1, 2]


def test_a_block_used_by_another_stream_waits() -> None:
    """Freed but active until the event passes; requested bytes go with it. Source: recordStream, free, free_block."""
    allocator = CachingAllocator()
    address = allocator.malloc(16 * MIB)
    allocator.record_stream(address, 0)  # its own stream: no need to wait
    allocator.free(address)
    assert allocator.active_bytes == 0
    address = allocator.malloc(16 * MIB)
    allocator.record_stream(address, 5)
    allocator.free(address)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 16 * MIB)
    assert allocator.requested_bytes == 16 * MIB
    assert allocator.segments()[0].blocks[0].state == "active_awaiting_free"
    other = allocator.malloc(16 * MIB)
    assert other != address
    assert allocator.peak_active_bytes == 32 * MIB
    assert allocator.peak_allocated_bytes == 16 * MIB
    allocator.process_events()
    assert allocator.active_bytes == 16 * MIB
    assert allocator.malloc(16 * MIB) == address
    with pytest.raises(MemplanError, match="Nothing waits"):
        allocator.process_events(address)


def test_a_retry_gives_all_cached_segments_back() -> None:
    """30 MiB cached in 40: 32 more do not fit until they go. Source: malloc, release_cached_blocks, alloc_block."""
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(32 * MIB)
    stats = allocator.stats
    assert (stats.num_alloc_retries, stats.num_ooms) == (1, 0)
    assert (stats.num_device_allocs, stats.num_device_frees) == (2, 1)
    assert (stats.reserved_bytes, stats.peak_reserved_bytes) == (32 * MIB, 32 * MIB)


def test_a_retry_waits_for_streams() -> None:
    """Source: release_cached_blocks calls synchronize_and_free_events first."""
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    address = allocator.malloc(30 * MIB)
    allocator.record_stream(address, 3)
    allocator.free(address)
    allocator.malloc(32 * MIB)
    assert allocator.active_bytes == 32 * MIB


def test_out_of_memory_says_how_much_of_what() -> None:
    """A segment that is partly in use cannot go: 20 of 40 MiB stay reserved. Source: malloc, release_blocks."""
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.malloc(4 * MIB)
    allocator.free(allocator.malloc(18 * MIB))
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(21 * MIB)
    error = caught.value
    assert error.requested_bytes == 21 * MIB
    assert error.segment_bytes == 22 * MIB
    assert (error.allocated_bytes, error.reserved_bytes, error.free_bytes) == (4 * MIB, 20 * MIB, 20 * MIB)
    assert error.message == (
        "Out of memory: 21.00 MiB were asked for, which needs 22.00 MiB from the driver, while 20.00 MiB of 40.00 MiB "
        "are free, 4.00 MiB are allocated and 16.00 MiB are reserved but not allocated."
    )
    stats = allocator.stats
    assert (stats.num_alloc_retries, stats.num_ooms, stats.num_device_frees) == (1, 1, 1)
    check(allocator)
    allocator.malloc(20 * MIB)  # goes on


def test_peaks_begin_anew() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(30 * MIB)
    allocator.malloc(3 * MIB)
    allocator.free(address)
    allocator.empty_cache()
    assert allocator.peak_reserved_bytes == 50 * MIB
    allocator.reset_peak()
    stats = allocator.stats
    assert stats.peak_allocated_bytes == stats.peak_active_bytes == stats.peak_requested_bytes == 3 * MIB
    assert stats.peak_reserved_bytes == 20 * MIB


@given(steps=workloads(), text=st.sampled_from(SETTINGS), capacity=st.sampled_from((None, 60 * MIB, 150 * MIB)))
@settings(max_examples=300, deadline=None)
def test_invariants(steps: list[Step], text: str, capacity: int | None) -> None:
    """After every step; and when all is freed, nothing is allocated, and nothing reserved once the cache is empty."""
    allocator = CachingAllocator(AllocatorConfig.parse(text), capacity_bytes=capacity)
    player = Player(allocator)
    for step in steps:
        player.do(step)
        check(allocator)
        assert capacity is None or allocator.reserved_bytes <= capacity
    for address in player.live:
        allocator.free(address)
    allocator.process_events()
    check(allocator)
    assert allocator.allocated_bytes == allocator.active_bytes == allocator.requested_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == ()


@given(steps=workloads(max_size=120))
@settings(max_examples=200, deadline=None)
def test_a_slow_twin_places_every_block_alike(steps: list[Step]) -> None:
    """Every address, against one list of ranges that is searched from end to end."""
    allocator, twin = CachingAllocator(), SlowTwin()
    player = Player(allocator)
    for step in steps:
        if step[0] == "malloc":
            assert player.do(step) == twin.malloc(*step[1:])
        elif step[0] == "free" and player.live:
            twin.free(player.live[step[1] % len(player.live)])
            player.do(step)


@given(steps=workloads(), requests=st.lists(st.sampled_from((700, 3 * MIB, 12 * MIB)), max_size=6))
@settings(max_examples=100, deadline=None)
def test_what_it_takes_over_goes_on_alike(steps: list[Step], requests: list[int]) -> None:
    """A copy made from a snapshot has the same bytes and segments, and places what the cache can serve alike."""
    allocator, copy = CachingAllocator(), CachingAllocator()
    player = Player(allocator)
    for step in steps:
        player.do(step)
    copy.restore(allocator.segments())
    check(copy)
    assert copy.segments() == allocator.segments()
    for num_bytes in requests:
        before = allocator.stats.num_device_allocs
        address = allocator.malloc(num_bytes)
        if allocator.stats.num_device_allocs != before:
            break  # a new segment has a made-up address in each
        assert copy.malloc(num_bytes) == address


def test_the_check_can_fail() -> None:
    """A block that is a byte too long, a stale total and a forgotten merge are all seen."""
    allocator = CachingAllocator()
    address = allocator.malloc(4 * MIB)
    block = allocator._live[address]
    check(allocator)
    block.num_bytes += 512
    with pytest.raises(AssertionError):
        check(allocator)
    block.num_bytes -= 512
    allocator.allocated_bytes += 512
    with pytest.raises(AssertionError):
        check(allocator)
    allocator.allocated_bytes -= 512
    allocator.malloc(4 * MIB)
    block.state = 0
    with pytest.raises(AssertionError):
        check(allocator)
