"""What goes back to the driver before a request fails: old segments, oversize ones.

Source: c10/cuda/CUDACachingAllocator.cpp, torch 2.13, in the functions named below.
"""

from bisect import bisect_left

from memplan.allocator.blocks import KEY_SHIFT, Block, DeviceMemory, FreeList, Pool
from memplan.allocator.config import AllocatorConfig


def release_segment(block: Block, device: DeviceMemory) -> None:
    """Gives the segment back that `block`, free and unsplit, is. Source: release_block."""
    block.free_list.remove(block)
    device.release(block.address, block.num_bytes)


def release_oversize(free: FreeList, num_bytes: int, device: DeviceMemory, config: AllocatorConfig) -> bool:
    """Whether giving back oversize blocks freed `num_bytes`: the smallest that is enough, else the largest in turn.

    Source: release_available_cached_blocks.
    """
    limit_bytes = config.max_split_size_bytes
    if limit_bytes is None or config.expandable_segments:
        return False
    wanted_bytes = max(num_bytes, limit_bytes)
    index = bisect_left(free.keys, wanted_bytes << KEY_SHIFT)
    if index < len(free.blocks):
        release_segment(free.blocks[index], device)
        return True
    released_bytes = 0
    while free.blocks and released_bytes < wanted_bytes and free.blocks[-1].num_bytes >= limit_bytes:
        released_bytes += free.blocks[-1].num_bytes
        release_segment(free.blocks[-1], device)
    return released_bytes >= wanted_bytes


def collect_garbage(pool: Pool, target_bytes: int, device: DeviceMemory) -> None:
    """Gives back free unsplit segments, the longest unused first, until `target_bytes` are freed.

    Age is the number of searches of the pool since the block became free; a round takes all of at least the mean age,
    so that more than the target may go.

    Source: garbage_collect_cached_blocks.
    """
    ages = [(pool.num_searches - block.num_searches_before, block) for block in pool.free_blocks()]
    ages = [(age, block) for age, block in ages if not block.is_split]
    while target_bytes > 0 and ages:
        mean_age = sum(age for age, _ in ages) / len(ages)
        for age, block in ages:
            if age >= mean_age:
                target_bytes -= block.num_bytes
                release_segment(block, device)
        ages = [(age, block) for age, block in ages if age < mean_age]
