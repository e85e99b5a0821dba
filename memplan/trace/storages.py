"""Storages that change their size, and tensors that have none of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OnResize:
    """Tells `hear` of each storage that is resized itself, which no op shows: FSDP frees gathered parameters so.

    Source: free_storage and alloc_storage, torch/distributed/fsdp/_fully_shard/_fsdp_common.py, torch 2.13.
    """

    def __init__(self, hear: Callable[[Any], None]) -> None:
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, *size: int) -> Any:
            out = plain(storage, *size)
            hear(storage)
            return out

        self._plain = plain
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        """Storages are resized unheard again."""
        torch.UntypedStorage.resize_ = self._plain  # type: ignore[method-assign]


def is_shell(kind: type) -> bool:
    """Whether tensors of this class have no memory but that of tensors inside: DTensor, quantized ones."""
    return hasattr(kind, "__tensor_flatten__")


def inside(tensor: Tensor) -> Tensor:
    """The first tensor inside a shell, through shells in shells; any other tensor itself."""
    while is_shell(type(tensor)):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])  # type: ignore[attr-defined]
    return tensor
