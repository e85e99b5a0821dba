"""The CUDA caching allocator as a state machine over integers: what a block costs, where it lands, what is reserved.

Requests of up to 1 MiB are served from 2 MiB segments (the small pool), larger ones from segments of 20 MiB, or of
their own size from 10 MiB on (the large pool). A request takes the smallest free block of its pool and stream that is
large enough, the lowest address among equals; what is left is split off when it is worth keeping. A freed block grows
together with its free neighbours. Segments go back to the driver only when a request fails or when asked to.

Source: class DeviceCachingAllocator, c10/cuda/CUDACachingAllocator.cpp, torch 2.13.

Known limits: no private pools (CUDA graphs, MemPool), one device, no cudaMallocAsync. The driver's own rounding and
the context are not counted, and its addresses are made up. When a stream has passed is the caller's to say.
"""

from bisect import bisect_left
from collections.abc import Iterable

from memplan.allocator.blocks import (
    ALLOCATED,
    AWAITING_FREE,
    FREE,
    KEY_SHIFT,
    AllocatorStats,
    Block,
    DeviceMemory,
    FreeList,
    OutOfMemory,
    Pool,
    SegmentInfo,
)
from memplan.allocator.config import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorConfig
from memplan.allocator.expandable import take_block, unmap_block
from memplan.allocator.release import collect_garbage, release_oversize, release_segment
from memplan.allocator.search import choose
from memplan.allocator.snapshot import place_segment, segment_infos
from memplan.errors import MemplanError

_NEVER = 1 << 62


