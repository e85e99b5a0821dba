"""Head and loss over the ledger, as `memplan.step.losses` makes them.

Letters: `R` rows of one backward pass, `n` rows of one part, `H` hidden, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memplan.estimate import ops
from memplan.estimate.checkpoint import region
from memplan.estimate.ops import cast_weight, flatten, narrow, to
from memplan.estimate.products import cross_entropy, index_select, linear
from memplan.estimate.tape import Tape, Tensor


@dataclass(slots=True, kw_only=True)
class Head:
    """How rows become logits."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    softcap: bool = False

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [..., V]."""
        out = linear(rows, self.weight, self.bias)
        if not self.softcap:
            return out
        return ops.scale(ops.of_result("tanh", ops.scale(out, "div")))


def summed_loss(tape: Tape, hidden: list[Tensor], head: Head, labels: Tensor, *, kind: str, parts: int, valid: int) -> Tensor:  # fmt: skip
    """Loss summed over the rows; `hidden` is taken out of its list, so that nobody else holds it. `valid`: rows that
    make a loss."""
    x = hidden.pop()
    rows, labels = flatten(x, 0, 1), flatten(labels, 0)
    del x
    if kind == "full":
        return rows_loss(rows, head, labels)
    if kind == "fused":
        return fused_loss(rows, head, labels)
    if kind == "valid-rows":
        index = tape.new("valid", (valid,), "int64")
        return rows_loss(index_select(rows, index), head, index_select(labels, index))
    size = -(-rows.shape[0] // parts)
    sizes = [size] * (rows.shape[0] // size) + ([rows.shape[0] % size] if rows.shape[0] % size else [])
    row_parts = ops.split(rows, sizes, 0)
    label_parts = [narrow(labels, 0, size) for size in sizes]
    del rows
    run: Callable[..., Any] = rows_loss
    if kind == "chunked-ckpt":
        run = region(tape, rows_loss, None)
    sum_: Tensor = tape.new("zeros", (), "float32")
    for part, part_labels in zip(row_parts, label_parts, strict=True):
        sum_ = ops.add(sum_, run(part, head, part_labels))
    return sum_


def rows_loss(rows: Tensor, head: Head, labels: Tensor) -> Tensor:
    """Cross-entropy from fp32 logits of rows [R, H]."""
    return cross_entropy(to(head.logits(rows), "float32"), labels)


def fused_loss(rows: Tensor, head: Head, labels: Tensor) -> Tensor:
    """Gradients made in forward, a part at a time: of rows and matrix, and the logits of one part."""
    tape, weight = rows.tape, head.weight
    R, H = rows.shape
    V = weight.shape[0]
    of_rows = tape.make("zeros_like", (rows.shape, rows.dtype)) if rows.requires_grad else None
    of_weight = tape.make("zeros_like", (weight.shape, weight.dtype)) if weight.requires_grad else None
    losses = tape.make("zeros", ((R,), "float32"))
    valid = tape.make("ne", ((R,), "bool"))
    size = 1 << (-(-R // -(-V // H)) - 1).bit_length()
    before, tape.grad_enabled = tape.grad_enabled, False
    for start in range(0, R, size):
        n = min(size, R - start)
        part = narrow(rows, 0, n)
        logits = linear(part, ops.view(weight, *weight.shape))
        tape.make("cross_entropy_in_place", ((n,), "float32"))
        if of_rows is not None:
            cast_weight(weight)  # a leaf, whose copy stays; that of the transposed view above does not
            tape.make("mm", ((n, H), logits.dtype))
        if of_weight is not None and of_weight.dtype == "float32" and logits.dtype != "float32":
            cast = to(part, logits.dtype)
            del cast
        elif of_weight is not None:
            product = tape.make("mm", (weight.shape, logits.dtype))
            wide = to(product, "float32")
            del product, wide
    tape.grad_enabled = before

    def backward(node: Any, saved: list[Any], grads: list[Any]) -> list[Any]:
        return saved[:2]

    node = tape.record("FusedLoss", (rows, weight), backward)
    del valid
    out = tape.make("sum", ((), "float32"))
    if node is None:
        return out
    tape.link(node, out)
    node.saved += [None if grad is None else tape.pack(grad) for grad in (of_rows, of_weight)]
    del losses
    return out
