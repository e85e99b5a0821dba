"""Which module an op belongs to: in forward the one that runs, in backward the one whose forward made the node."""

from bisect import bisect_right
from typing import Any

import torch
from torch import nn

LEAF_SEQUENCE = (1 << 63) - 1
"""Nodes at or above this number accumulate gradients. Source: AccumulateGrad, torch/csrc/autograd, torch 2.13."""


class ModulePaths:
    """The modules that run, and for each stretch of autograd's sequence numbers the module that was running."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        self._starts: list[int] = []  # sequence numbers at which the module on top changed
        self._paths: list[str] = []

    @property
    def running(self) -> str | None:
        """Path of the innermost module that runs, or None outside of all."""
        return self._running[-1] if self._running else None

    def name(self, model: nn.Module) -> None:
        """Calls the modules inside `model` by their paths."""
        for path, module in model.named_modules():
            self._names[id(module)] = path

    def enter(self, module: nn.Module, *, forward: bool) -> None:
        """`module` begins to run; in a `forward` its nodes are its own. One that the model has under no name is called
        by its class, below the module that runs it."""
        name = self._names.get(id(module))
        if name is None:
            name = ".".join(filter(None, (self.running, type(module).__name__)))
        self._running.append(name)
        self._note(forward)

    def leave(self, *, forward: bool) -> None:
        """The innermost module ends."""
        self._running.pop()
        self._note(forward)

    def of_node(self, node: Any) -> str | None:
        """Path of the module whose forward made an autograd node; None for the accumulation of gradients."""
        number = node._sequence_nr()
        if number >= LEAF_SEQUENCE or number < 0:
            return None
        at = bisect_right(self._starts, number) - 1
        return self._paths[at] if at >= 0 else ""

    def _note(self, forward: bool) -> None:
        if forward:
            self._starts.append(torch._C._autograd._get_sequence_nr())
            self._paths.append(self.running or "")
