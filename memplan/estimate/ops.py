"""What elementwise ops and reductions make and save, and what their backward makes.

Each function stands for the torch op of its name; tensors are `tape.Tensor`.
"""

from typing import Any

from memplan.estimate.autocast import autocast_dtype, for_autocast
from memplan.estimate.tape import Node, Tensor
from memplan.estimate.views import as_inputs, broadcast, promoted, sum_to, to


def add(x: Tensor, y: Tensor) -> Tensor:
    """Sum; saves nothing."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        pairs = zip(node.edges, node.info, strict=True)
        return [None if edge is None else sum_to(grads[0], shape) for edge, shape in pairs]

    node = tape.record("add", (x, y), backward, info=(x.shape, y.shape))
    return tape.link(node, tape.make("add", (broadcast(x.shape, y.shape), promoted(x, y))))


def add_scaled(x: Tensor, y: Tensor) -> Tensor:
    """`x` plus a number times `y`, of one shape; backward makes the second operand's gradient."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [grads[0], tape.new("mul", grads[0].shape, grads[0].dtype)]

    node = tape.record("add", (x, y), backward)
    return tape.link(node, tape.make("add", (x.shape, promoted(x, y))))


def sub(x: Tensor, y: Tensor) -> Tensor:
    """Difference; saves nothing, and its backward makes the second operand's gradient."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        grad = grads[0]
        first, second = node.info
        other = neg(grad) if node.edges[1] is not None else None
        return [sum_to(grad, first), None if other is None else sum_to(other, second)]

    node = tape.record("sub", (x, y), backward, info=(x.shape, y.shape))
    return tape.link(node, tape.make("sub", (broadcast(x.shape, y.shape), promoted(x, y))))


def mul(x: Tensor, y: Tensor) -> Tensor:
    """Product; saves each factor whose partner wants a gradient."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        left, right = saved
        saved.clear()
        made = [None, None if left is None else mul(grads[0], left)]
        made[0] = None if right is None else mul(grads[0], right)
        del left, right
        return as_inputs(made, node.info)

    node = tape.record(
        "mul",
        (x, y),
        backward,
        (x if y.requires_grad else None, y if x.requires_grad else None),
        info=((x.shape, x.dtype), (y.shape, y.dtype)),
    )
    return tape.link(node, tape.make("mul", (broadcast(x.shape, y.shape), promoted(x, y))))


def div(x: Tensor, y: Tensor) -> Tensor:
    """Quotient; saves the divisor, and the dividend where the divisor wants a gradient."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        left, right = saved
        first, second = node.info
        grad = grads[0]
        of_x = sum_to(mul(grad, right), first) if node.edges[0] is not None else None
        of_y = None
        if left is not None:
            quotient = mul(neg(grad), mul(mul(left, right), right))
            of_y = sum_to(quotient, second)
        return [of_x, of_y]

    node = tape.record("div", (x, y), backward, (x if y.requires_grad else None, y), info=(x.shape, y.shape))
    return tape.link(node, tape.make("div", (broadcast(x.shape, y.shape), promoted(x, y))))


def scale(x: Tensor, op: str = "mul") -> Tensor:
    """`x` times, divided by or to the power of a number that is no tensor; saves nothing. For `neg` too."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new(op, grads[0].shape, grads[0].dtype)]

    node = tape.record(op, (x,), backward)
    return tape.link(node, tape.make(op, (x.shape, x.dtype)))


def neg(x: Tensor) -> Tensor:
    """-x."""
    return scale(x, "neg")


def shift(x: Tensor, op: str = "add") -> Tensor:
    """`x` plus a number; saves nothing, and its gradient passes through."""
    tape = x.tape
    node = tape.record(op, (x,), lambda node, saved, grads: grads)
    return tape.link(node, tape.make(op, (x.shape, x.dtype)))


def square(x: Tensor) -> Tensor:
    """x ** 2: saves x; backward makes 2 x and its product with the gradient."""
    (x,) = for_autocast("pow", x)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        # grad * (2 * x ** 1): one expression, whose parts live to its end
        power = tape.new("pow", saved[0].shape, saved[0].dtype)
        scaled = tape.new("mul", power.shape, power.dtype)
        return [mul(grads[0], scaled)]

    node = tape.record("pow", (x,), backward, (x,))
    return tape.link(node, tape.make("pow", (x.shape, x.dtype)))


def cube(x: Tensor) -> Tensor:
    """x ** 3, which is made, saved and led back as x ** 2 is."""
    return square(x)


