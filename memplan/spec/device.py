"""Where the step runs: whose rules hold and how much memory there is."""

import re
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
    """Bytes that torch reports as the device's total memory; None where unknown."""
    context_bytes: int = 0
    """Bytes of it outside torch's allocator: CUDA's context and the kernels that are loaded; 0 where unknown."""
    source: str = ""
    """Where the sizes come from."""

    @property
    def usable_bytes(self) -> int | None:
        """Bytes that the allocator can reach at most: the capacity less the context; None where unknown."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.context_bytes


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

# What a process on one GPU, without NCCL, holds beside torch's allocator: in torch's out-of-memory message, memory in
# use by the process less what PyTorch has allocated and what it has reserved. It grows by some 0.1 GiB as kernels are
# loaded, and differs between builds of torch and drivers. The median of what is on record stands here.
_AMPERE = (
    "0.49GiB",
    "A100: 0.49 in TianheWu/CoSeR#10 and lianqi1008/Control-GIC#6, 0.40 in HiDream-ai/VAREdit#6, 0.50 in"
    " Kwai-Keye/Keye#11",
)
_ADA = (
    "0.47GiB",
    "RTX 4090: 0.44 in Soul-AILab/SoulX-FlashTalk#5, 0.49 in 3DTopia/Phidias-Diffusion#8; L40: 0.49 in"
    " QwenLM/Qwen3-VL#2097; RTX 6000 Ada: 0.42 in DINGYANB/MTVCrafter#21",
)
_HOPPER = ("0.65GiB", "H100: 0.65, 0.65 and 0.66 in jeqcho/in-context-language-learning, 30-Jan-20/README.md")
_BLACKWELL = ("0.70GiB", "B200: 0.69 and 0.70 in stas00/ml-engineering, debug/pytorch.md")
_CONTEXTS: dict[str, tuple[str, str]] = {
    "a100-40g": _AMPERE,
    "a100-80g": _AMPERE,
    "b200": _BLACKWELL,
    "h100-80g": _HOPPER,
    "h200": (
        _HOPPER[0],
        f"as {_HOPPER[1]}; an H200 that loads a model has 0.51 in sungwon-chae/arxiv_confi, etu_logging.md",
    ),
    "l40s": _ADA,
    "rtx-4090": _ADA,
    "rtx-5090": ("0.60GiB", "RTX 5090: 0.58 in Wan-Video/Wan2.1#465, 0.60 in TrajectoryCrafter/TrajectoryCrafter#20"),
    "rtx-pro-6000": (_BLACKWELL[0], f"as {_BLACKWELL[1]}, the larger of its generation"),
}

# Names of GPUs as NVML gives them, words in lower case, to the card whose rules hold on them: its own, or the nearest
# of its generation, whose kernels are chosen alike.
_KIN = (
    (r"g?b[23]00", "b200"),
    (r"g?h200", "h200"),
    (r"h100|h800|h20", "h100-80g"),
    (r"a100.* 40gb.*", "a100-40g"),
    (r"a100|a800|a30", "a100-80g"),
    (r"l40s?", "l40s"),
    (r"rtx pro", "rtx-pro-6000"),
    (r"rtx 50\d\d", "rtx-5090"),
    (r"rtx 40\d\d|ada|l4", "rtx-4090"),
)


def kin_of(name: str) -> str | None:
    """The card of the table whose rules hold on a device called `name`: a card's name, or a GPU's as NVML gives it,
    with spaces or dashes; None where no rules are known."""
    if name in _CARDS:
        return name
    words = " ".join(re.split(r"[\s-]+", name.lower()))
    return next((card for pattern, card in _KIN if re.search(rf"(?:^| )(?:{pattern})(?: |$)", words)), None)


def cards() -> tuple[str, ...]:
    """Names of the cards whose memory is known, sorted."""
    return tuple(_CARDS)


def card(name: str) -> DeviceSpec:
    """The card called `name`; MemplanError with the closest names when there is none."""
    try:
        capacity, source = _CARDS[name]
    except KeyError:
        raise MemplanError(f"Unknown card {name!r}.", near_names(name, _CARDS)) from None
    context, context_source = _CONTEXTS[name]
    return DeviceSpec(
        name=name,
        rules="cuda",
        capacity_bytes=parse_bytes(capacity),
        context_bytes=parse_bytes(context),
        source=f"{source}; context: {context_source}",
    )
