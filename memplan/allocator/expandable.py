"""Expandable segments: a virtual range per pool and stream, with pages put behind it as it grows.

Source: Note [Expandable Segments] and the functions named below, c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
"""

from bisect import insort

from memplan.allocator.blocks import FREE, UNMAPPED, Block, DeviceMemory, FreeList, Pages
from memplan.allocator.config import SMALL_SEGMENT_BYTES, AllocatorConfig

UNLIMITED_BYTES = 1 << 44
"""Virtual range of a segment on a card whose capacity is not given."""


def take_block(free: FreeList, num_bytes: int, device: DeviceMemory, config: AllocatorConfig) -> Block | None:
    """A block of at least `num_bytes` at the lowest address where pages can be added, or None when the card is full.

    What was mapped before the card was full stays mapped, and free.

    Source: try_allocate_expandable_block.
    """
    block = _lowest(free, num_bytes) or _reserve(free, device, config)
    if block.state == UNMAPPED and not _map(block, min(block.num_bytes, num_bytes), device):
        return None
    while block.num_bytes < num_bytes:
        following = block.next
        assert following is not None
        if not _map(following, min(num_bytes - block.num_bytes, following.num_bytes), device):
            return None
        block = following
    free.remove(block)
    return block


def unmap_block(block: Block, device: DeviceMemory) -> None:
    """Gives the whole pages inside a free block back to the driver; what is left of it at both ends stays free.

    A segment without any page is forgotten.

    Source: unmap_block, release_expandable_segment.
    """
    free, pages = block.free_list, block.pages
    assert pages is not None
    offset = block.address - pages.address
    start = pages.address + -(-offset // pages.page_bytes) * pages.page_bytes
    end = pages.address + (offset + block.num_bytes) // pages.page_bytes * pages.page_bytes
    if start >= end:
        return
    free.remove(block)
    before_bytes = start - block.address
    after_bytes = block.address + block.num_bytes - end
    if before_bytes:
        before = Block(block.address, before_bytes, free, FREE, pages)
        before.link(block.prev, block)
        free.insert(before)
    if after_bytes:
        after = Block(end, after_bytes, free, FREE, pages)
        after.link(block, block.next)
        free.insert(after)
    block.address, block.num_bytes, block.state = start, end - start, UNMAPPED
    device.unmap(start, end - start)
    _merge(block)
    if block.is_split:
        insort(free.unmapped, block, key=_address)


def _lowest(free: FreeList, num_bytes: int) -> Block | None:
    """The first block of the lowest run of free and unmapped blocks with room for `num_bytes`.

    Source: find_expandable_block.
    """
    for unmapped in free.unmapped:
        first = unmapped.prev if unmapped.prev is not None and unmapped.prev.state == FREE else unmapped
        room_bytes = 0
        block: Block | None = first
        while room_bytes < num_bytes and block is not None and block.state in (FREE, UNMAPPED):
            room_bytes += block.num_bytes
            block = block.next
        if room_bytes >= num_bytes:
            return first
    return None


def _reserve(free: FreeList, device: DeviceMemory, config: AllocatorConfig) -> Block:
    """A new virtual range of 9/8 of the card, unmapped. Source: the constructor of ExpandableSegment."""
    page_bytes = SMALL_SEGMENT_BYTES if free.pool.is_small else config.large_segment_bytes
    capacity_bytes = UNLIMITED_BYTES if device.capacity_bytes is None else device.capacity_bytes
    num_bytes = -(-(capacity_bytes + capacity_bytes // 8) // page_bytes) * page_bytes
    pages = Pages(device.reserve_addresses(num_bytes), num_bytes, page_bytes)
    block = Block(pages.address, num_bytes, free, UNMAPPED, pages)
    insort(free.unmapped, block, key=_address)
    return block


def _map(block: Block, num_bytes: int, device: DeviceMemory) -> bool:
    """Whether pages for the first `num_bytes` of an unmapped block could be had; it is then free and merged.

    Source: map_block.
    """
    free, pages = block.free_list, block.pages
    assert pages is not None
    mapped_bytes = -(-num_bytes // pages.page_bytes) * pages.page_bytes
    if not device.map(block.address, mapped_bytes):
        return False
    free.unmapped.remove(block)
    block.state = FREE
    if mapped_bytes < block.num_bytes:
        rest = Block(block.address + mapped_bytes, block.num_bytes - mapped_bytes, free, UNMAPPED, pages)
        rest.link(block, block.next)
        block.num_bytes = mapped_bytes
        insort(free.unmapped, rest, key=_address)
    _merge(block)
    free.insert(block)
    return True


def _merge(block: Block) -> None:
    """Grows `block`, which stands in no list, over neighbours of the same state. Source: try_merge_blocks."""
    for neighbour in (block.prev, block.next):
        if neighbour is not None and neighbour.state == block.state:
            if block.state == FREE:
                block.free_list.remove(neighbour)
            else:
                block.free_list.unmapped.remove(neighbour)
            block.absorb(neighbour)


def _address(block: Block) -> int:
    """Where `block` begins."""
    return block.address
