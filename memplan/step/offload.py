"""Tensors kept for backward, moved to the host's memory and fetched back."""

from torch import nn


def offloaded(block: nn.Module) -> None:
    """Makes `block` keep its saved tensors on the host."""
    raise NotImplementedError
