"""How the allocator is configured: the text of PYTORCH_ALLOC_CONF, and the two roundings that follow from it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.units import MIB

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this. Source: kMinBlockSize, c10/core/AllocatorConfig.h, torch 2.13."""
SMALL_BYTES = MIB
"""Largest rounded request that the small pool serves. Source: kSmallSize, c10/core/AllocatorConfig.h, torch 2.13."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""A segment, or a page, of the small pool. Source: kSmallBuffer, c10/core/AllocatorConfig.h, torch 2.13."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""A segment of the large pool for requests under `MIN_LARGE_BYTES`, and its page with expandable segments.

Source: large_segment_size_, c10/core/AllocatorConfig.h, torch 2.13 (kLargeBuffer before).
"""
MIN_LARGE_BYTES = 10 * MIB
"""From here on a request has a segment of its own. Source: kMinLargeAlloc, c10/core/AllocatorConfig.h, torch 2.13."""
ROUND_LARGE_BYTES = 2 * MIB
"""Such a segment is a multiple of this. Source: kRoundLarge, c10/core/AllocatorConfig.h, torch 2.13."""
NUM_ROUNDUP_INTERVALS = 16
"""Powers of two from 1 MiB on that can have their own divisions.

Source: kRoundUpPowerOfTwoIntervals, c10/core/AllocatorConfig.cpp, torch 2.13.
"""

