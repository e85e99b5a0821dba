"""What an allocator held before a recorded history began: its end, with every event taken back."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.allocator.blocks import ALLOCATED, AWAITING_FREE, FREE, STATES, BlockInfo, SegmentInfo
from memplan.allocator.config import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from memplan.errors import MemplanError

_STATE_NAMES = {"active_pending_free": STATES[AWAITING_FREE]}
"""Names that other versions of torch use."""


@dataclass(slots=True)
class _Active:
    """An active block on the way back."""

    num_bytes: int | None
    """Its bytes; None when it was freed later, which the events do not tell."""
    requested_bytes: int
    """Bytes asked for."""
    state: str
    """One of `STATES`."""


def device_segments(snapshot: Mapping[str, Any], device: int) -> tuple[SegmentInfo, ...]:
    """The segments of `device` in a snapshot of torch, by address; MemplanError when one has a private pool."""
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    if any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in segments):
        raise MemplanError("The snapshot has private pools (CUDA graphs, MemPool), which are not modelled.")
    return tuple(_segment_info(segment) for segment in sorted(segments, key=lambda segment: int(segment["address"])))


def segments_before(
    events: Sequence[Mapping[str, Any]], segments: Sequence[SegmentInfo], config: AllocatorConfig
) -> tuple[SegmentInfo, ...]:
    """The segments from which `events` lead to `segments`; MemplanError when they cannot.

    The bytes of a block that was freed are not recorded. They follow from what was asked for, and in the large pool
    from what lay behind it: a gap too small to have been split off belongs to the block. A block with a large gap
    behind it, in which nothing was allocated before it was freed, is taken to have no such rest.
    """
    ranges = {segment.address: segment for segment in segments if not segment.is_expandable}
    mapped_bytes = sum(segment.num_bytes for segment in segments if segment.is_expandable)
    active = {
        block.address: _Active(block.num_bytes, block.requested_bytes, block.state)
        for segment in segments
        for block in segment.blocks
        if block.state != STATES[FREE]
    }
    order = sorted(active)
    for event in reversed(events):
        action, address, num_bytes = event["action"], event["addr"], event["size"]
        if action == "alloc":
            _pop(active, address)
            index = bisect_left(order, address)
            del order[index]
            if index:
                _settle(active[order[index - 1]], address - order[index - 1], config)
        elif action == "free_completed":
            active[address] = _Active(None, num_bytes, STATES[AWAITING_FREE])
            insort(order, address)
        elif action == "free_requested":
            _get(active, address).state = STATES[ALLOCATED]
        elif action == "segment_alloc":
            _pop(ranges, address)
        elif action == "segment_free":
            ranges[address] = SegmentInfo(
                address=address,
                num_bytes=num_bytes,
                stream=event["stream"],
                pool="small" if num_bytes == SMALL_SEGMENT_BYTES else "large",
                is_expandable=False,
                blocks=(),
            )
        elif action == "segment_map":
            mapped_bytes -= num_bytes
        elif action == "segment_unmap":
            mapped_bytes += num_bytes
    if mapped_bytes:
        raise MemplanError("The history begins inside expandable segments; record it from the start of the process.")
    return _filled(ranges, active, config)


def _settle(block: _Active, room_bytes: int, config: AllocatorConfig) -> None:
    """Notes the bytes of a freed large block, `room_bytes` before the next one, when the gap between is a rest."""
    rounded_bytes = config.round_bytes(block.requested_bytes)
    if block.num_bytes is None and rounded_bytes > SMALL_BYTES and 0 <= room_bytes - rounded_bytes <= SMALL_BYTES:
        block.num_bytes = room_bytes


def _filled(
    ranges: Mapping[int, SegmentInfo], active: Mapping[int, _Active], config: AllocatorConfig
) -> tuple[SegmentInfo, ...]:
    """`ranges` by address with their active blocks, and free ones in the gaps."""
    addresses = sorted(active)
    index = 0
    filled: list[SegmentInfo] = []
    for _, segment in sorted(ranges.items()):
        end = segment.address + segment.num_bytes
        blocks: list[BlockInfo] = []
        cursor = segment.address
        while index < len(addresses) and addresses[index] < end:
            address = addresses[index]
            index += 1
            if address < cursor:
                raise _inconsistent(address)
            blocks += _free(cursor, address)
            block = active[address]
            following = addresses[index] if index < len(addresses) else end
            num_bytes = block.num_bytes or _block_bytes(
                block.requested_bytes, min(following, end) - address, segment.pool, config
            )
            blocks.append(
                BlockInfo(
                    address=address,
                    num_bytes=num_bytes,
                    requested_bytes=block.requested_bytes,
                    state=block.state,
                )
            )
            cursor = address + num_bytes
        blocks += _free(cursor, end)
        filled.append(
            SegmentInfo(
                address=segment.address,
                num_bytes=segment.num_bytes,
                stream=segment.stream,
                pool=segment.pool,
                is_expandable=False,
                blocks=tuple(blocks),
            )
        )
    if index < len(addresses):
        raise _inconsistent(addresses[index])
    return tuple(filled)


def _block_bytes(requested_bytes: int, room_bytes: int, pool: str, config: AllocatorConfig) -> int:
    """Bytes of a block with `room_bytes` up to the next active one: as rounded, or all when no rest is split off."""
    rounded_bytes = config.round_bytes(requested_bytes)
    least_bytes = MIN_BLOCK_BYTES if pool == "small" else SMALL_BYTES + 1
    oversize = config.max_split_size_bytes is not None and rounded_bytes >= config.max_split_size_bytes
    return room_bytes if oversize or room_bytes - rounded_bytes < least_bytes else rounded_bytes


def _free(start: int, end: int) -> list[BlockInfo]:
    """The free block from `start` to `end`, or none."""
    if start == end:
        return []
    return [BlockInfo(address=start, num_bytes=end - start, requested_bytes=0, state=STATES[FREE])]


def _segment_info(segment: Mapping[str, Any]) -> SegmentInfo:
    """A segment of a snapshot of torch."""
    blocks: list[BlockInfo] = []
    address = int(segment["address"])
    for block in segment["blocks"]:
        state = _STATE_NAMES.get(block["state"], block["state"])
        requested_bytes = 0 if state == STATES[FREE] else block.get("requested_size", block["size"])
        blocks.append(BlockInfo(address=address, num_bytes=block["size"], requested_bytes=requested_bytes, state=state))
        address += block["size"]
    return SegmentInfo(
        address=segment["address"],
        num_bytes=segment["total_size"],
        stream=segment["stream"],
        pool=segment["segment_type"],
        is_expandable=segment.get("is_expandable", False),
        blocks=tuple(blocks),
    )


def _pop(held: dict[int, Any], address: int) -> None:
    """Takes `address` out of `held`."""
    _get(held, address)
    del held[address]


def _get(held: Mapping[int, Any], address: int) -> Any:
    """What `held` has at `address`; MemplanError when there is nothing."""
    if address not in held:
        raise _inconsistent(address)
    return held[address]


def _inconsistent(address: int) -> MemplanError:
    """The error of a history that does not lead to its segments."""
    return MemplanError(
        f"The history does not lead to the snapshot's segments, first at {address:#x}.",
        "Take the snapshot while the history is still recorded.",
    )
