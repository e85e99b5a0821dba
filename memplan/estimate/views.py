"""Dtypes, shapes and views: what casts, copies and cuts of tensors make, and what their backward makes.

Each function stands for the torch op of its name; tensors are `tape.Tensor`. Letters in comments as in `spec.model`.
"""

import math
from collections.abc import Sequence
from typing import Any

from memplan.estimate.reductions import summed
from memplan.estimate.tape import Node, Shape, Tensor

FLOATS = ("float32", "bfloat16", "float16", "float64")


def promoted(*tensors: Tensor) -> str:
    """Dtype of an elementwise result."""
    kinds = [tensor.dtype for tensor in tensors]
    floats = [kind for kind in kinds if kind in FLOATS]
    if not floats:
        return max(kinds, key=("bool", "uint8", "int32", "int64").index)
    return floats[0] if all(kind == floats[0] for kind in floats) else "float32"


def broadcast(left: Shape, right: Shape) -> Shape:
    """Shape of an elementwise result."""
    if left is right or (len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))):
        return left
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    padded = (1,) * (len(longer) - len(shorter)) + tuple(shorter)
    return tuple(b if is_one(a) else a for a, b in zip(longer, padded, strict=True))


def is_one(size: Any) -> bool:
    """Whether a dimension is 1; arrays of sizes are not."""
    return type(size) is int and size == 1


def is_zero(size: Any) -> bool:
    """Whether a dimension is 0; arrays of sizes are not."""
    return isinstance(size, int) and size == 0


def is_ragged(size: Any, step: int) -> bool:
    """Whether a dimension, or one of an array of them, is no multiple of `step`."""
    rest = size % step
    return bool(rest) if isinstance(rest, int) else bool(rest.any())


def same(left: Shape, right: Shape) -> bool:
    """Whether two shapes are equal, dimension by dimension."""
    return len(left) == len(right) and all(a is b or equal(a, b) for a, b in zip(left, right, strict=True))


def equal(left: Any, right: Any) -> bool:
    """Whether two dimensions are the same number, or the same array of numbers."""
    found = left == right
    return found if isinstance(found, bool) else bool(found.all())


def reaches(size: Any, bound: int) -> bool:
    """Whether a length, or every one of an array of them, is `bound` or more."""
    found = size >= bound
    return found if isinstance(found, bool) else bool(found.all())


def sum_to(grad: Tensor, shape: Shape) -> Tensor:
    """`grad` summed over the dimensions that `shape` broadcast."""
    if same(grad.shape, shape):
        return grad
    return summed(grad, shape)


def as_inputs(made: list[Any], inputs: Sequence[tuple[Shape, str]]) -> list[Any]:
    """Gradients summed to their inputs' shapes and converted to their dtypes one after another, as the engine does
    when an op has returned."""
    for number, (shape, dtype) in enumerate(inputs):
        grad, made[number] = made[number], None
        if grad is not None:
            grad = sum_to(grad, shape)
            made[number] = to(grad, dtype)
        del grad
    return made


def to(x: Tensor, dtype: str) -> Tensor:
    """`x` in `dtype`; itself where it is."""
    if x.dtype == dtype:
        return x
    tape = x.tape
    node = tape.record("to", (x,), lambda node, saved, grads: grads) if x.dtype in FLOATS else None
    out: Tensor = tape.make("to", (x.shape, dtype))
    return tape.link(node, out)


def reshaped_backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
    grad: Tensor = grads[0]
    return [grad.alias(node.info)]


