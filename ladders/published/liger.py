"""Liger-Kernel's fused head and loss (provider `liger`, v0.4.2) in torch: its Triton kernels, which make nothing
themselves, are left out, so that the numbers are wrong and the memory is right. Written from the sources that
liger_sizes.py names.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels import BF16, earlier_benchmarks
from torch import Tensor, nn

Step = Callable[[], object]
IGNORED = -100
ALL_ROWS = (4096, 8192, 16384, 32768)
"""Rows that the benchmark goes through, in this order."""
L2_CLEARING = int(256e6 // 4)
"""int32 entries of the buffer that triton's do_bench overwrites between runs."""


def counted(target: Tensor) -> Tensor:
    """Labels that are not ignored."""
    return (target != IGNORED).sum()


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Both gradients made in forward, a part of the rows at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        (R, H), V = rows.shape, weight.shape[0]
        size = 1 << (-(-R // -(-V // H)) - 1).bit_length()
        of_weight, of_rows = torch.zeros_like(weight), torch.zeros_like(rows)
        losses = torch.zeros(R, dtype=torch.float32)
        num_valid = counted(target)
        for start in range(0, R, size):
            here = slice(start, start + size)
            part = rows[here]
            logits = part @ weight.t()
            counted(target[here])
            logits = logits.float()
            logits = logits.to(rows.dtype)
            share = size / num_valid
            losses[here] = losses[here] * share
            grad_logits = logits * share
            of_rows[here] = grad_logits @ weight
            torch.addmm(of_weight, logits.t(), part, out=of_weight)
        ctx.save_for_backward(of_rows.detach(), of_weight.detach())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, of_weight = ctx.saved_tensors
        return of_rows, of_weight, None


def losses_of(rows: int) -> dict[str, Callable[[], Tensor]]:
    """Both providers' losses of `rows` over heads of 128,256 words."""
    other, head = (nn.Linear(4096, 128256, bias=False, dtype=BF16) for _ in range(2))
    x = torch.randn(rows, 4096, dtype=BF16, requires_grad=True)
    target = torch.randint(128256, (rows, 1)).squeeze(1)
    return {
        "liger": lambda: FusedLinearCrossEntropy.apply(x, head.weight, target),
        "huggingface": lambda: F.cross_entropy(other(x), target),
    }


def timed(rows: int, provider: str, mode: str) -> None:
    """What the benchmark of speed allocates for one figure."""
    losses = losses_of(rows)

    def run() -> None:
        value = losses[provider]()
        if mode == "full":
            value.backward()

    run()
    clearing = torch.empty(L2_CLEARING, dtype=torch.int32)
    for _ in range(2):
        run()
    del clearing


def head_and_cross_entropy(*, rows: int, whole_script: bool = False) -> Step:
    """A head of 128,256 words and its loss; with `whole_script` after all that the benchmark's script ran before."""
    if whole_script:
        for mode in ("forward", "full"):
            for provider in ("liger", "huggingface"):
                for size in ALL_ROWS:
                    timed(size, provider, mode)
        for size in ALL_ROWS[: ALL_ROWS.index(rows)]:
            losses = losses_of(size)
            for _ in range(2):
                losses["liger"]().backward()
            del losses
    else:
        earlier_benchmarks()
    losses = losses_of(rows)
    return lambda: losses["liger"]().backward()