_NO_EFFECT = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
)
_EXAMPLE = "Type it like expandable_segments:True,max_split_size_mb:128."


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """The settings that change where a block lands or what is held from the driver."""

    expandable_segments: bool = False
    """Whether segments are virtual and grow page by page."""
    max_split_size_bytes: int | None = None
    """Blocks of this many bytes or more are not split; None splits all."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """How much larger than the request an unsplit oversize block may be, in bytes."""
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    """Segment of the large pool for requests under `MIN_LARGE_BYTES`, in bytes."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_ROUNDUP_INTERVALS
    """Divisions between two powers of two, for requests from 1 MiB, 2 MiB, 4 MiB, ...; 0 or 1 rounds to 512 bytes."""
    garbage_collection_threshold_frac: float = 0.0
    """Share of the allowed bytes from which cached segments are given back early; 0 never does."""
    per_process_memory_frac: float = 1.0
    """Share of the card's bytes that this process may reserve; 1 sets no limit."""

    @staticmethod
    def parse(text: str) -> "AllocatorConfig":
        """The configuration that `text` writes in the form of PYTORCH_ALLOC_CONF; MemplanError otherwise.

        Options of the host's pinned memory and of locking are read and change nothing here.

        Source: AcceleratorAllocatorConfig::parseArgs, c10/core/AllocatorConfig.cpp, torch 2.13.
        Checked: tests/trace/test_allocator_config.py, against torch's own parser in libc10.
        """
        pairs = dict(_pairs(re.sub(r"\s", "", text)))
        values: dict[str, Any] = {}
        segment_mib = LARGE_SEGMENT_BYTES // MIB
        if "large_segment_size_mb" in pairs:
            segment_mib = _integer("large_segment_size_mb", pairs["large_segment_size_mb"], MIN_LARGE_BYTES // MIB + 1)
            values["large_segment_bytes"] = values["max_non_split_rounding_bytes"] = segment_mib * MIB
        for key, value in pairs.items():
            if key in _READERS:
                name, read = _READERS[key]
                values[name] = read(key, value)
            elif key in ("max_split_size_mb", "max_non_split_rounding_mb"):
                name = "max_split_size_bytes" if key == "max_split_size_mb" else "max_non_split_rounding_bytes"
                values[name] = _integer(key, value, segment_mib) * MIB
            elif key == "backend" and value != "native":
                raise MemplanError(f"backend:{value} is another allocator; only native is modelled.", _EXAMPLE)
            elif key == "throw_on_cudamalloc_oom" and value != "False":
                raise MemplanError(f"{key}:{value} is not modelled.", "Leave it out.")
            elif key not in (*_NO_EFFECT, "backend", "large_segment_size_mb", "throw_on_cudamalloc_oom"):
                known = (*_READERS, *_NO_EFFECT, "large_segment_size_mb", "max_split_size_mb", "backend")
                raise MemplanError(f"{key!r} is not an option of the allocator.", near_names(key, known))
        return AllocatorConfig(**values)

    def round_bytes(self, num_bytes: int) -> int:
        """Bytes of the block that a request of `num_bytes` needs.

        Formula: the next multiple of 512; with D divisions and more than 512*D bytes, the next of the D equal
        steps between the powers of two around `num_bytes`.
        Source: round_size and roundup_power2_next_division, c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
        Checked: tests/trace/test_allocator_config.py.
        """
        if num_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(num_bytes.bit_length() - SMALL_BYTES.bit_length(), 0), NUM_ROUNDUP_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (num_bytes.bit_length() - 1)) // divisions
            return -(-num_bytes // step) * step
        return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, block_bytes: int) -> int:
        """Bytes to ask of the driver for a block of `block_bytes` that no cached block can serve.

        Formula: 2 MiB up to 1 MiB; `large_segment_bytes` under 10 MiB; else the next multiple of 2 MiB.
        Source: get_allocation_size, c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
        Checked: tests/trace/test_allocator_config.py.
        """
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Key and value of each option in `text`, which holds no blanks; commas inside brackets stay."""
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        key, colon, value = item.partition(":")
        if not (key and colon and value) or value.count("[") != value.count("]"):
            raise MemplanError(f"{item!r} is not an option with its value.", _EXAMPLE)
        yield key, value
    if text.count("[") != text.count("]"):
        raise MemplanError(f"A bracket is open in {text!r}.", _EXAMPLE)


def _integer(key: str, value: str, least: int) -> int:
    """The whole number `value` of at least `least`."""
    if not value.isdecimal() or int(value) < least:
        raise MemplanError(f"{key} takes a whole number of MiB from {least} on, not {value!r}.", f"Type {key}:128.")
    return int(value)


def _boolean(key: str, value: str) -> bool:
    """Whether `value` is True; only True and False count."""
    if value not in ("True", "False"):
        raise MemplanError(f"{key} takes True or False, not {value!r}.", f"Type {key}:True.")
    return value == "True"


def _fraction(key: str, value: str) -> float:
    """The number `value`, above 0 and below 1; for the process's share 0 and 1 count as well."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    inside = 0 <= number <= 1 if key == "per_process_memory_fraction" else 0 < number < 1
    if not inside:
        raise MemplanError(f"{key} takes a number between 0 and 1, not {value!r}.", f"Type {key}:0.8.")
    return number


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Divisions by interval from `8` or `[256:1,512:2,>:4]`.

    The first size of a list also sets the intervals before it, `>` those after the last one.
    Source: parseRoundUpPower2Divisions, c10/core/AllocatorConfig.cpp, torch 2.13.
    """
    if not value.startswith("["):
        return (_power_of_2(key, value),) * NUM_ROUNDUP_INTERVALS
    divisions = [0] * NUM_ROUNDUP_INTERVALS
    last = -1
    for item in value.strip("[]").split(","):
        size, _, count_text = item.partition(":")
        count = 0 if count_text == "0" else _power_of_2(key, count_text)
        if size == ">":
            first = max(last, 0) + 1
            divisions[first:] = [count] * (NUM_ROUNDUP_INTERVALS - first)
            continue
        index = min(_power_of_2(key, size).bit_length() - 1, NUM_ROUNDUP_INTERVALS - 1)
        if last < 0:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


def _power_of_2(key: str, value: str) -> int:
    """The power of two that `value` writes."""
    if not value.isdecimal() or int(value).bit_count() != 1:
        raise MemplanError(f"{key} takes powers of two, not {value!r}.", f"Type {key}:8 or {key}:[256:1,512:2,>:4].")
    return int(value)


_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "garbage_collection_threshold": ("garbage_collection_threshold_frac", _fraction),
    "per_process_memory_fraction": ("per_process_memory_frac", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
