"""What recurrent layers run beside products and elementwise ops, and their loop over equal parts of a sequence.

Source: the ops' entries in derivatives.yaml, CopySlices (autograd/functions/tensor.cpp), torch 2.13.
"""

import weakref
from collections.abc import Callable
from typing import Any

from memplan.estimate.autocast import for_autocast, operands
from memplan.estimate.offload import Call
from memplan.estimate.stack import more
from memplan.estimate.tape import Node, Storage, Tape, Tensor

SINGLE = 5
"""Rounds of a loop that are told one by one: the first, whose state has no history; the second, which speaks for those
behind it; and the last three, the first ones in backward, where gradients of the whole begin."""


def select(x: Tensor, dim: int) -> Tensor:
    """A view of one entry along `dim`, another one each time; backward fills zeros of the whole shape."""
    tape, dim = x.tape, dim % len(x.shape)

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new("select_backward", node.info, grads[0].dtype)]

    node = tape.record("select", (x,), backward, info=x.shape)
    out = x.alias((*x.shape[:dim], *x.shape[dim + 1 :]))
    out.place = (*out.place, object())
    return tape.link(node, out)


def assign(whole: Tensor, part: Tensor) -> None:
    """Writes `part` into a view of `whole`; backward copies the gradient of the whole, in which zeros take the part's
    place, and the part's."""
    tape = whole.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        shape, dtype = node.info
        of_whole = tape.new("new_empty_strided", grads[0].shape, grads[0].dtype)
        of_part = tape.new("clone", shape, of_whole.dtype)
        zeros = tape.new("zeros_like", shape, of_whole.dtype)
        if dtype != of_part.dtype:
            of_part = tape.new("to", shape, dtype)
        del zeros
        return [None if node.edges[0] is None else of_whole, of_part]

    node = tape.record("CopySlices", (whole, part), backward, info=(part.shape, part.dtype))
    tape.link(node, whole)


def pad(x: Tensor, dim: int, more: Any) -> Tensor:
    """`x` with `more` zeros behind it along `dim`: a copy even where there are none."""
    tape = x.tape
    shape = list(x.shape)
    shape[dim] = shape[dim] + more

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new("constant_pad_nd", node.info, grads[0].dtype)]

    node = tape.record("constant_pad_nd", (x,), backward, info=x.shape)
    return tape.link(node, tape.make("constant_pad_nd", (tuple(shape), x.dtype)))


def cumsum(x: Tensor) -> Tensor:
    """Sums along the last dimension; backward turns round, sums and turns back."""
    (x,) = for_autocast("cumsum", x)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        made = [tape.new(op, grads[0].shape, grads[0].dtype) for op in ("flip", "cumsum", "flip")]
        return made[2:]

    node = tape.record("cumsum", (x,), backward)
    return tape.link(node, tape.make("cumsum", (x.shape, x.dtype)))


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, C, S] by a filter [C, 1, k] a channel, k - 1 zeros on both sides -> [B, C, S + k - 1]: saves both."""
    x, weight = operands(x, weight)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        dtype = grads[0].dtype
        return [
            None if edge is None else tape.new("convolution_backward", shape, dtype)
            for edge, shape in zip(node.edges, node.info, strict=True)
        ]

    node = tape.record("convolution", (x, weight), backward, (x, weight), info=(x.shape, weight.shape))
    size = x.shape[2] + weight.shape[2] - 1
    return tape.link(node, tape.make("convolution", ((*x.shape[:2], size), x.dtype)))


def solve_triangular(system: Tensor, right: Tensor) -> Tensor:
    """X of system [..., m, m] X = right [..., m, D]: saves the system and X."""
    tape = system.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        found = saved[1]
        of_right = tape.new("linalg_solve_triangular", found.shape, found.dtype)
        product = tape.new("bmm", saved[0].shape, found.dtype)
        of_system = tape.new("neg", product.shape, found.dtype)
        del product
        of_system = tape.new("tril", of_system.shape, found.dtype)
        return [of_system, of_right]

    node = tape.record("linalg_solve_triangular", (system, right), backward, (system,))
    out: Tensor = tape.make("linalg_solve_triangular", (right.shape, right.dtype))
    return tape.link(node, out, saved=(out,))


class Kept:
    """What rounds that are not told keep for backward."""

    def __init__(self, storages: list[Storage]) -> None:
        self.storages = storages

    def alias(self) -> "Kept":
        """Itself, which holds no history."""
        return self


def rounds(number: int, held: list[Tensor], run: Callable[[list[Tensor]], None]) -> None:
    """`run` so many times: each round replaces the tensors of `held`, the first of which is the state that it hands to
    the next.

    What equal rounds keep grows by the same bytes with each, as equal blocks do (`stack`): one speaks for all between.
    """
    if number <= SINGLE:
        for _ in range(number):
            run(held)
        return
    run(held)
    tape = held[0].tape
    start, before = len(tape.allocs), [weakref.ref(tensor.storage) for tensor in held]
    on_host = len(tape.frame.kept) if isinstance(tape.frame, Call) else 0
    run(held)
    own = {tensor.storage.index for tensor, last in zip(held, before, strict=False) if last() is None}
    held[0] = repeated(tape, held[0], start, own, number - SINGLE, on_host)
    for _ in range(SINGLE - 2):
        run(held)


def repeated(tape: Tape, state: Tensor, start: int, own: set[int], copies: int, on_host: int) -> Tensor:
    """`state` behind a node that holds `copies` more of what has been made since `start` and still lives, `own` left
    out: what only the next round reads; and of what waits on the host since the number `on_host`."""
    kept = [
        more(tape, alloc, copies)
        for index, alloc in enumerate(tape.allocs[start:], start)
        if not alloc.died and index not in own and alloc.op != "host"
    ]
    if tape.policy is not None:
        store = tape.policy.store["rounds"]
        store.pop(0) if tape.policy.again else store.append(kept)
    offloads = isinstance(tape.frame, Call)
    node = tape.record("rounds", (state,), lambda node, saved, grads: grads, () if offloads else (Kept(kept),))
    if node is None:
        return state
    if offloads:
        node.saved += [kept, tape.frame.repeat(on_host, copies)]
    return tape.link(node, state.alias())
