"""Checkpoint modes put on the blocks of a model, whichever it is."""

import re

from torch import nn

from memplan.spec.checkpointing import Checkpointing
from memplan.step.region import Region
from memplan.step.selective import selective_contexts

ATTENTION_NAME = re.compile(r"(^|_)(attn|attention)$")
"""Names of submodules that make keys and values, in our models and in transformers'."""


def checkpoint_blocks(
    blocks: dict[str, nn.Module], mode: Checkpointing, *, dropout: bool = False, shares_kv: bool = False
) -> tuple[list[Region], str]:
    """Puts `mode` on `blocks` (path -> module), and what was done instead of it, in words, or nothing.

    With `dropout` random numbers are drawn again alike in the recomputation. Blocks that leave keys and values to later
    blocks (`shares_kv`) would, when run again, write into what later blocks have read: their norms and feed-forward
    layers are checkpointed instead, and attention is not.
    """
    treated = {path: block for index, (path, block) in enumerate(blocks.items()) if mode.treats(index)}
    if mode.kind in ("none", "offload"):
        return [], ""
    note = ""
    parts = treated
    if mode.kind == "submodule" or shares_kv:
        parts = {path: part for path, part in submodules(treated).items() if not (shares_kv and makes_kv(path))}
        if shares_kv:
            note = "blocks share keys and values: each norm and feed-forward layer is checkpointed, attention is not"
    contexts = selective_contexts(mode.ops) if mode.kind == "selective" and not shares_kv else None
    regions = []
    for path, part in parts.items():
        region = Region(path, part.forward, preserve_rng=dropout, contexts=contexts)
        part.forward = region
        regions.append(region)
    return regions, note


def submodules(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The direct children of each block that have parameters: norms, attention, feed-forward layer."""
    return {
        f"{path}.{name}": child
        for path, block in blocks.items()
        for name, child in block.named_children()
        if any(True for _ in child.parameters())
    }


def makes_kv(path: str) -> bool:
    """Whether the submodule at `path` is an attention layer, by its name."""
    return ATTENTION_NAME.search(path.rpartition(".")[2]) is not None
