"""What the allocator is made of: the card's memory, blocks in address order, free blocks in best-fit order."""

from bisect import bisect_left
from dataclasses import dataclass

from memplan.allocator.config import MIN_BLOCK_BYTES, SMALL_BYTES
from memplan.errors import MemplanError
from memplan.units import format_bytes

FREE, ALLOCATED, AWAITING_FREE, UNMAPPED = range(4)
STATES = ("inactive", "active_allocated", "active_awaiting_free")
"""Names of the first three states in a snapshot. Source: torch/csrc/cuda/Module.cpp, torch 2.13."""
KEY_SHIFT = 64
"""Bits kept for the address in a free block's sort key, which is its size and then its address."""
FIRST_ADDRESS = 1 << 33
GAP_BYTES = 1 << 21
"""Alignment of made-up addresses, and the hole after each segment, so that no two segments touch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """A block in a snapshot."""

    address: int
    """Where it begins."""
    num_bytes: int
    """Its bytes, after rounding."""
    requested_bytes: int
    """Bytes asked for; 0 when inactive."""
    state: str
    """One of `STATES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """A range held from the driver; of an expandable segment, one mapped range."""

    address: int
    """Where it begins."""
    num_bytes: int
    """Its bytes: the sum over its blocks."""
    stream: int
    """The stream that it serves."""
    pool: str
    """`small` or `large`."""
    is_expandable: bool
    """Whether it is part of an expandable segment."""
    blocks: tuple[BlockInfo, ...]
    """Its blocks by address, without gaps."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of its live blocks."""
        return sum(block.num_bytes for block in self.blocks if block.state == STATES[ALLOCATED])

    @property
    def active_bytes(self) -> int:
        """Bytes of its live blocks and of freed ones that wait for a stream."""
        return sum(block.num_bytes for block in self.blocks if block.state != STATES[FREE])

    @property
    def inactive_split_bytes(self) -> int:
        """Its free bytes while others of its blocks are active; 0 for expandable segments, whose pages can go."""
        return 0 if self.is_expandable or not self.active_bytes else self.num_bytes - self.active_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorStats:
    """Bytes now and at most since the last reset of peaks, and counts since the start."""

    requested_bytes: int
    """Bytes asked for by blocks that are active."""
    peak_requested_bytes: int
    """Largest `requested_bytes`."""
    allocated_bytes: int
    """Bytes of live blocks, after rounding."""
    peak_allocated_bytes: int
    """Largest `allocated_bytes`."""
    active_bytes: int
    """Bytes of live blocks and of freed ones that wait for a stream."""
    peak_active_bytes: int
    """Largest `active_bytes`."""
    reserved_bytes: int
    """Bytes held from the driver."""
    peak_reserved_bytes: int
    """Largest `reserved_bytes`."""
    num_alloc_retries: int
    """Requests to the driver that failed and were repeated after all cached segments were given back."""
    num_ooms: int
    """Requests that failed for good."""
    num_device_allocs: int
    """Requests to the driver that were granted, mapped pages included."""
    num_device_frees: int
    """Segments and ranges of pages given back to the driver."""


class OutOfMemory(MemplanError):
    """A request that the card cannot serve, in numbers and one sentence."""

    def __init__(
        self, requested_bytes: int, segment_bytes: int, allocated_bytes: int, reserved_bytes: int, allowed_bytes: int
    ) -> None:
        self.requested_bytes = requested_bytes
        self.segment_bytes = segment_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.free_bytes = allowed_bytes - reserved_bytes
        super().__init__(
            f"Out of memory: {format_bytes(requested_bytes)} were asked for, which needs {format_bytes(segment_bytes)} "
            f"from the driver, while {format_bytes(self.free_bytes)} of {format_bytes(allowed_bytes)} are free, "
            f"{format_bytes(allocated_bytes)} are allocated and {format_bytes(reserved_bytes - allocated_bytes)} are "
            "reserved but not allocated."
        )


class DeviceMemory:
    """The card's memory as the driver deals it out: a count of bytes, and addresses that never repeat."""

    __slots__ = (
        "capacity_bytes",
        "next_address",
        "num_device_allocs",
        "num_device_frees",
        "peak_reserved_bytes",
        "reserved_bytes",
    )

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.next_address = FIRST_ADDRESS
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_device_allocs = self.num_device_frees = 0

    def allocate(self, num_bytes: int) -> int | None:
        """Address of a new segment of `num_bytes`, or None when the card is full."""
        return self.reserve_addresses(num_bytes) if self._take(num_bytes) else None

    def release(self, address: int, num_bytes: int) -> None:
        """Takes back the segment at `address`."""
        self._give(num_bytes)

    def map(self, address: int, num_bytes: int) -> bool:
        """Whether the card had `num_bytes` to put behind `address`."""
        return self._take(num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes back the pages behind `address`."""
        self._give(num_bytes)

    def adopt(self, num_bytes: int) -> None:
        """Counts a segment that is held already."""
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def reserve_addresses(self, num_bytes: int) -> int:
        """First address of a new range of `num_bytes`, with nothing behind it."""
        address = self.next_address
        self.next_address += -(-num_bytes // GAP_BYTES) * GAP_BYTES + GAP_BYTES
        return address

    def _take(self, num_bytes: int) -> bool:
        after = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and after > self.capacity_bytes:
            return False
        self.reserved_bytes = after
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, after)
        self.num_device_allocs += 1
        return True

    def _give(self, num_bytes: int) -> None:
        self.reserved_bytes -= num_bytes
        self.num_device_frees += 1


class Pool:
    """The small or the large pool: how far its blocks are split, and its free blocks by stream."""

    __slots__ = ("free_lists", "is_small", "min_remainder_bytes", "num_searches")

    def __init__(self, *, is_small: bool, splits_fully: bool) -> None:
        self.is_small = is_small
        # Source: should_split, c10/cuda/CUDACachingAllocator.cpp, torch 2.13: 512 bytes or more, else more than 1 MiB.
        self.min_remainder_bytes = MIN_BLOCK_BYTES if is_small or splits_fully else SMALL_BYTES + 1
        self.num_searches = 0
        self.free_lists: dict[int, FreeList] = {}

    @property
    def name(self) -> str:
        """`small` or `large`."""
        return "small" if self.is_small else "large"

    def free_list(self, stream: int) -> "FreeList":
        """The free blocks of `stream`."""
        if stream not in self.free_lists:
            self.free_lists[stream] = FreeList(self, stream)
        return self.free_lists[stream]

    def free_blocks(self) -> "list[Block]":
        """All free blocks, by stream, size and address."""
        return [block for stream in sorted(self.free_lists) for block in self.free_lists[stream].blocks]


class FreeList:
    """Free blocks of one pool and stream by size and then address; the unmapped ranges beside them by address."""

    __slots__ = ("blocks", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def insert(self, block: "Block") -> None:
        """Adds `block`, whose age begins here."""
        block.num_searches_before = self.pool.num_searches
        key = block.num_bytes << KEY_SHIFT | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: "Block") -> None:
        """Takes `block` out; it must not have changed since it was added."""
        index = bisect_left(self.keys, block.num_bytes << KEY_SHIFT | block.address)
        del self.keys[index]
        del self.blocks[index]


class Block:
    """A range of a segment, linked to its neighbours."""

    __slots__ = (
        "address",
        "free_list",
        "next",
        "num_bytes",
        "num_searches_before",
        "pages",
        "prev",
        "requested_bytes",
        "state",
        "streams",
    )

    def __init__(self, address: int, num_bytes: int, free_list: FreeList, state: int, pages: "Pages | None") -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.free_list = free_list
        self.state = state
        self.pages = pages
        self.requested_bytes = 0
        self.num_searches_before = 0
        self.streams: set[int] | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether its segment has other blocks."""
        return self.prev is not None or self.next is not None

    def link(self, prev: "Block | None", next_block: "Block | None") -> None:
        """Puts this block between `prev` and `next_block`, which are neighbours."""
        self.prev, self.next = prev, next_block
        if prev is not None:
            prev.next = self
        if next_block is not None:
            next_block.prev = self

    def absorb(self, neighbour: "Block") -> None:
        """Grows over `neighbour`, which ends to exist."""
        if neighbour is self.prev:
            self.address = neighbour.address
            self.link(neighbour.prev, self.next)
        else:
            self.link(self.prev, neighbour.next)
        self.num_bytes += neighbour.num_bytes


class Pages:
    """The virtual range of an expandable segment."""

    __slots__ = ("address", "num_bytes", "page_bytes")

    def __init__(self, address: int, num_bytes: int, page_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.page_bytes = page_bytes
