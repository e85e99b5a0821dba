"""Which card of the tables a GPU is, by the name that NVML gives it."""

import re

from memplan.backends.environment import gpu
from memplan.errors import MemplanError
from memplan.spec import DeviceSpec
from memplan.spec.device import card, cards

NAMES = (
    (r"\bB200\b", "b200"),
    (r"\bH200\b", "h200"),
    (r"\bH(100|800)\b", "h100-80g"),
    (r"\bA100.*\b40GB", "a100-40g"),
    (r"\bA[18]00\b", "a100-80g"),
    (r"\bL40S?\b", "l40s"),
    (r"RTX 4090", "rtx-4090"),
    (r"RTX 5090", "rtx-5090"),
    (r"RTX PRO 6000", "rtx-pro-6000"),
    (r"\bL4\b|RTX 40\d\d|Ada Generation", "rtx-4090"),
    (r"RTX 50\d\d|RTX PRO", "rtx-5090"),
    (r"\bGH200\b|\bH20\b", "h100-80g"),
    (r"\bGB200\b|\bB300\b", "b200"),
)
"""Names to cards of the tables, those of the same generation last: their kernels are chosen alike."""


def card_of(name: str) -> str:
    """The card of the tables whose rules hold on the GPU called `name`; MemplanError where none is near."""
    for pattern, found in NAMES:
        if re.search(pattern, name):
            return found
    raise MemplanError(f"No rules are known for {name!r}.", f"Type --card with one of {', '.join(cards())}.")


def card_here() -> DeviceSpec:
    """The card that is in this machine."""
    facts = gpu()
    if facts is None:
        raise MemplanError("There is no CUDA device here.", "Type .ci/gpu --dry-run to rehearse on the CPU.")
    return card(card_of(facts["gpu"]))
