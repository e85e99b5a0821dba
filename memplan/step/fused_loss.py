"""Head and cross-entropy in one: gradients made in forward, so that the logits of one part of the rows live at a time.

Letters: `R` rows, `n` rows of one part, `H` hidden, `V` vocabulary.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memplan.errors import MemplanError
from memplan.models.batch import IGNORED
from memplan.models.head import Head

SLICE_BYTES = 1 << 20
"""Most that our own kernel's temporaries take for one tensor."""


def fused_rows_loss(rows: Tensor, head: Head, labels: Tensor, teacher: Tensor | None, kl_weight: float) -> Tensor:
    """Cross-entropy of `labels` [R] summed, and `kl_weight` times the divergence from `teacher` [R, H] through the same
    head where there is one; by Liger's kernel where it is installed and serves, else by our own code.

    MemplanError for a head with a bias or of the model's own, which the fused form cannot see into.
    """
    if head.weight is None or head.bias is not None:
        raise MemplanError("The loss fused needs a head that is one matrix.", "Type --loss chunked-ckpt:16.")
    whose = fused_implementation(rows.device, distill=teacher is not None)
    if whose == "cut-cross-entropy":
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(
            rows, head.weight, labels, ignore_index=IGNORED, reduction="sum", softcap=head.softcap
        )
    if whose == "liger-kernel":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(
            rows, head.weight, labels, ignore_index=IGNORED, reduction="sum", softcap=head.softcap
        )
    return FusedLoss.apply(rows, head.weight, labels, teacher, head.softcap, kl_weight)  # type: ignore[no-untyped-call]


def fused_implementation(device: torch.device, *, distill: bool) -> str:
    """Whose code runs on `device`: on CUDA `liger-kernel` or else `cut-cross-entropy`, where they are installed;
    `memplan` elsewhere, and for distillation, which neither knows."""
    if device.type == "cuda" and not distill:
        for package, module in (("liger-kernel", "liger_kernel"), ("cut-cross-entropy", "cut_cross_entropy")):
            if find_spec(module) is not None:
                return package
    return "memplan"


def part_rows(rows: int, hidden: int, vocab: int) -> int:
    """n, rows whose logits are made together: a part's logits are about as large as all of the hidden rows.

    Formula: the power of two from R / ceil(V / H) up. Source: fused_linear_cross_entropy_forward,
    liger_kernel/ops/fused_linear_cross_entropy.py, Liger-Kernel 0.6.
    """
    return 1 << (-(-rows // -(-vocab // hidden)) - 1).bit_length()


class FusedLoss(torch.autograd.Function):
    """As Liger's function: the gradients of rows [R, H] and of the matrix [V, H], a loss of each row, and the logits of
    one part, whose gradient takes their place."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, teacher: Tensor | None, softcap: float | None, kl: float
    ) -> Tensor:
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        grad_rows = torch.zeros_like(rows) if wants_rows else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        losses = torch.zeros(rows.size(0), dtype=torch.float32, device=rows.device)
        size = part_rows(rows.size(0), *reversed(weight.shape))
        for start in range(0, rows.size(0), size):
            part = rows[start : start + size]
            logits = F.linear(part, weight)
            towards = None if teacher is None else F.linear(teacher[start : start + size], weight)
            losses[start : start + size] = torch.ops.memplan.cross_entropy_in_place(
                logits, labels[start : start + size], towards, softcap, kl
            )
            del towards
            if grad_rows is not None:
                grad_rows[start : start + size] = logits @ weight
            if grad_weight is not None:
                grad_weight += logits.t() @ part
            del logits
        ctx.save_for_backward(grad_rows, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if saved is None else saved.mul_(grads[0].to(saved.dtype)) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None)


@torch.library.custom_op("memplan::cross_entropy_in_place", mutates_args={"logits"})
def cross_entropy_in_place(
    logits: Tensor, labels: Tensor, teacher: Tensor | None, softcap: float | None, kl_weight: float
) -> Tensor:
    """Loss of each row, fp32 [n], from `logits` [n, V], which become their own gradient; `teacher` [n, V] holds the
    logits that the divergence is towards. Row by row, as a fused kernel would, so that nothing of the size of the
    logits is made beside them."""
    losses = torch.zeros(logits.size(0), dtype=torch.float32, device=logits.device)
    step = max(1, SLICE_BYTES // (4 * logits.size(1)))
    for start in range(0, logits.size(0), step):
        part, wanted = logits[start : start + step], labels[start : start + step]
        valid = (wanted != IGNORED)[:, None]
        values = capped(part.float(), softcap)
        log_probs = torch.log_softmax(values, dim=-1)
        index = wanted.clamp(min=0)[:, None]
        loss = -log_probs.gather(1, index)
        grad = log_probs.exp()
        if teacher is not None:
            towards = torch.log_softmax(capped(teacher[start : start + step].float(), softcap), dim=-1)
            loss = loss + kl_weight * (towards.exp() * (towards - log_probs)).sum(-1, keepdim=True)
            grad = grad * (1 + kl_weight) - towards.exp() * kl_weight
        grad.scatter_add_(1, index, torch.full_like(loss, -1.0))
        if softcap is not None:
            grad = grad * (1 - (values / softcap).square())
        part.copy_(grad * valid)
        losses[start : start + step] = (loss * valid).squeeze(1)
    return losses


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """`logits` within the soft cap, where there is one."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@cross_entropy_in_place.register_fake
def _(logits: Tensor, labels: Tensor, teacher: Tensor | None, softcap: float | None, kl_weight: float) -> Tensor:
    return torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)
