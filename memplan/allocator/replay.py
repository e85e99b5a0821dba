"""A history that CUDA recorded, run again through the model: every address must come out the same.

The history is `torch.cuda.memory._snapshot()` as a dict: `device_traces` with events, `segments` with blocks. It need
not begin at an empty device: what was there before is the end with all events taken back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.allocator.blocks import AWAITING_FREE, STATES, DeviceMemory, SegmentInfo
from memplan.allocator.caching import CachingAllocator
from memplan.allocator.config import AllocatorConfig
from memplan.allocator.rewind import device_segments, segments_before

Range = tuple[int, int]
"""Address and bytes."""
_GROWS = ("segment_alloc", "segment_map")
_SHRINKS = ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDifference:
    """One thing that the model did otherwise than the recording."""

    at: int
    """Index of the event in the device's trace; the number of events for the state at the end."""
    recorded: str
    """What was recorded."""
    modelled: str
    """What the model did instead."""


class RecordedDevice(DeviceMemory):
    """A card without end that hands out the recorded addresses and notes what it is asked for."""

    __slots__ = ("addresses", "grown", "shrunk")

    def __init__(self) -> None:
        super().__init__(None)
        self.addresses: list[int] = []
        self.grown: list[Range] = []
        self.shrunk: list[Range] = []

    def allocate(self, num_bytes: int) -> int | None:
        """The next recorded address, or a made-up one when there is none; notes the segment."""
        address = super().allocate(num_bytes)
        assert address is not None
        self.grown.append((address, num_bytes))
        return address

    def release(self, address: int, num_bytes: int) -> None:
        """Takes back and notes a segment."""
        super().release(address, num_bytes)
        self.shrunk.append((address, num_bytes))

    def map(self, address: int, num_bytes: int) -> bool:
        """Maps and notes pages."""
        self.grown.append((address, num_bytes))
        return super().map(address, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes back and notes pages."""
        super().unmap(address, num_bytes)
        self.shrunk.append((address, num_bytes))

    def reserve_addresses(self, num_bytes: int) -> int:
        """The next recorded address, or a made-up one when there is none."""
        return self.addresses.pop(0) if self.addresses else super().reserve_addresses(num_bytes)


def replay_snapshot(
    snapshot: Mapping[str, Any], device: int = 0, config: AllocatorConfig | None = None
) -> tuple[ReplayDifference, ...]:
    """Where the model parts from the history of `device` in `snapshot`; empty when it ends with the same segments.

    Each allocation must land at the recorded address, each request to the driver must be the recorded one, and the
    segments and blocks at the end must be the same. The replay stops at the first event that differs.

    Counts: allocations, frees that waited for a stream, segments, pages, releases of all cached segments.
    Leaves out: releases by garbage collection or of oversize blocks, whose cause the history does not tell; private
    pools, and expandable segments from before the history began, for which it raises MemplanError.
    Checked: tests/trace/test_allocator_replay.py.

    Args:
        snapshot: `torch.cuda.memory._snapshot()`, or the same read from a file.
        device: Index of the card.
        config: The settings it was recorded under; what the snapshot says when not given.
    """
    if config is None:
        config = AllocatorConfig.parse(snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", ""))
    events = snapshot["device_traces"][device]
    recorded = device_segments(snapshot, device)
    card = RecordedDevice()
    allocator = CachingAllocator(config, device=card)
    before = segments_before(events, recorded, config)
    allocator.restore(before)
    waiting = {block.address for segment in before for block in segment.blocks if block.state == STATES[AWAITING_FREE]}
    difference = _replay_events(events, allocator, card, waiting)
    return (difference,) if difference else tuple(_compare(recorded, allocator.segments(), len(events)))


def _replay_events(
    events: Sequence[Mapping[str, Any]], allocator: CachingAllocator, card: RecordedDevice, waiting: set[int]
) -> ReplayDifference | None:
    """The first event at which `allocator` does something else, or None; `waiting` are frees that are not complete."""
    grown: list[Range] = []
    shrunk: list[Range] = []
    for at, event in enumerate((*events, {"action": "end", "addr": 0, "size": 0})):
        action, address, num_bytes = event["action"], event["addr"], event["size"]
        if shrunk and action not in _SHRINKS:
            allocator.empty_cache()
            waiting.clear()
            if sorted(shrunk) != sorted(card.shrunk):
                return _range_difference(at, "given back", shrunk, card.shrunk)
            shrunk, card.shrunk = [], []
        if action in _GROWS:
            grown.append((address, num_bytes))
        elif action in _SHRINKS:
            shrunk.append((address, num_bytes))
        elif action == "alloc":
            card.addresses = [start for start, _ in grown]
            placed = allocator.malloc(num_bytes, event["stream"])
            if grown != card.grown:
                return _range_difference(at, "taken", grown, card.grown)
            if placed != address:
                return ReplayDifference(
                    at=at, recorded=f"{num_bytes} bytes at {address:#x}", modelled=f"at {placed:#x}"
                )
            grown, card.grown = [], []
        elif action == "free_requested":
            following = events[at + 1] if at + 1 < len(events) else {"action": "", "addr": 0}
            if (following["action"], following["addr"]) != ("free_completed", address):
                allocator.record_stream(address, event["stream"] + 1)
                waiting.add(address)
            allocator.free(address)
        elif action == "free_completed" and address in waiting:
            waiting.remove(address)
            allocator.process_events(address)
    return None


def _range_difference(at: int, verb: str, recorded: list[Range], modelled: list[Range]) -> ReplayDifference:
    """The difference between two lists of segments that were taken or given back; what both have is left out."""
    texts = []
    for ranges, others in ((recorded, modelled), (modelled, recorded)):
        only = [f"{num_bytes} bytes at {address:#x}" for address, num_bytes in sorted(set(ranges) - set(others))]
        texts.append(f"{verb}: {', '.join(only) or 'nothing more'}")
    return ReplayDifference(at=at, recorded=texts[0], modelled=texts[1])


def _compare(recorded: Sequence[SegmentInfo], modelled: Sequence[SegmentInfo], at: int) -> Iterator[ReplayDifference]:
    """The segments that are not the same at the end."""
    by_address = {segment.address: segment for segment in modelled}
    for segment in recorded:
        twin = by_address.pop(segment.address, None)
        if segment != twin:
            yield ReplayDifference(at=at, recorded=str(segment), modelled=str(twin))
    for segment in by_address.values():
        yield ReplayDifference(at=at, recorded="no segment", modelled=str(segment))
