"""Head and cross-entropy in one: gradients made in forward, so that the logits of a part of the rows live at a time.

Our own code allocates what Liger's does, tensor for tensor, so that a trace of it is a trace of Liger's. Source:
liger_kernel/ops/fused_linear_cross_entropy.py, Liger-Kernel 0.8.2 (ead96b61).

Letters: `R` rows, `n` rows of one part, `H` hidden, `V` vocabulary.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch import library as torch_library

from memplan.errors import MemplanError
from memplan.models.batch import IGNORED
from memplan.models.head import Head

SLICE_BYTES = 4 << 20
"""Most that each fp32 temporary inside our own ops takes; no trace sees these, nor has Liger's kernel any."""


def fused_rows_loss(rows: Tensor, head: Head, labels: Tensor, teacher: Tensor | None, kl_weight: float) -> Tensor:
    """Cross-entropy of `labels` [R] summed, and `kl_weight` times the divergence from `teacher` [R, H] through the same
    head where there is one; by Liger's kernel where it is installed and serves, else by our own code.

    MemplanError where the model makes its logits by itself, as there is no head then to fuse with.
    """
    if head.weight is None:
        raise MemplanError("The loss fused needs a head that is one matrix.", "Type --loss chunked-ckpt:16.")
    whose = fused_implementation(rows.device, distill=teacher is not None)
    if whose == "cut-cross-entropy":
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(
            rows, head.weight, labels, bias=head.bias, ignore_index=IGNORED, reduction="sum", softcap=head.softcap
        )
    if whose == "liger-kernel":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(
            rows, head.weight, labels, bias=head.bias, ignore_index=IGNORED, reduction="sum", softcap=head.softcap
        )
    loss: Tensor = FusedLoss.apply(  # type: ignore[no-untyped-call]
        rows, head.weight, head.bias, labels, teacher, head.softcap, kl_weight
    )
    return loss


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

    Formula: the power of two from R / ceil(V / H) up, as Liger's.
    """
    return 1 << (-(-rows // -(-vocab // hidden)) - 1).bit_length()


class FusedLoss(torch.autograd.Function):
    """As Liger's function: the gradients of rows [R, H], of the matrix [V, H] and of its bias [V], a loss of each row,
    and the logits of one part, whose gradient takes their place; it lives until the next part's logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        teacher: Tensor | None,
        softcap: float | None,
        kl_weight: float,
    ) -> Tensor:
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_rows = torch.zeros_like(rows) if wants_rows else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and wants_bias else None
        losses = torch.zeros(rows.size(0), dtype=torch.float32, device=rows.device)
        valid = labels != IGNORED
        size = part_rows(rows.size(0), *reversed(weight.shape))
        for start in range(0, rows.size(0), size):
            here = slice(start, start + size)
            part = rows[here]
            logits = part_logits(part, weight, bias)
            towards = None if teacher is None else part_logits(teacher[here], weight, bias)
            losses[here] = torch.ops.memplan.cross_entropy_in_place(
                logits, labels[here], valid[here], towards, softcap, kl_weight
            )
            del towards
            if grad_rows is not None:
                grad_rows[here] = logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, logits, part)
            if grad_bias is not None:
                grad_bias += logits.sum(0)
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        for grad in saved:
            if grad is not None:
                torch.ops.memplan.scale_in_place(grad, grads[0])
        return (*saved, None, None, None, None)


