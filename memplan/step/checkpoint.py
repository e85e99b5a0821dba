"""Activation checkpointing of decoder blocks: keep a block's input, run the block again in backward."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memplan.models.decoder import Decoder


def checkpoint_blocks(decoder: Decoder, every: int | None) -> None:
    """Makes blocks 0, `every`, 2 * `every`, ... of `decoder` recompute in backward; None leaves all as they are."""
    if every is None:
        return
    for block in list(decoder.blocks)[::every]:
        recompute(block)


def recompute(module: nn.Module) -> None:
    """Makes `module` keep its inputs only and run again in backward.

    Non-reentrant, and only under grad: evaluation and generation take the plain path. Random state is not saved, since
    no module of ours draws numbers in forward.
    """
    plain: Callable[..., Tensor] = module.forward

    def forward(*args: object) -> Tensor:
        if not torch.is_grad_enabled():
            return plain(*args)
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False)

    module.forward = forward
