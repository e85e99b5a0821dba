"""The allocator's blocks as a snapshot, and back."""

from collections.abc import Iterable

from memplan.allocator.blocks import (
    FREE,
    STATES,
    UNMAPPED,
    Block,
    BlockInfo,
    DeviceMemory,
    FreeList,
    SegmentInfo,
)
from memplan.errors import MemplanError


def segment_infos(blocks: Iterable[Block]) -> tuple[SegmentInfo, ...]:
    """The segments that `blocks`, all mapped ones in any order, make up; of an expandable one each mapped range.

    Source: snapshot, c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
    """
    heads = [block for block in blocks if block.prev is None or block.prev.state == UNMAPPED]
    return tuple(_segment_info(head) for head in sorted(heads, key=lambda block: block.address))


def place_segment(segment: SegmentInfo, free: FreeList, device: DeviceMemory) -> list[Block]:
    """The active blocks of `segment`, linked with its free ones, which stand in `free`."""
    if segment.is_expandable:
        raise MemplanError("Expandable segments cannot be taken over from a snapshot: their virtual range is unknown.")
    device.adopt(segment.num_bytes)
    active: list[Block] = []
    prev: Block | None = None
    for info in segment.blocks:
        block = Block(info.address, info.num_bytes, free, STATES.index(info.state), None)
        block.link(prev, None)
        prev = block
        if block.state == FREE:
            free.insert(block)
        else:
            block.requested_bytes = info.requested_bytes
            active.append(block)
    return active


def _segment_info(head: Block) -> SegmentInfo:
    """The mapped range that begins at `head`."""
    infos: list[BlockInfo] = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        requested_bytes = 0 if block.state == FREE else block.requested_bytes
        infos.append(
            BlockInfo(
                address=block.address,
                num_bytes=block.num_bytes,
                requested_bytes=requested_bytes,
                state=STATES[block.state],
            )
        )
        block = block.next
    return SegmentInfo(
        address=head.address,
        num_bytes=sum(info.num_bytes for info in infos),
        stream=head.free_list.stream,
        pool=head.free_list.pool.name,
        is_expandable=head.pages is not None,
        blocks=tuple(infos),
    )
