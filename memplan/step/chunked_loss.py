"""Head and cross-entropy over normed hidden states: whole, in chunks of rows, or in chunks that are recomputed.

Letters: `R` rows (samples x tokens of one backward pass), `H` hidden, `V` vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memplan.models.batch import IGNORED, Batch
from memplan.models.head import Head
from memplan.step.region import Region


def summed_loss(hidden: Tensor, head: Head, batch: Batch, *, kind: str, chunks: int, region: Region) -> Tensor:
    """Cross-entropy of the labels of `batch` [B, S] summed over the rows that are not ignored, fp32 scalar.

    `hidden` is [B, S, H]. `chunked` makes the logits of a part of the rows at a time, but every part's
    log-probabilities stay in the graph: it lowers forward's instantaneous peak only. `chunked-ckpt` keeps a part's
    hidden rows and makes its logits again in backward; `region` is `rows_loss`, checkpointed.
    """
    labels = batch.labels
    if kind == "full":
        return rows_loss(hidden.flatten(0, 1), head, labels.flatten())
    parts = zip(hidden.flatten(0, 1).chunk(chunks), labels.flatten().chunk(chunks), strict=True)
    del hidden
    total = torch.zeros((), dtype=torch.float32, device=labels.device)
    make = region if kind == "chunked-ckpt" else rows_loss
    for rows, row_labels in parts:
        total = total + make(rows, head, row_labels)
    return total


def rows_loss(rows: Tensor, head: Head, labels: Tensor) -> Tensor:
    """Cross-entropy of `labels` [R] summed, from fp32 logits of `rows` [R, H]."""
    return F.cross_entropy(head.logits(rows).float(), labels, ignore_index=IGNORED, reduction="sum")
