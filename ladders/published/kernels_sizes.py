"""The layers and losses of kernels.py over the estimate's ledger."""

from collections.abc import Callable

from memplan.estimate import ops, views
from memplan.estimate.products import cross_entropy as loss_of
from memplan.estimate.products import linear
from memplan.estimate.tape import Parameter, Tape, Tensor

Step = Callable[[], object]


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
    earlier_benchmarks(tape)
    x = leaf(tape, batch, seq, 4096)
    gate, up, down = leaf(tape, 11008, 4096), leaf(tape, 11008, 4096), leaf(tape, 4096, 11008)

    def layer() -> Tensor:
        return linear(ops.mul(ops.of_input(act, linear(x, gate)), linear(x, up)), down)

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
