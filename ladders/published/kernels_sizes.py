"""The layers and losses of kernels.py over the estimate's ledger."""

from collections.abc import Callable

from kernels_turns import turns

from memplan.estimate import ops, views
from memplan.estimate.products import cross_entropy as loss_of
from memplan.estimate.products import linear, mm, workspace
from memplan.estimate.tape import Parameter, Tape, Tensor

Step = Callable[[], object]
Inner = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(input, gate's matrix, the other one) -> the rows inside."""


def leaf(tape: Tape, *shape: int, dtype: str = "bfloat16") -> Parameter:
    """A tensor that wants a gradient."""
    return tape.parameter("leaf", shape, dtype, trains=True)


def earlier_benchmarks(tape: Tape) -> None:
    """A product in each thread."""
    for thread in ("forward", "backward"):
        tape.stay(f"cublas workspace of the {thread} thread", tape.workspace_bytes)


def cross_entropy(tape: Tape, *, vocab: int) -> Step:
    """Of fp32 logits [8 * 2048, vocab]."""
    logits = leaf(tape, 8 * 2048, vocab, dtype="float32")
    target = tape.new("target", (8 * 2048,), "int64")
    return lambda: tape.backward(loss_of(logits, target))


def head_and_cross_entropy(tape: Tape, *, rows: int) -> Step:
    """A head of 128,256 words and its loss; the other provider's head is there too."""
    earlier_benchmarks(tape)
    head, other = (leaf(tape, 128256, 4096) for _ in range(2))
    x = leaf(tape, rows, 4096)
    target = tape.new("target", (rows,), "int64")

    def step(_other: Parameter = other) -> None:
        tape.backward(loss_of(linear(x, head), target))

    return step


def mlp(tape: Tape, *, act: str, batch: int, seq: int, mode: str = "full") -> Step:
    """Forward, backward or both of a gated feed-forward layer, 4096 wide, 11008 inside."""

    def inner(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return ops.mul(ops.of_input(act, linear(x, gate)), linear(x, up))

    return feed_forward(tape, inner, batch=batch, seq=seq, mode=mode)


def feed_forward(tape: Tape, inner: Inner, *, batch: int, seq: int, mode: str) -> Step:
    """Forward, backward or both of a feed-forward layer, 4096 wide, 11008 inside, the rows between by `inner`."""
    earlier_benchmarks(tape)
    x = leaf(tape, batch, seq, 4096)
    gate, up, down = leaf(tape, 11008, 4096), leaf(tape, 11008, 4096), leaf(tape, 4096, 11008)

    def layer() -> Tensor:
        return linear(inner(x, gate, up), down)

    def full() -> None:
        y = layer()
        tape.backward(y, tape.new("randn_like", y.shape, y.dtype), retain=True)

    if mode == "full":
        return full
    if mode == "forward":
        return layer
    grad = tape.new("randn_like", x.shape, x.dtype)
    y = layer()
    return lambda: tape.backward(y, grad, retain=True)


def rms_norm(tape: Tape, *, width: int) -> Step:
    """Of bf16 rows [2048, width]; the other provider's norm is there too."""
    other, weight = leaf(tape, width, dtype="float32"), leaf(tape, width, dtype="float32")
    rows = leaf(tape, 2048, width)
    grad = tape.new("randn_like", rows.shape, rows.dtype)

    def norm() -> Tensor:
        x = views.to(rows, "float32")
        variance = ops.mean_last(ops.square(x))
        x = ops.mul(x, ops.rsqrt(ops.shift(variance)))
        return ops.mul(weight, views.to(x, "bfloat16"))

    def step(_other: Parameter = other) -> None:
        tape.backward(norm(), grad, retain=True)

    return step


def rope_inputs(tape: Tape, width: int, seq: int) -> tuple[list[Parameter], list[Tensor], list[Tensor]]:
    """Queries and keys of 32 and 8 heads; their gradients; bf16 tables, and what these were made of by a product that
    took cuBLAS's memory."""
    size = width // 32
    frequencies = tape.new("frequencies", (size // 2,), "float32")
    both = [leaf(tape, 1, heads, seq, size) for heads in (32, 8)]
    grads = [tape.new("randn_like", x.shape, x.dtype) for x in both]
    positions = tape.new("positions", (1, seq), "int64")
    workspace(positions)
    cos, sin = (tape.new("table", (1, seq, size), "bfloat16") for _ in range(2))
    return both, grads, [cos, sin, frequencies, positions]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by two halves, cut in this order."""
    products, half = ops.mul(x, cos), x.shape[-1] // 2
    first, second = views.narrow(x, 3, half), views.narrow(x, 3, half)
    return ops.add(products, ops.mul(views.cat((ops.neg(second), first)), sin))


def rope(tape: Tape, *, width: int, seq: int) -> Step:
    """32 query and 8 key heads; the gradients of both are asked for at once, and not kept."""
    both, grads, (cos, sin, *others) = rope_inputs(tape, width, seq)

    def step(_alive: list[Tensor] = others) -> None:
        outs = [rotated(x, views.unsqueeze(cos, 1), views.unsqueeze(sin, 1)) for x in both]
        node = tape.record("outputs", outs, lambda node, saved, seeds: [grad.alias() for grad in grads])
        tape.backward(tape.link(node, outs[0].alias()), grads[0], retain=True)
        for x in both:
            x.grad = None

    return step


def softcapped_head(tape: Tape, *, kind: str) -> Step:
    """Gemma-2-2B's head: 8192 tokens, width 2304, 256000 words, logits capped at 30; what is run says `turns`."""
    earlier_benchmarks(tape)
    x, weight = leaf(tape, 8192, 2304), leaf(tape, 256000, 2304)
    target = tape.new("target", (8192,), "int64")

    def loss() -> Tensor:
        logits = mm(x, views.transpose(weight, 0, 1))
        logits = ops.scale(ops.of_result("tanh", ops.scale(logits, "div")))
        return loss_of(views.to(logits, "float32"), target)

    return turns(kind, loss, tape.backward, (x, weight))
