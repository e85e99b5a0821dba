"""What collectives read and write."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

NAMESPACES = ("c10d", "_c10d_functional", "fsdp")
"""Of ops that send tensors, or copy them into or out of what is sent. Source: torch/csrc/distributed/c10d/Ops.cpp;
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13."""


def buffers(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, str]]:
    """The tensors of a collective, or of a copy beside it, with what they are for if nobody has said: buffers, or
    gradients of whole parameters that FSDP copies in. Nothing for other ops."""
    if not communicates(func):
        return
    copied_in = args[0] if func._schema.name == "fsdp::chunk_cat" else ()
    for tensor in pytree.tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor):
            yield tensor, "grads" if any(tensor is one for one in copied_in) else "comm"


@cache
def communicates(func: Any) -> bool:
    """Whether `func` sends tensors, or copies what is sent."""
    return func.namespace in NAMESPACES
