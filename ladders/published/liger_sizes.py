"""Liger-Kernel's own layers and losses (provider `liger`) over the estimate's ledger, in the benchmarks of kernels.py.

Written from linkedin/Liger-Kernel src/liger_kernel/ops and transformers at b5672a15 (liger 0.2.1), the fused head and
loss at v0.4.2: what each autograd function makes, saves and hands on. Triton kernels make nothing themselves; several
write their result over their input, and gradients over what was saved.
"""

from collections.abc import Callable
from typing import Any

from kernels_sizes import earlier_benchmarks, feed_forward, leaf, rope_inputs

from memplan.estimate import views
from memplan.estimate.products import linear, mm
from memplan.estimate.tape import Node, Parameter, Tape, Tensor

Step = Callable[[], object]


def counted(target: Tensor) -> Tensor:
    """Labels that are not ignored: a comparison, its int64 copy and their sum."""
    tape = target.tape
    valid = tape.new("ne", target.shape, "bool")
    wide = views.to(valid, "int64")
    out: Tensor = tape.new("sum", (), "int64")
    del wide
    return out


def liger_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """ops/cross_entropy.py: the gradient takes the place of the logits, which are saved so."""
    tape = logits.tape
    losses = tape.new("zeros", logits.shape[:1], logits.dtype)
    counted(target)
    node = tape.record("LigerCrossEntropy", (logits,), lambda node, saved, grads: saved[:1], (logits,))
    total = tape.new("sum", (), logits.dtype)
    out: Tensor = tape.link(node, tape.new("div", (), logits.dtype))
    del losses, total
    return out


def cross_entropy(tape: Tape, *, vocab: int) -> Step:
    """Of fp32 logits [8 * 2048, vocab]."""
    logits = leaf(tape, 8 * 2048, vocab, dtype="float32")
    target = tape.new("target", (8 * 2048,), "int64")
    return lambda: tape.backward(liger_cross_entropy(logits, target))


def fused_linear_cross_entropy(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """ops/fused_linear_cross_entropy.py: both gradients made in forward, from the logits of a part of the rows that are
    converted to fp32 and back. A part's bf16 gradient is still there when the next part's logits come."""
    tape, (R, H), V = rows.tape, rows.shape, weight.shape[0]
    size = 1 << (-(-R // -(-V // H)) - 1).bit_length()
    of_weight, of_rows = tape.new("zeros_like", weight.shape, weight.dtype), tape.new("zeros_like", (R, H), rows.dtype)
    losses = tape.new("zeros", (R,), "float32")
    num_valid = counted(target)
    tape.grad_enabled = False
    for start in range(0, R, size):
        part = views.narrow(rows, 0, min(size, R - start))
        logits = mm(part, views.transpose(weight, 0, 1))
        counted(views.narrow(target, 0, part.shape[0]))
        logits = views.to(logits, "float32")
        logits = views.to(logits, rows.dtype)
        share = tape.new("div", (), "float32")
        tape.new("mul", part.shape[:1], "float32")
        grad_logits = tape.new("mul", logits.shape, logits.dtype)
        mm(grad_logits, weight)
    tape.grad_enabled = True
    out = tape.new("sum", (), "float32")
    node = tape.record(
        "LigerFusedLinearCrossEntropy", (rows, weight), lambda node, saved, grads: saved[:], (of_rows, of_weight)
    )
    del losses, num_valid, share, grad_logits
    linked: Tensor = tape.link(node, out)
    return linked


def head_and_cross_entropy(tape: Tape, *, rows: int) -> Step:
    """A head of 128,256 words and its loss; the other provider's head is there too."""
    earlier_benchmarks(tape)
    other, head = (leaf(tape, 128256, 4096) for _ in range(2))
    x = leaf(tape, rows, 4096)
    target = tape.new("target", (rows,), "int64")

    def step(_other: Parameter = other) -> None:
        tape.backward(fused_linear_cross_entropy(x, head, target))

    return step


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """ops/geglu.py and ops/swiglu.py, act(gate) * up: saves both, over which backward writes their gradients."""
    tape = gate.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [tensor.alias(tensor.shape) for tensor in saved]

    node = tape.record("LigerGatedMul", (gate, up), backward, (gate, up))
    out: Tensor = tape.link(node, tape.new("zeros_like", gate.shape, gate.dtype))
    return out


def mlp(tape: Tape, *, batch: int, seq: int, mode: str = "full") -> Step:
    """Forward, backward or both of a gated feed-forward layer, 4096 wide, 11008 inside."""

    def inner(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return gated(linear(x, gate), linear(x, up))

    return feed_forward(tape, inner, batch=batch, seq=seq, mode=mode)


def liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """ops/rms_norm.py: saves its input and the fp32 root of each row; backward writes the input's gradient over the
    output's, and makes one of the weight for each row."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        x, weight, _ = saved
        of_each_row = tape.new("empty_like", x.shape, weight.dtype)
        return [grads[0].alias(x.shape), views.sum_to(of_each_row, weight.shape)]

    out, root = tape.new("empty", x.shape, x.dtype), tape.new("empty", x.shape[:1], "float32")
    node = tape.record("LigerRMSNorm", (x, weight), backward, (x, weight, root))
    linked: Tensor = tape.link(node, out)
    return linked


def rms_norm(tape: Tape, *, width: int) -> Step:
    """Of bf16 rows [2048, width]; the other provider's norm is there too."""
    weight, other = leaf(tape, width, dtype="float32"), leaf(tape, width, dtype="float32")
    rows = leaf(tape, 2048, width)
    grad = tape.new("randn_like", rows.shape, rows.dtype)

    def step(_other: Parameter = other) -> None:
        y = liger_rms_norm(rows, weight)
        tape.backward(y, grad, retain=True)

    return step


def rope(tape: Tape, *, width: int, seq: int) -> Step:
    """32 query and 8 key heads, turned in place, as their gradients are: ops/rope.py makes nothing."""
    both, *others = rope_inputs(tape, width, seq)

    def step(_alive: object = others) -> list[Tensor]:
        return [x.alias() for x in both]

    return step
