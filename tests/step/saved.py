"""What autograd keeps, counted by its own hooks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Saved:
    """A context that counts the storages autograd saves inside it, each once, those of `known` tensors left out."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is given out twice
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._storages[storage.data_ptr()] = storage
        return tensor

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def num_bytes(self, *, at_least: int = 0) -> int:
        """Bytes of the storages of `at_least` as many bytes."""
        return sum(storage.nbytes() for storage in self._storages.values() if storage.nbytes() >= at_least)