def of_input(op: str, x: Tensor) -> Tensor:
    """An activation that saves its input and whose backward is one kernel: silu, gelu, softplus, relu's kin."""
    (x,) = for_autocast(op, x)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new(f"{op}_backward", grads[0].shape, grads[0].dtype)]

    node = tape.record(op, (x,), backward, (x,))
    return tape.link(node, tape.make(op, (x.shape, x.dtype)))


def of_result(op: str, x: Tensor) -> Tensor:
    """An activation that saves its result and whose backward is one kernel: tanh, sigmoid, relu."""
    (x,) = for_autocast(op, x)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new(f"{op}_backward", grads[0].shape, grads[0].dtype)]

    node = tape.record(op, (x,), backward)
    out = tape.make(op, (x.shape, x.dtype))
    return tape.link(node, out, saved=(out,))


def exp(x: Tensor) -> Tensor:
    """Saves its result; backward multiplies by it."""
    (x,) = for_autocast("exp", x)
    tape = x.tape
    node = tape.record("exp", (x,), lambda node, saved, grads: [mul(grads[0], saved[0])])
    out = tape.make("exp", (x.shape, x.dtype))
    return tape.link(node, out, saved=(out,))


def rsqrt(x: Tensor) -> Tensor:
    """Saves its result; backward is -0.5 * grad * result ** 3."""
    (x,) = for_autocast("rsqrt", x)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        half = scale(grads[0])
        cube = tape.new("pow", saved[0].shape, saved[0].dtype)
        return [mul(half, cube)]

    node = tape.record("rsqrt", (x,), backward)
    out = tape.make("rsqrt", (x.shape, x.dtype))
    return tape.link(node, out, saved=(out,))


def mean_last(x: Tensor) -> Tensor:
    """Mean over the last dimension, kept as 1; backward divides an expanded view."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new("div", node.info, grads[0].dtype)]

    node = tape.record("mean", (x,), backward, info=x.shape)
    return tape.link(node, tape.make("mean", ((*x.shape[:-1], 1), x.dtype)))


def mean(x: Tensor, dim: int) -> Tensor:
    """Mean over one dimension, which goes; backward divides an expanded view."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new("div", node.info, grads[0].dtype)]

    node = tape.record("mean", (x,), backward, info=x.shape)
    return tape.link(node, tape.make("mean", ((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)))


def total(x: Tensor, *dims: int, keepdim: bool = False) -> Tensor:
    """Sum over `dims`, over all where none is named; backward expands."""
    (x,) = for_autocast("sum", x)
    tape = x.tape
    gone = {dim % len(x.shape) for dim in dims} if dims else set(range(len(x.shape)))
    shape = tuple(1 if i in gone else n for i, n in enumerate(x.shape) if keepdim or i not in gone)

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        grad: Tensor = grads[0]
        return [grad.alias(node.info, dense=False)]

    node = tape.record("sum", (x,), backward, info=x.shape)
    return tape.link(node, tape.make("sum", (shape, x.dtype)))


def softmax(x: Tensor, dtype: str | None = None, op: str = "softmax") -> Tensor:
    """Over the last dimension, in `dtype` where it is given, which autocast then leaves as it is; saves its result. On
    CUDA a kernel reads fp16 and writes fp32, and another does so backwards."""
    tape = x.tape
    if dtype is None:
        dtype = autocast_dtype(op, x)
    if not (tape.rules == "cuda" and dtype == "float32" and x.dtype == "float16"):
        x = to(x, dtype)

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new(f"{op}_backward", grads[0].shape, node.info)]

    node = tape.record(op, (x,), backward, info=x.dtype)
    out = tape.make(op, (x.shape, dtype))
    return tape.link(node, out, saved=(out,))


def dropout(x: Tensor, probability: float) -> Tensor:
    """`x` with elements dropped: saves a mask of bools; itself without dropout."""
    if not probability:
        return x
    tape = x.tape
    if tape.rules == "cpu":  # made of other ops there: a mask in the input's dtype that is divided in place
        node = None
        mask = tape.make("bernoulli", (x.shape, x.dtype))
        return mul(x, mask)

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tape.new("native_dropout_backward", grads[0].shape, grads[0].dtype)]

    node = tape.record("native_dropout", (x,), backward)
    out, mask = tape.make("native_dropout", (x.shape, x.dtype), (x.shape, "bool"))
    return tape.link(node, out, saved=(mask,))
