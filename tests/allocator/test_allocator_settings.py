"""What each setting changes, by hand with small numbers.

Sources are functions of c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
"""

import pytest
from allocations import check, sizes_mib

from memplan.allocator.blocks import OutOfMemory
from memplan.allocator.caching import CachingAllocator
from memplan.allocator.config import AllocatorConfig
from memplan.units import MIB


def test_a_share_of_the_card_is_a_limit() -> None:
    """A segment counts in full against the limit. Source: setMemoryFraction, alloc_block."""
    config = AllocatorConfig.parse("per_process_memory_fraction:0.5")
    allocator = CachingAllocator(config, capacity_bytes=79 * MIB)
    allocator.malloc(2 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(20 * MIB)
    assert caught.value.free_bytes == 79 * MIB // 2 - 20 * MIB


def test_oversize_blocks_serve_only_large_requests() -> None:
    """max_split_size 64 MiB: a cached block of 100 serves neither 30 (too small) nor 80 (20 MiB of waste) but 82.

    Source: get_free_block, should_split; max_non_split_rounding_size is 20 MiB.
    """
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:64"))
    cached = allocator.malloc(100 * MIB)
    allocator.free(cached)
    assert allocator.malloc(30 * MIB) != cached
    assert allocator.malloc(80 * MIB) != cached
    assert allocator.allocated_bytes == 110 * MIB
    assert allocator.malloc(82 * MIB) == cached
    assert allocator.allocated_bytes == 210 * MIB
    assert allocator.reserved_bytes == 210 * MIB


def test_only_enough_oversize_blocks_go() -> None:
    """Cached 70, 80 and 90 MiB and 12 in use of 260: 110 more take the largest two. No retry is counted.

    Source: release_available_cached_blocks, alloc_block with isRetry false.
    """
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:64"), capacity_bytes=260 * MIB)
    addresses = [allocator.malloc(mib * MIB) for mib in (70, 80, 90)]
    allocator.malloc(12 * MIB)
    for address in addresses:
        allocator.free(address)
    allocator.malloc(110 * MIB)
    assert sizes_mib(allocator) == [[-70], [12], [110]]
    assert allocator.stats.num_alloc_retries == 0


def test_one_oversize_block_that_is_enough_goes_alone() -> None:
    """Cached 70, 120 and 160 MiB in 400: 100 more take the one of 120. Source: release_available_cached_blocks."""
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:64"), capacity_bytes=400 * MIB)
    for address in [allocator.malloc(mib * MIB) for mib in (70, 120, 160)]:
        allocator.free(address)
    allocator.malloc(100 * MIB)
    assert sizes_mib(allocator) == [[-70], [-160], [100]]
    assert allocator.stats.num_alloc_retries == 0


def test_garbage_is_collected_by_age() -> None:
    """82 MiB are reserved where 80 of 100 may be: what was unused for longer than the mean goes, the rest stays.

    The 30 MiB are free since two searches of the large pool, the 40 MiB since one, the mean is 1.5.
    Source: garbage_collect_cached_blocks, BlockPool::get_free_blocks_call_count.
    """
    text = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5"
    allocator = CachingAllocator(AllocatorConfig.parse(text), capacity_bytes=200 * MIB)
    old, _, young = (allocator.malloc(mib * MIB) for mib in (30, 12, 40))
    allocator.free(old)
    allocator.free(young)
    allocator.free(allocator.malloc(40 * MIB))
    assert sizes_mib(allocator) == [[-30], [12], [-40]]
    allocator.malloc(42 * MIB)
    assert sizes_mib(allocator) == [[12], [-40], [42]]
    assert allocator.stats.num_alloc_retries == 0


def test_nothing_is_collected_without_a_limit() -> None:
    """Source: malloc: garbage is collected only when allowed_memory_maximum is set."""
    allocator = CachingAllocator(AllocatorConfig.parse("garbage_collection_threshold:0.1"), capacity_bytes=200 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(50 * MIB)
    assert allocator.reserved_bytes == 90 * MIB


def test_expandable_segments_grow_by_pages() -> None:
    """30 MiB map two pages of 20; 25 more take the free 10 and map one page; both in one segment.

    Source: find_expandable_block, map_block, try_allocate_expandable_block.
    """
    allocator = CachingAllocator(AllocatorConfig.parse("expandable_segments:True"))
    first = allocator.malloc(30 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (40 * MIB, 30 * MIB)
    second = allocator.malloc(25 * MIB)
    assert second == first + 30 * MIB
    assert sizes_mib(allocator) == [[30, 25, -5]]
    assert allocator.stats.num_device_allocs == 2
    allocator.malloc(1000)
    assert [segment.num_bytes // MIB for segment in allocator.segments()] == [60, 2]
    assert allocator.inactive_split_bytes == 0


def test_expandable_segments_split_down_to_512_bytes() -> None:
    """Source: should_split: remaining >= kMinBlockSize when expandable segments are active, in both pools."""
    allocator = CachingAllocator(AllocatorConfig.parse("expandable_segments:True"))
    allocator.malloc(20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512


def test_free_pages_go_and_come_back_lowest_first() -> None:
    """Blocks of 30, 30 and 20 MiB, the first two freed: of the free 60 three pages go. 35 MiB then map the lowest two.

    Source: unmap_block, release_blocks, find_expandable_block.
    """
    allocator = CachingAllocator(AllocatorConfig.parse("expandable_segments:True"))
    first, second, last = (allocator.malloc(mib * MIB) for mib in (30, 30, 20))
    allocator.free(first)
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.malloc(35 * MIB) == first
    assert sizes_mib(allocator) == [[35, -5], [20]]
    allocator.free(first)
    allocator.free(last)
    allocator.empty_cache()
    assert (allocator.segments(), allocator.reserved_bytes) == ((), 0)


def test_pages_partly_in_use_stay() -> None:
    """Of 20 to 50 MiB only the page from 20 to 40 is whole. Source: ExpandableSegment::unmap rounds inwards."""
    allocator = CachingAllocator(AllocatorConfig.parse("expandable_segments:True"))
    blocks = [allocator.malloc(mib * MIB) for mib in (15, 35, 10)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert sizes_mib(allocator) == [[15, -5], [-10, 10]]
    assert allocator.malloc(35 * MIB) == blocks[1]
    assert sizes_mib(allocator) == [[15, 35, 10]]


def test_expandable_segments_run_full() -> None:
    """Pages are whole: 41 MiB need three of 20, the card has 50 MiB. Source: ExpandableSegment::map."""
    allocator = CachingAllocator(AllocatorConfig.parse("expandable_segments:True"), capacity_bytes=50 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(41 * MIB)
    assert allocator.reserved_bytes == 0
    allocator.malloc(40 * MIB)
    check(allocator)