def part_logits(part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [n, V] of rows [n, H]; under autocast each call casts the matrix anew, as what is cast is a view."""
    logits = part @ weight.t()
    return logits if bias is None else logits + bias


def add_product(grad_weight: Tensor, grad_logits: Tensor, part: Tensor) -> None:
    """Adds to the matrix's gradient [V, H] that of one part: in the product itself where an fp32 gradient takes in bf16
    ones, and elsewhere by way of temporaries of its size, one of them fp32."""
    if grad_weight.dtype == torch.float32 and grad_logits.dtype != torch.float32:
        torch.ops.memplan.add_product_in_place(grad_weight, grad_logits.t(), part.to(grad_logits.dtype))
    else:
        torch.ops.memplan.add_in_place(grad_weight, torch.mm(grad_logits.t(), part).float())


@torch_library.custom_op("memplan::add_product_in_place", mutates_args={"total"})
def add_product_in_place(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left [V, n] x right [n, H], bf16, to `total` [V, H], fp32."""
    if total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return
    right = right.float()
    for some, rows in zip(slices(total), slices(left, like=total), strict=True):
        some.addmm_(rows.float(), right)


@torch_library.custom_op("memplan::add_in_place", mutates_args={"total"})
def add_in_place(total: Tensor, more: Tensor) -> None:
    """Adds fp32 `more` to `total`, which may be bf16."""
    for some, part in zip(slices(total), slices(more), strict=True):
        some += part


@torch_library.custom_op("memplan::scale_in_place", mutates_args={"grad"})
def scale_in_place(grad: Tensor, scale: Tensor) -> None:
    """Multiplies a gradient by the fp32 scalar `scale`; each product is rounded, `scale` is not."""
    for part in slices(grad):
        part *= scale.expand(1)  # no longer a scalar, which would be rounded to the gradient's dtype


def slices(tensor: Tensor, *, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Views of `tensor` by its first dimension, cut so that `SLICE_BYTES` hold one of `like` (itself) in fp32."""
    width = (tensor if like is None else like)[0].numel()
    return tensor.split(max(1, SLICE_BYTES // (4 * width)))  # type: ignore[no-untyped-call]


@add_product_in_place.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None: ...


@add_in_place.register_fake
def _(total: Tensor, more: Tensor) -> None: ...


@scale_in_place.register_fake
def _(grad: Tensor, scale: Tensor) -> None: ...


@torch_library.custom_op("memplan::cross_entropy_in_place", mutates_args={"logits"})
def cross_entropy_in_place(
    logits: Tensor, labels: Tensor, valid: Tensor, teacher: Tensor | None, softcap: float | None, kl_weight: float
) -> Tensor:
    """Loss of each row, fp32 [n], zero where it is not `valid` [n], from `logits` [n, V], which become their own
    gradient; `teacher` [n, V] holds the logits that the divergence is towards. A few rows at a time, as a fused kernel
    would, so that nothing of the size of the logits is made beside them."""
    losses = torch.zeros(logits.size(0), dtype=torch.float32, device=logits.device)
    parts = [slices(tensor, like=logits) for tensor in (logits, labels, valid, losses)]
    teachers = [None] * len(parts[0]) if teacher is None else slices(teacher)
    for part, wanted, counts, loss, towards in zip(*parts, teachers, strict=True):
        values = capped(part.float(), softcap)
        log_probs = torch.log_softmax(values, dim=-1)
        index = wanted.clamp(min=0)[:, None]
        own = -log_probs.gather(1, index)
        grad = log_probs.exp()
        if towards is not None:
            aims = torch.log_softmax(capped(towards.float(), softcap), dim=-1)
            own = own + kl_weight * (aims.exp() * (aims - log_probs)).sum(-1, keepdim=True)
            grad = grad * (1 + kl_weight) - aims.exp() * kl_weight
        grad.scatter_add_(1, index, torch.full_like(own, -1.0))
        if softcap is not None:
            grad = grad * (1 - (values / softcap).square())
        part.copy_(grad * counts[:, None])
        loss.copy_((own * counts[:, None]).squeeze(1))
    return losses


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """`logits` within the soft cap, where there is one."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@cross_entropy_in_place.register_fake
def _(
    logits: Tensor, labels: Tensor, valid: Tensor, teacher: Tensor | None, softcap: float | None, kl_weight: float
) -> Tensor:
    return torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)
