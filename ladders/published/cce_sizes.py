"""Cut Cross-Entropy's own loss (`cce`) over the estimate's ledger, in the benchmark of `kernels.softcapped_head`.

Written from apple/ml-cross-entropy cut_cross_entropy/cce.py, cce_lse_forward.py, cce_backward.py, indexed_dot.py and
utils.py at af5f96a, the commit that printed the figures. Triton kernels make nothing themselves; a compiled function
makes what it returns.
"""

from collections.abc import Callable
from typing import Any

from kernels_sizes import leaf
from kernels_turns import turns

from memplan.estimate import views
from memplan.estimate.tape import Node, Tape, Tensor

Step = Callable[[], object]
ROWS_OF_LOCK, COLUMNS_OF_LOCK = 128, 64
"""Rows that one lock of the forward kernel stands for, and columns that one of the backward kernel does."""


def valid_rows(target: Tensor) -> None:
    """The numbers of the rows that are not ignored: as all are valid, nothing of them is kept."""
    tape = target.tape
    valid = tape.new("ne", target.shape, "bool")
    numbers = tape.new("nonzero", (*target.shape, 1), "int64")
    del valid
    views.to(numbers, "int32")


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Mean loss of rows x [N, H] by a matrix [V, H]: saves both, a log-sum of each row, a mean of each word."""
    tape, (N, H), V = x.tape, x.shape, weight.shape[0]
    valid_rows(target)
    sums, locks = tape.new("new_full", (N,), "float32"), tape.new("new_full", (-(-N // ROWS_OF_LOCK),), "int32")
    mean_logits = tape.new("new_full", (V,), "float32")
    del locks
    dots = tape.new("new_zeros", (N,), "float32")
    dots = tape.new("softcapping", dots.shape, dots.dtype)

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        order = vocab_order(saved[3])
        of_x, of_weight = (tape.new("zeros_like", tensor.shape, tensor.dtype) for tensor in saved[:2])
        across = -(-H // COLUMNS_OF_LOCK)
        locks = [tape.new("new_zeros", (-(-count // across), across), "int32") for count in (N, V)]
        del order, locks
        return [of_x, of_weight]

    node = tape.record("LinearCrossEntropy", (x, weight), backward, (x, weight, sums, mean_logits, target))
    out: Tensor = tape.link(node, tape.new("mean", (), "float32"))
    del dots
    return out


def vocab_order(mean_logits: Tensor) -> Tensor:
    """int32 numbers of the words by their mean logit: a sort's values and int64 places, and these converted."""
    tape = mean_logits.tape
    values, places = (tape.new("sort", mean_logits.shape, dtype) for dtype in ("float32", "int64"))
    out = views.to(places, "int32")
    del values, places
    return out


def softcapped_head(tape: Tape, *, kind: str) -> Step:
    """Gemma-2-2B's head: 8192 tokens, width 2304, 256000 words, logits capped at 30; what is run says `turns`."""
    x, weight = leaf(tape, 8192, 2304), leaf(tape, 256000, 2304)
    target = tape.new("target", (8192,), "int64")
    return turns(kind, lambda: linear_cross_entropy(x, weight, target), tape.backward, (x, weight))
