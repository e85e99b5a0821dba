"""Head and cross-entropy over normed hidden states: whole, in chunks of rows, or in chunks that are recomputed.

Letters: `R` rows (samples x tokens of one backward pass), `H` hidden, `V` vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memplan.models.batch import IGNORED


def summed_loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, kind: str, chunks: int) -> Tensor:
    """Cross-entropy of `labels` [B, S] summed over the rows that are not ignored, fp32 scalar.

    `hidden` is [B, S, H], `weight` the head's matrix [V, H]. `chunked` makes the logits of a part of the rows at a
    time, but every part's log-probabilities stay in the graph: it lowers forward's instantaneous peak only.
    `chunked-ckpt` keeps a part's hidden rows and makes its logits again in backward.
    """
    if kind == "full":
        return rows_loss(hidden.flatten(0, 1), weight, labels.flatten())
    parts = zip(hidden.flatten(0, 1).chunk(chunks), labels.flatten().chunk(chunks), strict=True)
    del hidden
    total = torch.zeros((), dtype=torch.float32, device=labels.device)
    for rows, row_labels in parts:
        if kind == "chunked-ckpt" and torch.is_grad_enabled():
            total = total + checkpoint(
                rows_loss, rows, weight, row_labels, use_reentrant=False, preserve_rng_state=False
            )
        else:
            total = total + rows_loss(rows, weight, row_labels)
    return total


def rows_loss(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of `labels` [R] summed, from fp32 logits of `rows` [R, H]."""
    return F.cross_entropy(F.linear(rows, weight).float(), labels, ignore_index=IGNORED, reduction="sum")
