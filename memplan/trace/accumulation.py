"""How autograd adds up the gradients that meet at a node."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

SUM = torch.ops.aten.add.Tensor
"""What autograd adds up gradients by."""


def adds_in_place(addend: Tensor) -> bool:
    """Whether autograd, which adds up the gradients that meet at a node, would add to `addend` in place.

    Under a dispatch mode it never does. Otherwise it does where nobody else holds the storage, which here shows in the
    addend's end right behind the sum. A sum that a Python backward makes itself is left as it is.

    Source: InputBuffer::accumulate, can_accumulate_inplace, torch/csrc/autograd/input_buffer.cpp, torch 2.13.
    """
    if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled() or in_python_backward():
        return False
    return not addend._is_view() and addend.untyped_storage().nbytes() == addend.numel() * addend.element_size()


def in_python_backward() -> bool:
    """Whether the op was called by the backward of a `torch.autograd.Function`, and not by the engine around it."""
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction):
        return False
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
