"""The text of PYTORCH_ALLOC_CONF and the two roundings, against hand-made cases and torch's own parser in libc10."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memplan.allocator.config import AllocatorConfig
from memplan.errors import MemplanError
from memplan.units import GIB, KIB, MIB

DIVISIONS_SYMBOL = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
"""c10::CachingAllocator::AcceleratorAllocatorConfig::roundup_power2_divisions(size_t), static, in libc10."""


@contextmanager
def told_to_torch(text: str) -> Iterator[Callable[[int], int]]:
    """torch under the settings of `text`, as its own function from a size to its divisions."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    divisions = getattr(library, DIVISIONS_SYMBOL, None)
    if divisions is None:
        pytest.skip("this torch has no such function in libc10")
    divisions.argtypes, divisions.restype = [ctypes.c_size_t], ctypes.c_size_t
    torch._C._accelerator_setAllocatorSettings(text)
    try:
        yield divisions
    finally:
        torch._C._accelerator_setAllocatorSettings("")


def test_the_text_as_it_is_written_in_the_environment() -> None:
    config = AllocatorConfig.parse("expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,")
    assert config.expandable_segments
    assert config.max_split_size_bytes == 128 * MIB
    assert config.garbage_collection_threshold_frac == 0.8
    assert AllocatorConfig.parse("") == AllocatorConfig()


def test_the_segment_size_is_read_first() -> None:
    """max_split_size_mb is held against large_segment_size_mb wherever it stands, and the rounding follows it.

    Source: parseArgs, c10/core/AllocatorConfig.cpp, torch 2.13.
    """
    config = AllocatorConfig.parse("max_split_size_mb:25,large_segment_size_mb:25")
    assert config.large_segment_bytes == config.max_non_split_rounding_bytes == 25 * MIB
    with pytest.raises(MemplanError, match="from 26 on"):
        AllocatorConfig.parse("max_split_size_mb:25,large_segment_size_mb:26")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("expandable_segment:True", "Did you mean expandable_segments"),
        ("expandable_segments:true", "takes True or False"),
        ("expandable_segments", "not an option with its value"),
        ("max_split_size_mb:", "not an option with its value"),
        ("max_split_size_mb:19", "from 20 on"),
        ("max_split_size_mb:128MB", "whole number of MiB"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:high", "between 0 and 1"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:[300:2]", "powers of two"),
        ("roundup_power2_divisions:[256:2", "bracket|not an option"),
        ("backend:cudaMallocAsync", "only native is modelled"),
        ("throw_on_cudamalloc_oom:True", "not modelled"),
    ],
)
def test_bad_text_says_what_to_type(text: str, what: str) -> None:
    with pytest.raises(MemplanError, match=what) as caught:
        AllocatorConfig.parse(text)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["expandable_segments:true", "max_split_size_mb:19", "roundup_power2_divisions:3"])
def test_torch_refuses_the_same(text: str) -> None:
    with pytest.raises(ValueError, match=r"."), told_to_torch(text):
        pass


@given(
    st.one_of(
        st.sampled_from(("1", "2", "4", "8", "16")),
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, 17).map(lambda power: str(1 << power)), st.just(">")),
                st.sampled_from(("0", "1", "2", "8", "32")),
            ),
            min_size=1,
            max_size=5,
        ).map(lambda pairs: "[" + ",".join(f"{size}:{count}" for size, count in pairs) + "]"),
    )
)
def test_divisions_are_read_as_torch_reads_them(value: str) -> None:
    """torch's parser, and its choice of the interval, for every size at and around a power of two."""
    with told_to_torch(f"roundup_power2_divisions:{value}") as divisions:
        theirs = [divisions(1 << power) for power in range(20, 36)]
        beyond = [divisions(512), divisions(MIB - 1), divisions(3 * MIB), divisions(200 * GIB)]
    ours = AllocatorConfig.parse(f"roundup_power2_divisions:{value}").roundup_power2_divisions
    assert list(ours) == theirs
    assert [ours[0], ours[0], ours[1], ours[15]] == beyond


@pytest.mark.parametrize(
    ("divisions", "num_bytes", "rounded"),
    [
        ("1", 1, 512),
        ("1", 512, 512),
        ("1", 513, 1024),
        ("1", 1200, 1536),
        ("4", 2048, 2048),  # 512 * 4 is not exceeded: the next multiple of 512
        ("4", 2049, 2560),  # between 2048 and 4096: 2048 2560 3072 3584
        ("4", 5 * MIB + 1, 6 * MIB),  # between 4 and 8 MiB: 4 5 6 7
        ("4", 8 * MIB - 1, 8 * MIB),
        ("2", 4 * GIB, 4 * GIB),
        ("[256:1,512:2,1024:4,>:8]", 300 * MIB + 5, 300 * MIB + 512),
        ("[256:1,512:2,1024:4,>:8]", 600 * MIB, 768 * MIB),
        ("[256:1,512:2,1024:4,>:8]", 1025 * MIB, 1280 * MIB),
        ("[256:1,512:2,1024:4,>:8]", 2049 * MIB, 2304 * MIB),
    ],
)
def test_rounding_by_hand(divisions: str, num_bytes: int, rounded: int) -> None:
    """Source: round_size and the comment above roundup_power2_next_division, CUDACachingAllocator.cpp, torch 2.13."""
    assert AllocatorConfig.parse(f"roundup_power2_divisions:{divisions}").round_bytes(num_bytes) == rounded


@given(num_bytes=st.integers(1, 1 << 40), divisions=st.sampled_from((2, 4, 8, 16)))
def test_rounding_takes_the_next_step(num_bytes: int, divisions: int) -> None:
    """Among all steps between the powers of two around the request, the smallest that is enough."""
    rounded = AllocatorConfig(roundup_power2_divisions=(divisions,) * 16).round_bytes(num_bytes)
    floor = 1 << (num_bytes.bit_length() - 1)
    steps = [floor + floor // divisions * step for step in range(divisions + 1)]
    plain = next(multiple for multiple in range(num_bytes, num_bytes + 512) if multiple % 512 == 0)
    assert rounded == (plain if num_bytes <= 512 * divisions else min(step for step in steps if step >= num_bytes))


@pytest.mark.parametrize(
    ("block_bytes", "segment_bytes"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (71 * MIB + KIB, 72 * MIB),
    ],
)
def test_segments_by_hand(block_bytes: int, segment_bytes: int) -> None:
    """Source: get_allocation_size, c10/cuda/CUDACachingAllocator.cpp, torch 2.13."""
    assert AllocatorConfig().segment_bytes(block_bytes) == segment_bytes
