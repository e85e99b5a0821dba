"""Blocks compiled by torch.compile, one by one, checkpointed or not.

Equal blocks share one compiled function. Checkpointing stands outside of it and runs it again; nothing inside knows.
A selective policy has to be compiled along, checkpoint and all: outside of a compiled block it would see one op, the
block itself, and everything would run again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan.step.region import Contexts, Region

BACKEND = "inductor"
"""torch.compile's own."""


def compile_blocks(blocks: Mapping[str, nn.Module], regions: Sequence[Region], *, backend: Any = BACKEND) -> None:
    """Compiles the blocks (path -> module): where they or parts of them are `regions`, those; whole elsewhere."""
    for region in regions:
        if region.contexts is None:
            region.function = torch.compile(region.function, backend=backend)
        else:
            region.compiled = compiled_policy(region, region.contexts, backend)
    for path, block in blocks.items():
        if not any(f"{region.name}.".startswith(f"{path}.") for region in regions):
            block.forward = torch.compile(block.forward, backend=backend)


def compiled_policy(region: Region, contexts: Callable[[], Contexts], backend: Any) -> Callable[..., Any]:
    """`region` checkpointed under the policy of `contexts`, compiled as a whole."""
    compiled = torch.compile(checkpointed, backend=backend)
    method = region.function
    # A bound method would be compiled anew for each block; a function and its module are not.
    function = getattr(method, "__func__", method)
    bound = (method.__self__,) if hasattr(method, "__self__") else ()

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(function, (*bound, *args), kwargs, contexts, region.preserve_rng)

    return call


def checkpointed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: Callable[[], Contexts],
    preserve_rng: bool,
) -> Any:
    """What the compiler reads: torch's checkpoint with the policy's contexts, and nothing else. The attention kernel
    is chosen once, when this is compiled, for forward and recomputation alike."""
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng, context_fn=contexts, **kwargs
    )
