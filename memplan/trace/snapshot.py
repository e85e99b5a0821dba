"""A trace as the file that PyTorch's memory_viz page opens.

Source: the dictionary of `torch.cuda.memory._snapshot()`, torch/cuda/memory.py, torch 2.13.
"""

import pickle
from pathlib import Path
from typing import Any

from memplan.allocator.caching import CachingAllocator
from memplan.errors import MemplanError
from memplan.trace.events import Alloc, Trace


def snapshot(trace: Trace, memory: CachingAllocator) -> dict[str, Any]:
    """Segments with their blocks as they are when `trace` has been played through `memory`, and the history of the one
    device: each allocation and free with address, size and the Python stack of its making."""
    addresses: dict[int, int] = {}
    owners: dict[int, Alloc] = {}
    history: list[dict[str, Any]] = []
    for at, event in enumerate(trace.events):
        alloc = trace.allocs[max(event, ~event)]
        if event >= 0:
            address = memory.malloc(alloc.num_bytes)
            addresses[event], owners[address] = address, alloc
            actions = ["alloc"]
        else:
            address = addresses.pop(~event)
            memory.free(address)
            owners.pop(address, None)
            actions = ["free_requested", "free_completed"]
        for action in actions:
            history.append(
                {
                    "action": action,
                    "addr": address,
                    "size": alloc.num_bytes,
                    "stream": 0,
                    "time_us": at,
                    "frames": frames_of(alloc),
                    "category": alloc.category,
                }
            )
    return {"segments": segments_of(memory, owners), "device_traces": [history], "allocator_settings": {}}


def segments_of(memory: CachingAllocator, owners: dict[int, Alloc]) -> list[dict[str, Any]]:
    """Segments in the snapshot's words."""
    segments = []
    for segment in memory.segments():
        blocks = [
            {
                "address": block.address,
                "size": block.num_bytes,
                "requested_size": block.requested_bytes,
                "state": "active_allocated" if block.address in owners else "inactive",
                "frames": frames_of(owners[block.address]) if block.address in owners else [],
            }
            for block in segment.blocks
        ]
        segments.append(
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.num_bytes,
                "allocated_size": segment.allocated_bytes,
                "active_size": segment.active_bytes,
                "stream": segment.stream,
                "segment_type": segment.pool,
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }
        )
    return segments


def frames_of(alloc: Alloc) -> list[dict[str, Any]]:
    """The stack of an allocation; its op and module stand first, as frames of their own."""
    own = [{"filename": alloc.module or "(no module)", "line": 0, "name": alloc.op}]
    return own + [{"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in alloc.frames]


def save_snapshot(path: Path, trace: Trace, memory: CachingAllocator) -> None:
    """Writes the snapshot to `path`; MemplanError where that cannot be written."""
    try:
        with path.open("wb") as file:
            pickle.dump(snapshot(trace, memory), file)
    except OSError as error:
        raise MemplanError(
            f"{path} cannot be written: {error.strerror}.", "Name a file in a folder of yours."
        ) from None
