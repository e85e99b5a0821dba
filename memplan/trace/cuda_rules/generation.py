"""Which GPU generation a card is, and the figures of it that torch's choices read. No torch."""

from dataclasses import dataclass

from memplan.errors import MemplanError, near_names
from memplan.spec.device import kin_of
from memplan.units import KIB

TORCH = "2.13"
"""The torch release whose rules this package mirrors."""

CUDNN_VERSION = 92301
"""cuDNN as torch counts it (9.23.1): the one that the CUDA 13 wheels of torch 2.13 require.

Source: pytorch/test-infra#8192 quotes `generate_binary_build_matrix.py`: `nvidia-cudnn-cu13==9.23.1.3`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The traits of a card that decide which kernel torch takes and how much memory it asks for."""

    name: str
    """Architecture: `ampere`, `ada`, `hopper`, `blackwell`."""
    major: int
    """Compute capability before the point."""
    minor: int
    """Compute capability behind the point."""
    num_sms: int
    """Streaming multiprocessors of the card."""
    shared_memory_bytes: int
    """Most shared memory that one block may opt into."""
    cudnn_version: int = CUDNN_VERSION
    """cuDNN beside torch, as `torch.backends.cudnn.version()` gives it."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor), to be compared as a pair."""
        return self.major, self.minor

    @property
    def threads_per_sm(self) -> int:
        """Threads that a multiprocessor holds. Source: CUDA C++ Programming Guide, as for shared memory."""
        return 1536 if self.capability in ((8, 6), (8, 9), (12, 0)) else 2048

    @property
    def sm(self) -> str:
        """`sm90`, `sm120`: the compute capability as torch writes it."""
        return f"sm{self.major}{self.minor}"


# Opt-in shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_SHARED_MEMORY = {
    (8, 0): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (12, 0): 99 * KIB,
}

# Multiprocessors: the architecture papers (A100, H100, Ada, RTX Blackwell) and the data sheets of the cards.
_CARDS: dict[str, tuple[str, int, int, int]] = {
    "a100-40g": ("ampere", 8, 0, 108),
    "a100-80g": ("ampere", 8, 0, 108),
    "b200": ("blackwell", 10, 0, 148),
    "h100-80g": ("hopper", 9, 0, 132),
    "h200": ("hopper", 9, 0, 132),
    "l40s": ("ada", 8, 9, 142),
    "rtx-4090": ("ada", 8, 9, 128),
    "rtx-5090": ("blackwell", 12, 0, 170),
    "rtx-pro-6000": ("blackwell", 12, 0, 188),
}


def generation(card: str) -> Generation:
    """The generation of `card`, a card's name or a GPU's as NVML gives it; MemplanError with the closest names when it
    is unknown."""
    try:
        name, major, minor, num_sms = _CARDS[kin_of(card) or card]
    except KeyError:
        raise MemplanError(f"The compute capability of {card!r} is not known.", near_names(card, _CARDS)) from None
    shared = _SHARED_MEMORY[major, minor]
    return Generation(name=name, major=major, minor=minor, num_sms=num_sms, shared_memory_bytes=shared)
