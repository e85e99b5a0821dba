"""Head and loss over normed hidden states: whole, over valid rows, in chunks of rows, recomputed chunks, or fused.

Letters: `R` rows (samples x tokens of one backward pass), `H` hidden, `V` vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memplan.models.batch import IGNORED, Batch
from memplan.models.head import Head
from memplan.step.fused_loss import fused_rows_loss
from memplan.step.region import Region

KL_WEIGHT = 0.15
"""Weight of the divergence from the teacher beside the cross-entropy; a drafter for a 248,320-word vocabulary was
trained so."""


def summed_loss(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    *,
    kind: str,
    chunks: int,
    region: Region,
    held: list[Tensor] | None = None,
) -> Tensor:
    """Loss of the labels of `batch` [B, S] summed over the rows that are not ignored, fp32 scalar: cross-entropy, and
    where the batch has a teacher `KL_WEIGHT` times the divergence of its probabilities from the student's.

    `hidden` is [B, S, H]. `valid-rows` picks the rows that make a loss before the head. `chunked` makes the logits of a
    part of the rows at a time, but every part's log-probabilities stay in the graph: it lowers forward's instantaneous
    peak only. `chunked-ckpt` keeps a part's hidden rows and makes its logits again in backward; `region` is
    `rows_loss`, checkpointed. `fused` makes the gradients in forward, a part at a time. `held` reads the logits as the
    head made them and leaves them in the list of that name.
    """
    rows, labels = hidden.flatten(0, 1), batch.labels.flatten()
    teacher = None if batch.teacher is None else batch.teacher.flatten(0, 1)
    del hidden
    if kind == "full":
        return rows_loss(rows, head, labels, teacher)
    if kind == "held":
        logits = head.logits(rows)
        if held is not None:
            held.append(logits)
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").float()
    if kind == "fused":
        return fused_rows_loss(rows, head, labels, teacher, KL_WEIGHT)
    if kind == "valid-rows":
        index = valid_index(batch)
        teacher = None if teacher is None else teacher.index_select(0, index)
        return rows_loss(rows.index_select(0, index), head, labels.index_select(0, index), teacher)
    row_parts = rows.chunk(chunks)
    del rows
    teachers = [None] * len(row_parts) if teacher is None else teacher.chunk(chunks)
    total = torch.zeros((), dtype=torch.float32, device=labels.device)
    make = region if kind == "chunked-ckpt" else rows_loss
    for part, part_labels, part_teacher in zip(row_parts, labels.chunk(chunks), teachers, strict=True):
        total = total + make(part, head, part_labels, part_teacher)
    return total


def rows_loss(rows: Tensor, head: Head, labels: Tensor, teacher: Tensor | None = None) -> Tensor:
    """Loss of `labels` [R] summed, from fp32 logits of `rows` [R, H]; `teacher` [R, H] goes through the same head,
    without gradients."""
    if teacher is None:
        return F.cross_entropy(head.logits(rows).float(), labels, ignore_index=IGNORED, reduction="sum")
    log_probs = F.log_softmax(head.logits(rows).float(), dim=-1)
    with torch.no_grad():
        towards = F.softmax(head.logits(teacher).float(), dim=-1)
        towards.masked_fill_((labels == IGNORED)[:, None], 0)
    loss = F.nll_loss(log_probs, labels, ignore_index=IGNORED, reduction="sum")
    return torch.add(loss, F.kl_div(log_probs, towards, reduction="sum"), alpha=KL_WEIGHT)


def valid_index(batch: Batch) -> Tensor:
    """Numbers of the rows of a flattened batch that make a loss, int64; from `batch.valid`, or else from the labels,
    for which the host waits."""
    if batch.valid is None:
        return (batch.labels.flatten() != IGNORED).nonzero().squeeze(1)
    samples, size = batch.labels.shape
    first = torch.arange(0, samples * size, size, device=batch.valid.device)
    return (batch.valid + first[:, None]).flatten()
