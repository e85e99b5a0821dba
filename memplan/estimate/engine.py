"""Backward over the ledger: autograd's order, how gradients that meet are added up, and when they are let go.

Source: torch/csrc/autograd/engine.cpp, input_buffer.cpp (`InputBuffer::accumulate`) and accumulate_grad.h, torch 2.13.
"""

import sys
from collections import Counter
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from memplan.estimate.tensors import Holder, Node, Parameter, Tensor

if TYPE_CHECKING:
    from memplan.estimate.tape import Tape


class Box:
    """What holds one object, to see how this Python counts references."""

    def __init__(self) -> None:
        self.held = object()


def counted() -> tuple[int, int, int]:
    """`sys.getrefcount` of an object that a local name holds, a list and a local name, an attribute."""
    alone = object()
    listed = [object()]
    both, box = listed[0], Box()
    return sys.getrefcount(alone), sys.getrefcount(both), sys.getrefcount(box.held)


BY_NAME, BY_LIST_AND_NAME, BY_ATTRIBUTE = counted()


def run_backward(tape: "Tape", root: Tensor, seed: Tensor | None, *, retain: bool) -> None:
    """Runs backward from a scalar, or from a tensor whose gradient is `seed`."""
    assert root.node is not None
    tape.grad_enabled, tape.thread = False, "backward"
    pending = dependencies(root.node)
    if seed is None:
        seed = tape.new("ones_like", root.shape, root.dtype)  # which the caller of backward holds
    first = seed if seed.dtype == root.dtype else tape.new("to", seed.shape, root.dtype)  # and the engine this one
    buffers: dict[Any, list[Any]] = {root.node: [first]}
    ready = [root.node]
    del root
    part = tape.part
    while ready:
        node = heappop(ready)
        while tape.open_rows and node.seq <= tape.open_rows[-1][0]:
            tape.close_row()
        tape.part = node.part
        outs = run_node(tape, node, buffers.pop(node), retain=retain)
        for number, edge in enumerate(node.edges):
            if edge is None:
                continue
            target, slot = edge
            grad, outs[number] = outs[number], None
            pending[target] -= 1
            if grad is not None:
                add_up(tape, buffers, target, slot, grad)
                del grad
            if pending[target] or target not in buffers:
                continue
            if isinstance(target, Parameter):
                accumulate(tape, target, buffers.pop(target))
            else:
                heappush(ready, target)
        del target, edge, node
    while tape.open_rows:
        tape.close_row()
    tape.part = part
    tape.grad_enabled, tape.thread = True, "forward"


def run_node(tape: "Tape", node: Node, grads: list[Any], *, retain: bool) -> list[Any]:
    """Gradients of a node's inputs, in their dtypes; what it saved is let go."""
    saved = [one.unpack(tape) if isinstance(one, Holder) else one for one in node.saved]
    outs = list(node.backward(node, saved, grads))
    if not retain:
        node.saved = []
    grads.clear()
    saved.clear()
    for number, edge in enumerate(node.edges):
        if edge is None:
            outs[number] = None
            continue
        grad = outs[number]
        if grad is None:
            continue
        wanted = edge[0].dtype if isinstance(edge[0], Parameter) else edge[0].dtypes[edge[1]]
        if grad.dtype != wanted:
            outs[number] = None
            outs[number] = tape.new("to", grad.shape, wanted)
        del grad
    return outs


def add_up(tape: "Tape", buffers: dict[Any, list[Any]], target: Any, slot: int, grad: Tensor) -> None:
    """Adds `grad` to what has come to `target` before, in place where nobody else holds that."""
    buffer = buffers.setdefault(target, [])
    while len(buffer) <= slot:
        buffer.append(None)
    old = buffer[slot]
    if old is None:
        buffer[slot] = grad
        return
    alone = sys.getrefcount(old) == BY_LIST_AND_NAME and sys.getrefcount(old.storage) == BY_ATTRIBUTE
    if old.is_view or not old.dense or not alone:
        buffer[slot] = tape.new("add", old.shape, old.dtype)


def accumulate(tape: "Tape", parameter: Parameter, buffer: list[Any]) -> None:
    """Makes `buffer`'s gradient the parameter's, or adds it to the one there is."""
    grad = buffer.pop()
    if parameter.grad is None:
        if not grad.dense or sys.getrefcount(grad) > BY_NAME:
            grad = tape.new("clone", grad.shape, grad.dtype)
        tape.allocs[grad.storage.index].category = "grads"
        parameter.grad = grad
    del grad
    if tape.on_grad is not None:
        tape.on_grad(parameter)


def dependencies(root: Node) -> Counter[Any]:
    """How many gradients each node and parameter below `root` waits for."""
    counts: Counter[Any] = Counter()
    seen, stack = {root}, [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            counts[edge[0]] += 1
            if edge[0] not in seen and not isinstance(edge[0], Parameter):
                seen.add(edge[0])
                stack.append(edge[0])
    return counts
