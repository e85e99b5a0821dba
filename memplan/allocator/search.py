"""Which free block a request takes when settings change the best fit."""

from memplan.allocator.blocks import UNMAPPED, Block, FreeList
from memplan.allocator.config import AllocatorConfig


def choose(free: FreeList, index: int, num_bytes: int, config: AllocatorConfig) -> int:
    """Index of the free block to take for `num_bytes`, or one past the last when none may be taken.

    `index` is that of the best fit. Of expandable segments' blocks the one with the least room to grow is taken.
    An oversize block serves no request under the limit, and one at or over it only when little is wasted.

    Source: get_free_block, c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
    """
    blocks = free.blocks
    past = len(blocks)
    if index == past:
        return past
    if config.expandable_segments:
        while index + 1 < past and _room_bytes(blocks[index + 1]) < _room_bytes(blocks[index]):
            index += 1
    limit_bytes = config.max_split_size_bytes
    if limit_bytes is not None:
        found_bytes = blocks[index].num_bytes
        if num_bytes < limit_bytes <= found_bytes:
            return past
        if num_bytes >= limit_bytes and found_bytes >= num_bytes + config.max_non_split_rounding_bytes:
            return past
    return index


def _room_bytes(block: Block) -> int:
    """Bytes that `block` can grow to: its own and the unmapped ones after it."""
    following = block.next
    return block.num_bytes + (following.num_bytes if following is not None and following.state == UNMAPPED else 0)