def view(x: Tensor, *shape: Any) -> Tensor:
    """`x` under another shape of as many elements, one of which may be -1."""
    if -1 in [size for size in shape if isinstance(size, int)]:
        known = math.prod(size for size in shape if not (isinstance(size, int) and size == -1))
        shape = tuple(x.numel // known if isinstance(size, int) and size == -1 else size for size in shape)
    tape = x.tape
    node = tape.record("view", (x,), reshaped_backward, info=x.shape)
    return tape.link(node, x.alias(tuple(shape)))


def flatten(x: Tensor, start: int, end: int = -1) -> Tensor:
    """`x` with the dimensions from `start` to `end` made one."""
    end = end % len(x.shape)
    return view(x, *x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def unflatten_last(x: Tensor, size: int) -> Tensor:
    """`x` [..., n * size] as [..., n, size]."""
    return view(x, *x.shape[:-1], x.shape[-1] // size, size)


def transpose(x: Tensor, first: int, second: int) -> Tensor:
    """A view of `x` with two dimensions swapped."""
    shape = list(x.shape)
    shape[first], shape[second] = shape[second], shape[first]
    tape = x.tape
    node = tape.record("transpose", (x,), reshaped_backward, info=x.shape)
    return tape.link(node, turned(x, tuple(shape), (first % len(shape), second % len(shape))))


def turned(x: Tensor, shape: Shape, how: tuple[int, ...]) -> Tensor:
    """`x` under `shape` with its dimensions turned; the same turn twice undoes it."""
    out = x.alias(shape)
    out.place = x.place[:-1] if x.place[-1:] == (how,) else (*x.place, how)
    return out


def permute(x: Tensor, *order: int) -> Tensor:
    """A view of `x` with its dimensions in `order`."""
    tape = x.tape
    node = tape.record("permute", (x,), reshaped_backward, info=x.shape)
    return tape.link(node, turned(x, tuple(x.shape[i] for i in order), order))


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A view of `x` with one more dimension of 1."""
    dim = dim % (len(x.shape) + 1)
    return view(x, *x.shape[:dim], 1, *x.shape[dim:])


def squeeze(x: Tensor, dim: int) -> Tensor:
    """A view of `x` without a dimension of 1."""
    dim = dim % len(x.shape)
    return view(x, *x.shape[:dim], *x.shape[dim + 1 :])


def expand(x: Tensor, *shape: Any) -> Tensor:
    """A view of `x` that repeats its dimensions of 1; backward sums over them."""
    tape = x.tape
    node = tape.record("expand", (x,), lambda node, saved, grads: [sum_to(grads[0], node.info)], info=x.shape)
    return tape.link(node, x.alias(tuple(shape), dense=same(tuple(shape), x.shape)))


def clone(x: Tensor) -> Tensor:
    """A dense copy of `x`, as `contiguous` and `reshape` make where a view does not do."""
    tape = x.tape
    node = tape.record("clone", (x,), lambda node, saved, grads: grads)
    return tape.link(node, tape.make("clone", (x.shape, x.dtype)))


def detach(x: Tensor) -> Tensor:
    """`x` without history."""
    return x.alias()


def narrow(x: Tensor, dim: int, size: Any) -> Tensor:
    """A view of `size` entries along `dim`; backward fills zeros of the whole shape."""
    shape = list(x.shape)
    shape[dim] = size
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new("slice_backward", node.info, grads[0].dtype)]

    node = tape.record("slice", (x,), backward, info=x.shape)
    return tape.link(node, x.alias(tuple(shape)))


def pad_last(x: Tensor, size: Any) -> Tensor:
    """A copy of `x` with zeros behind its last dimension up to `size`; backward copies what is before them."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new("constant_pad_nd", node.info, grads[0].dtype)]

    node = tape.record("constant_pad_nd", (x,), backward, info=x.shape)
    return tape.link(node, tape.make("constant_pad_nd", ((*x.shape[:-1], size), x.dtype)))


def split(x: Tensor, sizes: Sequence[Any], dim: int = -1) -> list[Tensor]:
    """Views of `x` of `sizes` along `dim`; backward concatenates their gradients."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        dtype = next(grad.dtype for grad in grads if grad is not None)
        cut = zip(node.info[1], grads, strict=False)
        zeros = [tape.new("zeros", shape, dtype) for shape, grad in cut if grad is None]
        out = tape.new("cat", node.info[0], dtype)
        zeros.clear()
        return [out]

    shapes = []
    for size in sizes:
        shape = list(x.shape)
        shape[dim] = size
        shapes.append(tuple(shape))
    node = tape.record("split", (x,), backward, info=(x.shape, shapes))
    outs = [x.alias(shape) for shape in shapes]
    for number, out in enumerate(outs):
        out.place = (*x.place, number)
    tape.link(node, *outs)
    return outs


def chunk(x: Tensor, num: int, dim: int = -1) -> list[Tensor]:
    """`num` equal parts of `x` along `dim`."""
    return split(x, [x.shape[dim] // num] * num, dim)


def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    """Views of `x` without dimension `dim`; backward stacks their gradients."""
    return [squeeze(part, dim) for part in split(x, [1] * x.shape[dim], dim)]


def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """`parts` one behind another along `dim`; backward hands out views of the gradient."""
    tape = parts[0].tape
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        grad: Tensor = grads[0]
        return [grad.alias(part) for part in node.info]

    node = tape.record("cat", parts, backward, info=[part.shape for part in parts])
    return tape.link(node, tape.make("cat", (tuple(shape), promoted(*parts))))


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`parts` along a new dimension."""
    tape = parts[0].tape
    rank = len(parts[0].shape) + 1
    dim = dim % rank
    shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        grad: Tensor = grads[0]
        return [grad.alias(part) for part in node.info]

    node = tape.record("stack", parts, backward, info=[part.shape for part in parts])
    return tape.link(node, tape.make("stack", (shape, promoted(*parts))))


def repeat_interleave(x: Tensor, times: int, dim: int) -> Tensor:
    """`x` with each entry along `dim` repeated: an expanded view made dense; backward sums."""
    dim = dim % len(x.shape)
    wide = unsqueeze(x, dim + 1)
    shape = (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])
    return flatten(clone(expand(wide, *shape)), dim, dim + 1)
