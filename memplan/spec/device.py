"""Where the step runs: whose rules hold and how much memory there is."""

from dataclasses import dataclass
from typing import Literal

from memplan.errors import MemplanError, near_names
from memplan.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A card, or the host's own memory."""

    name: str
    """Name on the command line: `h100-80g`, `cpu`."""
    rules: Literal["cuda", "cpu"]
    """Whose allocator, kernels and autocast lists hold."""
    capacity_bytes: int | None = None
    """Bytes that the allocator can reach at most; None where unknown."""
    source: str = ""
    """Where `capacity_bytes` comes from."""


CPU = DeviceSpec(name="cpu", rules="cpu")
"""The host's memory, of unknown size."""

# What torch reports as `total_memory`, before the CUDA context takes its share. It is smaller than the printed size of
# the card and moves by up to 0.2 GiB between drivers; where several values are on record the smaller one stands here.
_OOM = "CUDA out-of-memory message"
_CARDS: dict[str, tuple[str, str]] = {
    "a100-40g": ("42298834944", "bottlerocket-os/bottlerocket#3873: deviceQuery of an A100-SXM4-40GB"),
    "a100-80g": ("79.25GiB", f"levihsu/OOTDiffusion#235: {_OOM} of an A100"),
    "b200": ("178.35GiB", "pytorch/ao#4002: device query of a B200"),
    "h100-80g": ("79.11GiB", f"vllm-project/vllm#27508: {_OOM} of an H100"),
    "h200": ("139.80GiB", f"PrimeIntellect-ai/prime-rl, benchmark report of 2026-01-13: {_OOM} of 8 x H200"),
    "l40s": ("44.40GiB", f"QwenLM/Qwen3-VL#2097: {_OOM} of an L40, which has the same 48 GB"),
    "rtx-4090": ("23.52GiB", f"Soul-AILab/SoulX-FlashTalk#5: {_OOM} of a 4090 (23.64GiB in TMElyralab/MuseTalk#76)"),
    "rtx-5090": ("33680457728", "NVIDIA/nccl#1637: deviceQuery of an RTX 5090"),
    "rtx-pro-6000": ("94.97GiB", "antirez/ds4#431: device total of an RTX PRO 6000 Blackwell"),
}


def cards() -> tuple[str, ...]:
    """Names of the cards whose usable memory is known, sorted."""
    return tuple(_CARDS)


def card(name: str) -> DeviceSpec:
    """The card called `name`; MemplanError with the closest names when there is none."""
    try:
        capacity, source = _CARDS[name]
    except KeyError:
        raise MemplanError(f"Unknown card {name!r}.", near_names(name, _CARDS)) from None
    return DeviceSpec(name=name, rules="cuda", capacity_bytes=parse_bytes(capacity), source=source)
