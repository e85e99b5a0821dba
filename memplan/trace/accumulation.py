"""What autograd does in place, but for a dispatch mode that looks on: adding up gradients, writing rows into zeros."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from memplan.trace.events import Trace

SUM = torch.ops.aten.add.Tensor
"""What autograd adds up gradients by."""

WRITES: dict[Any, Any] = {
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
"""What the backward of `x[index]`, `index_select`, `topk` and `gather` calls under a mode, and what without one."""
ZEROS = str(torch.ops.aten.new_zeros.default)


def in_place(func: Any, args: tuple[Any, ...], trace: Trace) -> Any:
    """`func`, or its kin that writes into zeros made right before it, where a backward calls it.

    Source: `areAnyTensorSubclassLike` in index_backward, index_select_backward_symint, gather_backward and
    value_selecting_reduction_backward_symint, torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native, torch
    2.13.
    """
    if func not in WRITES or torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():
        return func
    last, index = trace.allocs[-1], len(trace.allocs) - 1
    zeros = last.op == ZEROS and trace.events[-1] == index and last.shape == tuple(args[0].shape)
    return WRITES[func] if zeros and not in_python_backward() else func


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
