"""Selective checkpointing with the fault that torch up to 2.11 left open to policies: one counter of products for
forward and recomputation, and kept results handed out in order."""

from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCT = torch.ops.aten.mm.default


class Shared:
    """What both passes of one call share."""

    def __init__(self) -> None:
        self.num_products = 0
        self.kept: dict[Any, list[Any]] = defaultdict(list)

    def keeps(self, op: Any) -> bool:
        """Every second product, counted on from forward into the recomputation."""
        if op is not PRODUCT:
            return False
        self.num_products += 1
        return self.num_products % 2 == 1


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Forward: keeps results."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.shared.keeps(func):
            self.shared.kept[func].append(out.detach())
        return out


class Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recomputation: gives back what was kept, in order."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.shared.keeps(func) and self.shared.kept[func]:
            return self.shared.kept[func].pop(0)
        return func(*args, **(kwargs or {}))


def shared_counter_contexts() -> tuple[Keeping, Giving]:
    """Contexts of one call."""
    shared = Shared()
    return Keeping(shared), Giving(shared)
