"""Entries of a tensor picked by places or by bools, and written back.

Source: index, nonzero and masked_scatter in derivatives.yaml, index_put in aten/src/ATen/native/cuda/Indexing.cu, torch
2.13.
"""

from typing import Any

from memplan.estimate.tape import Node, Shape, Storage, Tape, Tensor


def picked(x: Tensor, places: Tensor, shape: Shape) -> Tensor:
    """Entries of `shape` of x by places, which it saves, or by bools, which are made places for the moment; backward
    adds into zeros of the whole, by way of sorted numbers on CUDA."""
    tape = x.tape
    numbers = shape[0] if places.dtype == "bool" else places.numel

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        out = tape.new("index_backward", node.info, grads[0].dtype)
        found = nonzero(tape, saved[0], numbers)
        if tape.rules == "cuda":
            tape.hidden("index_put", *[8 * numbers] * 3)
        del found
        return [out]

    node = tape.record("index", (x,), backward, (places,), info=x.shape)
    found = nonzero(tape, places, numbers)
    out: Tensor = tape.make("index", (shape, x.dtype))
    del found
    return tape.link(node, out)


def nonzero(tape: Tape, places: Tensor, number: Any) -> Storage | None:
    """The places of bools, one row a dimension."""
    return tape.allocate("nonzero", (len(places.shape), number), "int64") if places.dtype == "bool" else None


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`x` with the entries of `source` [n] where `mask` is True: saves the mask; backward clears them in one gradient
    and collects them in the other."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        grad = grads[0]
        of_x = None if node.edges[0] is None else tape.new("masked_fill", grad.shape, grad.dtype)
        of_source = None if node.edges[1] is None else tape.new("masked_scatter_backward", node.info, grad.dtype)
        return [of_x, of_source]

    node = tape.record("masked_scatter", (x, source), backward, (mask,), info=source.shape)
    return tape.link(node, tape.make("masked_scatter", (x.shape, x.dtype)))
