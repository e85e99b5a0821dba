"""Head and cross-entropy: what they keep and their moments.

Letters: `N` rows of one backward pass, `n` rows of one loss chunk, `H` hidden, `V` vocabulary; `w` and `p` as in
`Widths`.
"""

from dataclasses import dataclass

from memplan.estimate.parts import Widths
from memplan.spec.step import StepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """Bytes of head and loss over the rows of one backward pass."""

    saved: int
    """Log-probabilities kept for backward when forward ends."""
    hidden: int
    """Normed rows that the head reads, alive in forward."""
    kept_hidden: int
    """As much of them as is kept for backward: none where the head's matrix is frozen and its rows are in the graph."""
    casts: int
    """Low-precision copies of the head's matrix kept for backward."""
    cached: int
    """Low-precision copies of the head's matrix alive when forward ends."""
    forward: int
    """Most alive in forward beyond `hidden` and `cached`."""
    loss: int
    """Most alive in backward beyond `kept_hidden`, `casts` included, before the last product with the head's matrix."""
    head: int
    """Most alive in backward, at a product with the head's matrix, beyond `kept_hidden`."""


def loss_cost(rows: int, hidden: int, vocab: int, step: StepSpec, widths: Widths, *, trains: bool) -> LossCost:
    """Cross-entropy over fp32 logits.

    Formula: `full` keeps the log-probabilities 4*V a row. Forward peaks at logits plus log-probabilities, 8*V (with the
    bf16 logits alive at the cast: 6*V before that). Backward peaks at log-probabilities, the loss's gradient and the
    logits' gradient, 12*V, or at the head's product: logits' gradient w*V a row and the matrix's gradient p*V*H.
    `chunked` keeps the same 4*V a row and lowers only what comes on top of it, 4*V forward and 8*V backward, to the
    n = ceil(N / chunks) rows of a chunk; from its second chunk on, backward holds the matrix's gradient so far.
    `chunked-ckpt` keeps no logits at all.
    Counts: under autocast the bf16 copies of the head's matrix, 2*V*H each, and of its gradient.
    Source: aten log_softmax and nll_loss, torch 2.13: both allocate their gradient whole.
    Checked: tests/estimate/test_measured.py.
    """
    part = -(-rows // step.loss_chunks)
    num_parts = -(-rows // part)
    keeps = step.loss_kind != "chunked-ckpt"
    copy = 2 * vocab * hidden if widths.mixed else 0
    matrix = widths.param * vocab * hidden if trains else 0
    row_grads = widths.residual * hidden * part
    logits = 4 * vocab * part
    low_logits = widths.compute * vocab * part
    # Under autocast every chunk of a matrix that trains reads one bf16 copy, whose gradient adds up in bf16 before one
    # cast. A frozen matrix is not cached: every chunk makes a copy of its own.
    copies = 1 if trains else num_parts
    new = (copy if widths.mixed else matrix) if trains else 0
    again = copy + widths.compute * hidden * part if widths.mixed and not keeps else 0
    loss, head = 0, 0
    for done in {0, min(1, num_parts - 1), num_parts - 1}:
        left = num_parts - 1 - done  # chunks whose backward is still to come
        waiting = logits * left if keeps else 0
        held = copy * (1 if trains else left + 1) if keeps else 0
        carried = waiting + done * row_grads + min(done, 1) * new
        loss = max(loss, carried + held + 3 * logits + again)
        head = max(head, carried + max(held, copy) + low_logits + row_grads + new)
        if done == 1:
            head = max(head, carried + (held if left else 0) + row_grads + 2 * new)
        if widths.mixed and trains and not left:
            head = max(head, waiting + (done + 1) * row_grads + new + matrix)
    rows_bytes = (widths.compute if keeps else widths.residual) * hidden * rows
    return LossCost(
        saved=logits * num_parts if keeps else 0,
        hidden=rows_bytes,
        kept_hidden=rows_bytes if trains or not keeps else 0,
        casts=copy * copies if keeps else 0,
        cached=copy * (copies if keeps else 1),
        forward=(logits * (num_parts - 1) if keeps else 0) + 2 * logits,
        loss=loss,
        head=head,
    )
