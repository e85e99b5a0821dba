"""Head and loss over the ledger, as `memplan.step.losses` makes them.

Letters: `R` rows of one backward pass, `n` rows of one part, `H` hidden, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memplan.estimate import ops, views
from memplan.estimate.autocast import operands
from memplan.estimate.batch import Batch
from memplan.estimate.checkpoint import region
from memplan.estimate.products import cross_entropy, index_select, linear, log_softmax, nll_loss
from memplan.estimate.reductions import summed
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import flatten, narrow, to


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


def summed_loss(tape: Tape, hidden: list[Tensor], head: Head, batch: Batch, *, kind: str, parts: int) -> Tensor:
    """Loss summed over the rows that make one; `hidden` is taken out of its list, so that nobody else holds it."""
    x = hidden.pop()
    rows, labels = flatten(x, 0, 1), flatten(batch["labels"], 0)
    teacher = flatten(batch["teacher"], 0, 1) if "teacher" in batch else None
    del x
    if kind == "full":
        return rows_loss(rows, head, labels, teacher)
    if kind == "held":
        logits = head.logits(rows)
        tape.held.append(logits)
        return to(cross_entropy(logits, labels), "float32")
    if kind == "fused":
        return fused_loss(rows, head, labels, teacher)
    if kind == "valid-rows":
        index = valid_index(batch)
        teacher = None if teacher is None else index_select(teacher, index)
        return rows_loss(index_select(rows, index), head, index_select(labels, index), teacher)
    sizes = part_sizes(rows.shape[0], parts)
    row_parts = views.split(rows, sizes, 0)
    label_parts = [narrow(labels, 0, size) for size in sizes]
    teachers = [None if teacher is None else narrow(teacher, 0, size) for size in sizes]
    del rows
    run: Callable[..., Any] = rows_loss
    if kind == "chunked-ckpt":
        run = region(tape, rows_loss, None)
    sum_: Tensor = tape.new("zeros", (), "float32")
    for part, part_labels, part_teacher in zip(row_parts, label_parts, teachers, strict=True):
        sum_ = ops.add(sum_, run(part, head, part_labels, part_teacher))
    return sum_


def valid_index(batch: Batch) -> Tensor:
    """Numbers of the rows that make a loss."""
    places = batch["valid"]
    first = places.tape.new("arange", places.shape[:1], "int64")
    numbers: Tensor = places.tape.new("add", places.shape, "int64")
    del first
    return flatten(numbers, 0)


def part_sizes(num: Any, parts: int) -> list[Any]:
    """Rows of each part, as `Tensor.chunk` cuts them."""
    size = -(-num // parts)
    if not isinstance(num, int):
        return [size] * (parts - 1) + [num - size * (parts - 1)]
    return [size] * (num // size) + ([num % size] if num % size else [])


def rows_loss(rows: Tensor, head: Head, labels: Tensor, teacher: Tensor | None = None) -> Tensor:
    """Cross-entropy from fp32 logits of rows [R, H], and the divergence from those of a teacher [R, H]."""
    if teacher is None:
        return cross_entropy(to(head.logits(rows), "float32"), labels)
    tape = rows.tape
    log_probs = log_softmax(to(head.logits(rows), "float32"))
    before, tape.grad_enabled = tape.grad_enabled, False
    towards = ops.softmax(to(head.logits(teacher), "float32"))
    tape.hidden("eq", labels.numel)
    tape.grad_enabled = before
    loss = nll_loss(log_probs, labels)
    return ops.add_scaled(loss, kl_div(log_probs, towards))


def kl_div(log_probs: Tensor, towards: Tensor) -> Tensor:
    """torch's kl_div, summed: towards * (log(towards) - log_probs)."""
    crossed = ops.mul(towards, log_probs)  # the first of both, as compilers order them
    return ops.total(ops.sub(ops.mul(towards, towards), crossed))


def fused_parts(num: Any, hidden: int, vocab: int) -> list[Any]:
    """Rows of the first parts of the fused loss, of which the third is as the second: the power of two from
    num / ceil(vocab / hidden) up."""
    if isinstance(num, int):
        size = 1 << (-(-num // -(-vocab // hidden)) - 1).bit_length()
        return [min(size, num - start) for start in range(0, num, size)][:2]
    import numpy as np

    size = 1 << np.ceil(np.log2(-(-num // -(-vocab // hidden)))).astype(np.int64)
    return [np.minimum(size, num), np.minimum(size, np.maximum(num - size, 0))]


def part_logits(part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of rows by a view of the matrix, whose cast autocast does not keep, and a bias in its own dtype."""
    logits = linear(part, views.view(weight, *weight.shape))
    return logits if bias is None else ops.add(logits, bias)


def fused_loss(rows: Tensor, head: Head, labels: Tensor, teacher: Tensor | None = None) -> Tensor:
    """Gradients made in forward, a part at a time: of rows, matrix and bias, and the logits of one part."""
    tape, weight, bias = rows.tape, head.weight, head.bias
    R, H = rows.shape
    V = weight.shape[0]
    of_rows = tape.make("zeros_like", (rows.shape, rows.dtype)) if rows.requires_grad else None
    of_weight = tape.make("zeros_like", (weight.shape, weight.dtype)) if weight.requires_grad else None
    of_bias = tape.make("zeros_like", (bias.shape, bias.dtype)) if bias is not None and bias.requires_grad else None
    losses = tape.make("zeros", ((R,), "float32"))
    valid = tape.make("ne", ((R,), "bool"))
    before, tape.grad_enabled = tape.grad_enabled, False
    for n in fused_parts(R, H, V):
        part = narrow(rows, 0, n)
        logits = part_logits(part, weight, bias)
        towards = None if teacher is None else part_logits(narrow(teacher, 0, n), weight, bias)
        tape.make("cross_entropy_in_place", ((n,), "float32"))
        del towards
        if of_rows is not None:
            low, cast = operands(logits, weight)  # a leaf, whose copy stays; that of the transposed view does not
            tape.make("mm", ((n, H), low.dtype))
            del low, cast
        if of_weight is not None and of_weight.dtype == "float32" and logits.dtype != "float32":
            cast = to(part, logits.dtype)
            del cast
        elif of_weight is not None:
            low, cast = operands(logits, part)
            product = tape.make("mm", (weight.shape, low.dtype))
            del low, cast
            wide = to(product, "float32")
            del product, wide
        if of_bias is not None:
            added = summed(logits, of_bias.shape)
            del added
    tape.grad_enabled = before

    def backward(node: Any, saved: list[Any], grads: list[Any]) -> list[Any]:
        return saved[: len(node.edges)]

    node = tape.record("FusedLoss", (rows, weight) if bias is None else (rows, weight, bias), backward)
    del valid
    out = tape.make("sum", ((), "float32"))
    if node is None:
        return out
    tape.link(node, out)
    node.saved += [None if grad is None else tape.pack(grad) for grad in (of_rows, of_weight, of_bias)]
    del losses
    return out