class CachingAllocator:
    """One device's allocator.

    `requested_bytes`, `allocated_bytes`, `active_bytes` and `reserved_bytes`, each with its `peak_` twin, may be read
    at any moment; `stats` takes them all down.

    Args:
        config: Its settings; the defaults when not given.
        capacity_bytes: What the driver has to give; None has no end.
        device: The card, when it is not an imagined one.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        capacity_bytes: int | None = None,
        device: DeviceMemory | None = None,
    ) -> None:
        self._config = config = config or AllocatorConfig()
        self._device = device or DeviceMemory(capacity_bytes)
        capacity_bytes = self._device.capacity_bytes
        # Source: setMemoryFraction: a share of 1 sets no limit, and without a limit nothing is collected early.
        limited = config.per_process_memory_frac < 1 and capacity_bytes is not None
        self._limit_bytes = int(config.per_process_memory_frac * (capacity_bytes or 0)) if limited else None
        self._ages = limited and config.garbage_collection_threshold_frac > 0
        self._unsplit_bytes = _NEVER if config.expandable_segments else config.max_split_size_bytes or _NEVER
        self._rounds_plainly = max(config.roundup_power2_divisions) <= 1
        self._searches_plainly = not (self._ages or config.expandable_segments or config.max_split_size_bytes)
        self._small = Pool(is_small=True, splits_fully=True)
        self._large = Pool(is_small=False, splits_fully=config.expandable_segments)
        self._live: dict[int, Block] = {}
        self._awaiting: dict[int, Block] = {}
        self.num_alloc_retries = self.num_ooms = 0
        self.allocated_bytes = self.awaiting_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_active_bytes = self.peak_requested_bytes = 0

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        """Address of a block of at least `num_bytes` for `stream`; 0 when nothing was asked for. Raises `OutOfMemory`.

        Source: malloc, alloc_found_block, should_split.
        """
        if num_bytes <= 0:
            if num_bytes < 0:
                raise MemplanError(f"{num_bytes} bytes cannot be allocated.")
            return 0
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        if not self._rounds_plainly:
            size = self._config.round_bytes(num_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self.take(pool.free_lists.get(stream) or pool.free_list(stream), size, num_bytes)
        size = block.num_bytes
        block.requested_bytes = num_bytes
        self._live[block.address] = block
        self.allocated_bytes = total = self.allocated_bytes + size
        if total > self.peak_allocated_bytes:
            self.peak_allocated_bytes = total
        total += self.awaiting_bytes
        if total > self.peak_active_bytes:
            self.peak_active_bytes = total
        self.requested_bytes = total = self.requested_bytes + num_bytes
        if total > self.peak_requested_bytes:
            self.peak_requested_bytes = total
        return block.address

    def take(self, free: FreeList, size: int, num_bytes: int) -> Block:
        """A block of at least `size` for a request of `num_bytes`, split where that is worth it, which no counter
        notices. Source: alloc_found_block, should_split."""
        keys, pool = free.keys, free.pool
        index = bisect_left(keys, size << KEY_SHIFT)
        if not self._searches_plainly:
            pool.num_searches += self._ages
            index = choose(free, index, size, self._config)
        if index < len(keys):
            del keys[index]
            block = free.blocks.pop(index)
        else:
            block = self._grow(free, size, num_bytes)
        rest_bytes = block.num_bytes - size
        if rest_bytes >= pool.min_remainder_bytes and size < self._unsplit_bytes:
            rest = Block(block.address + size, rest_bytes, free, FREE, block.pages)
            rest.link(block, block.next)
            block.num_bytes = size
            free.insert(rest)
        block.state = ALLOCATED
        return block

    def free_lists(self) -> tuple[FreeList, FreeList]:
        """Where requests of up to 1 MiB, and larger ones, are served from on the first stream."""
        return self._small.free_list(0), self._large.free_list(0)

    def free(self, address: int) -> None:
        """Ends the allocation at `address`; it waits when another stream was recorded on it.

        Source: free, free_block.
        """
        if not address:
            return
        block = self._live.pop(address, None)
        if block is None:
            raise MemplanError(f"Nothing is allocated at {address:#x}.")
        self.allocated_bytes -= block.num_bytes
        if block.streams:
            block.state = AWAITING_FREE
            self._awaiting[address] = block
            self.awaiting_bytes += block.num_bytes
        else:
            self._complete(block)

    def _complete(self, block: Block) -> None:
        self.requested_bytes -= block.requested_bytes
        self.give(block)

    def give(self, block: Block) -> None:
        """Puts `block`, grown over its free neighbours, into its free list, which no counter notices. Source:
        free_block, try_merge_blocks."""
        free = block.free_list
        prev, following = block.prev, block.next
        if prev is not None and prev.state == FREE:
            free.remove(prev)
            block.absorb(prev)
        if following is not None and following.state == FREE:
            free.remove(following)
            block.absorb(following)
        block.state = FREE
        free.insert(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Notes that `stream` uses the block at `address`, so that freeing it waits. Source: recordStream."""
        block = self._live.get(address)
        if block is None:
            raise MemplanError(f"Nothing is allocated at {address:#x}.")
        if stream != block.free_list.stream:
            block.streams = {stream} | (block.streams or set())

    def process_events(self, address: int | None = None) -> None:
        """Completes the frees that wait for other streams, or the one at `address` alone.

        CUDA's allocator asks the device at every request; here the caller says when a stream has passed.

        Source: process_events.
        """
        for waiting in [address] if address is not None else list(self._awaiting):
            block = self._awaiting.pop(waiting, None)
            if block is None:
                raise MemplanError(f"Nothing waits to be freed at {waiting:#x}.")
            self.awaiting_bytes -= block.num_bytes
            block.streams = None
            self._complete(block)

    def empty_cache(self) -> None:
        """Completes all frees and gives whole cached segments, and whole free pages, back to the driver.

        Source: emptyCache, release_cached_blocks, release_blocks.
        """
        self.process_events()
        for pool in (self._large, self._small):
            blocks = pool.free_blocks()
            for block in blocks:
                if block.pages is None and not block.is_split:
                    release_segment(block, self._device)
            for block in blocks:
                if block.pages is not None:
                    unmap_block(block, self._device)

    def reset_peak(self) -> None:
        """Peaks begin anew at what is there now. Source: resetPeakStats."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_active_bytes = self.active_bytes
        self._device.peak_reserved_bytes = self._device.reserved_bytes

    @property
    def active_bytes(self) -> int:
        """Bytes of live blocks and of freed ones that wait for a stream."""
        return self.allocated_bytes + self.awaiting_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver."""
        return self._device.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest `reserved_bytes`."""
        return self._device.peak_reserved_bytes

    @property
    def stats(self) -> AllocatorStats:
        """All counters as they stand."""
        return AllocatorStats(
            requested_bytes=self.requested_bytes,
            peak_requested_bytes=self.peak_requested_bytes,
            allocated_bytes=self.allocated_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            active_bytes=self.active_bytes,
            peak_active_bytes=self.peak_active_bytes,
            reserved_bytes=self.reserved_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            num_alloc_retries=self.num_alloc_retries,
            num_ooms=self.num_ooms,
            num_device_allocs=self._device.num_device_allocs,
            num_device_frees=self._device.num_device_frees,
        )

    @property
    def inactive_split_bytes(self) -> int:
        """Free bytes that cannot go back to the driver, because their segment is partly in use."""
        return sum(segment.inactive_split_bytes for segment in self.segments())

    def segments(self) -> tuple[SegmentInfo, ...]:
        """What is held from the driver, by address, with its blocks. Source: snapshot."""
        blocks = [*self._live.values(), *self._awaiting.values()]
        return segment_infos([*blocks, *self._small.free_blocks(), *self._large.free_blocks()])

    def restore(self, segments: Iterable[SegmentInfo]) -> None:
        """Takes over `segments` as they stand; peaks begin there. Expandable ones cannot be taken over."""
        for segment in segments:
            pool = self._small if segment.pool == "small" else self._large
            for block in place_segment(segment, pool.free_list(segment.stream), self._device):
                self.requested_bytes += block.requested_bytes
                if block.state == ALLOCATED:
                    self._live[block.address] = block
                    self.allocated_bytes += block.num_bytes
                else:
                    self._awaiting[block.address] = block
                    self.awaiting_bytes += block.num_bytes
        self.reset_peak()

    def _grow(self, free: FreeList, size: int, num_bytes: int) -> Block:
        """A block of at least `size` from the driver, cached segments given back where that helps.

        Source: malloc: garbage_collect_cached_blocks, alloc_block, release_available_cached_blocks,
        release_cached_blocks.
        """
        if self._ages:
            threshold_bytes = int(self._config.garbage_collection_threshold_frac * (self._limit_bytes or 0))
            collect_garbage(self._large, self._device.reserved_bytes - threshold_bytes, self._device)
        block = self._ask(free, size)
        if block is None and release_oversize(free, size, self._device, self._config):
            block = self._ask(free, size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._ask(free, size)
        if block is None:
            self.num_ooms += 1
            allowed_bytes = self._device.capacity_bytes if self._limit_bytes is None else self._limit_bytes
            segment_bytes = self._config.segment_bytes(size)
            raise OutOfMemory(num_bytes, segment_bytes, self.allocated_bytes, self.reserved_bytes, allowed_bytes or 0)
        return block

    def _ask(self, free: FreeList, size: int) -> Block | None:
        """A block of a new segment, or of new pages, or None. Source: alloc_block."""
        segment_bytes = self._config.segment_bytes(size)
        if self._limit_bytes is not None and self._device.reserved_bytes + segment_bytes > self._limit_bytes:
            return None
        if self._config.expandable_segments:
            return take_block(free, size, self._device, self._config)
        address = self._device.allocate(segment_bytes)
        return None if address is None else Block(address, segment_bytes, free, FREE, None)
