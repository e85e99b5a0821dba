"""What the allocator and the driver hold beyond allocated bytes: bands, since the order of requests decides."""

import dataclasses

from memplan.record.memory import Band
from memplan.spec.device import DeviceSpec
from memplan.units import MIB

SEGMENT_BYTES = 2 * MIB
"""Segments are multiples of this. Source: kRoundLarge and kSmallBuffer, c10/cuda/CUDACachingAllocator.cpp."""
MOST_RESERVED_PERCENT = 137
"""Reserved bytes in percent of the allocated ones, of training steps with fixed shapes, at most. Published pairs:
Megatron-Bridge's cards 102 to 111, torchtitan's FSDP runs 112 to 137 (pytorch/torchtitan#165, #4153); modded-nanogpt's
records, whose shapes change, reach 173."""
USUAL_RESERVED_PERCENT = 111
"""The same of most steps on one card: a peak nearer to what a card has than this may find no room in fragments.
Published: Megatron-Bridge's cards, 102 to 111; Llama-3.1-8B over 8 H100 at 72.4 GiB allocated ran out of 78.5."""


MOST_UNSPLIT_PERCENT = 104
"""Allocated bytes with what the allocator does not split, in percent of what is asked for. The most seen is 103.1, of a
gpt-oss of 700 MiB (reports/LOG.md)."""
MODEL_MISS_PERCENT = 5
"""The most that the model of the allocator was off the trace's reserved bytes where that is more than a few segments:
reports/LOG.md."""


def fits(
    allocated_bytes: int, limit_bytes: int, *, gate: bool, likely_bytes: int | None = None, asked: bool = False
) -> bool | None:
    """Whether a peak stays at or under a limit; None where it does, but by less than a card's fragments usually take,
    or than they take by the model of the allocator, which reserves `likely_bytes`. A gate is held against allocated
    bytes and leaves nothing open, unless these are only what is `asked` for and what is not split may matter."""
    if allocated_bytes > limit_bytes:
        return False
    if gate and asked and allocated_bytes * MOST_UNSPLIT_PERCENT > limit_bytes * 100:
        return None
    usual = allocated_bytes * USUAL_RESERVED_PERCENT <= limit_bytes * 100
    return True if gate or (usual and (likely_bytes or 0) <= limit_bytes) else None


def reserved_band(allocated_bytes: int, device: DeviceSpec, likely_bytes: int) -> Band:
    """Segments held at a peak of `allocated_bytes`, of which a model of the allocator says `likely_bytes`; exactly the
    allocated bytes on the CPU, which has no caching allocator."""
    if device.rules == "cpu":
        reason = "the CPU's allocator keeps nothing"
        return Band(low_bytes=allocated_bytes, high_bytes=allocated_bytes, likely_bytes=allocated_bytes, reason=reason)
    return Band(
        low_bytes=-(-allocated_bytes // SEGMENT_BYTES) * SEGMENT_BYTES,
        high_bytes=max(
            allocated_bytes * MOST_RESERVED_PERCENT // 100, likely_bytes * (100 + MODEL_MISS_PERCENT) // 100
        ),
        likely_bytes=likely_bytes,
        reason="by a model of the allocator; freed blocks that no later request fits stay reserved: published steps "
        "hold up to 37 % more than is allocated, and more where shapes change",
    )


def process_of(reserved: Band, device: DeviceSpec, *, world: int) -> Band:
    """What the driver reports for the process: reserved segments and the context beside them."""
    if device.rules == "cpu":
        return dataclasses.replace(reserved, reason="Python's and torch's own memory comes on top")
    beside = f"CUDA's context of {device.name} as others have seen it" if device.context_bytes else "no known context"
    comm = "; NCCL's buffers are left out" if world > 1 else ""
    return Band(
        low_bytes=reserved.low_bytes + device.context_bytes,
        high_bytes=reserved.high_bytes + device.context_bytes,
        likely_bytes=None if reserved.likely_bytes is None else reserved.likely_bytes + device.context_bytes,
        reason=f"reserved and {beside}{comm}",
    )
