"""The fused loss: its own gradients, its own arithmetic, and what it allocates, which is what Liger's does.

Letters: `R` rows, `n` rows of one part, `H` hidden, `V` vocabulary.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memplan.errors import MemplanError
from memplan.models.batch import IGNORED
from memplan.models.head import Head
from memplan.step.fused_loss import SLICE_BYTES, add_product, fused_rows_loss, part_rows
from memplan.trace.replay import alive_at
from memplan.trace.tracing import tracing
from memplan.units import KIB, MIB

BF16 = torch.bfloat16


def inputs(rows: int = 24, hidden: int = 32, vocab: int = 160, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Rows, a matrix and its bias; every third label is ignored."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[::3] = IGNORED
    made = {
        "rows": torch.randn(rows, hidden, generator=generator),
        "weight": torch.randn(vocab, hidden, generator=generator) * 0.1,
        "bias": torch.randn(vocab, generator=generator) * 0.1,
    }
    return {"labels": labels} | {name: value.to(dtype).requires_grad_() for name, value in made.items()}


def fused(rows: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor) -> Tensor:
    return fused_rows_loss(rows, Head(weight=weight, bias=bias), labels, None, 0.0)


def test_a_bias_of_the_head_gets_its_gradient() -> None:
    given = inputs(dtype=torch.float32)
    wanted = [given["rows"], given["weight"], given["bias"]]
    assert part_rows(24, 32, 160) == 8, "three parts"
    logits = F.linear(given["rows"].double(), given["weight"].double(), given["bias"].double())
    expected = F.cross_entropy(logits, given["labels"], reduction="sum")
    found = fused(**given)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for grad, reference in zip(torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-6)


def test_a_model_that_makes_its_logits_by_itself_is_told_what_to_type() -> None:
    given = inputs() | {"weight": None, "bias": None}
    with pytest.raises(MemplanError, match="one matrix") as raised:
        fused(**given)  # type: ignore[arg-type]
    assert "chunked-ckpt" in str(raised.value)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1 / 1000])
def test_the_loss_scaled_afterwards_scales_bf16_gradients_without_rounding_the_scale(scale: float) -> None:
    """1 / 3 in bf16 is off by 1 in 400, all gradients to the same side; each product's own rounding is not."""
    given = inputs(dtype=BF16)
    wanted = [given["rows"], given["weight"], given["bias"]]
    whole = torch.autograd.grad(fused(**given), wanted)
    scaled = torch.autograd.grad(fused(**given) * scale, wanted)
    for one, other in zip(whole, scaled, strict=True):
        assert torch.equal(other, (one.float() * torch.tensor(scale)).to(BF16))


def test_a_second_backward_is_refused_and_not_scaled_twice() -> None:
    given = inputs(dtype=torch.float32)
    loss = fused(**given) * 0.5
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("total", [BF16, torch.float32])
@pytest.mark.parametrize("width", [8, 1024])
def test_products_are_added_slice_by_slice(total: torch.dtype, width: int) -> None:
    """2,000 rows of 1,024 fp32 values are two slices; 2,000 of 8 are one. Values up to 16 are rounded to 1 / 16 in
    bf16, once as a product and once as a sum."""
    assert (2000 * width * 4 > SLICE_BYTES) == (width == 1024)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2000, width, generator=generator).to(total)
    logits, rows = (torch.randn(3, size, generator=generator).to(BF16) for size in (2000, width))
    found = start.clone()
    add_product(found, logits, rows)
    expected = start.double() + logits.double().t() @ rows.double()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 if total == torch.float32 else 0.07)


# What it allocates

R, H, V = 4096, 512, 4096
PART = 512
"""n: 4096 / ceil(4096 / 512)."""
WEIGHT, PART_LOGITS = V * H, PART * V
SMALL = 64 * KIB
"""More than all tensors of a number a row and the loss take: 4 * R, R and 512 for each scalar."""


def forward_peak(dtype: torch.dtype, *, trains: bool, autocast: bool = False) -> int:
    """Bytes of the loss's forward on an H100 beside its inputs and the gradient of its rows."""
    with tracing("h100-80g", frames=False) as trace:
        rows = torch.randn(R, H, dtype=dtype, requires_grad=True)
        weight = torch.randn(V, H, dtype=dtype, requires_grad=trains)
        labels = torch.randint(V, (R,))
        torch.zeros(8, 8, dtype=BF16) @ torch.zeros(8, 8, dtype=BF16)  # cuBLAS has its workspace
        trace.reset_peak()
        with torch.autocast("cuda", BF16, enabled=autocast):
            loss = fused_rows_loss(rows, Head(weight=weight), labels, None, 0.0)
        assert loss.requires_grad
    found = trace.replayed()
    before = sum(found.block_bytes[index] for index in alive_at(found, found.start - 1))
    return found.peaks.allocated_bytes - before - R * H * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "trains", "autocast", "expected"),
    [
        # Two parts' logits for a moment: those that are made, and the gradient of those before.
        (BF16, False, False, 2 * 2 * PART_LOGITS),
        (torch.float32, False, False, 2 * 4 * PART_LOGITS),
        # The gradient, a part's product in bf16 and again in fp32, and the part's logits.
        (BF16, True, False, (2 + 2 + 4) * WEIGHT + 2 * PART_LOGITS),
        (torch.float32, True, False, (4 + 4) * WEIGHT + 4 * PART_LOGITS),
        # The fp32 gradient, the bf16 matrix that autocast keeps and its view's that it does not, two parts' logits, and
        # a part of the rows in bf16.
        (torch.float32, True, True, (4 + 2 + 2) * WEIGHT + 2 * 2 * PART_LOGITS + 2 * PART * H),
    ],
    ids=["bf16 frozen", "fp32 frozen", "bf16", "fp32", "bf16-mixed"],
)
def test_forward_allocates_what_ligers_does(dtype: torch.dtype, trains: bool, autocast: bool, expected: int) -> None:
    """By Liger-Kernel 0.8.2's source, read line by line."""
    assert 0 <= forward_peak(dtype, trains=trains, autocast=autocast) - expected < SMALL


class Liger042(torch.autograd.Function):
    """What Liger-Kernel 0.4.2 allocated, which is what its benchmark measured: it raised a part's logits to fp32 and
    lowered their gradient again, and added products to the matrix's gradient without temporaries."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        grad_weight, grad_rows = torch.zeros_like(weight), torch.zeros_like(rows)
        losses = torch.zeros(rows.size(0), dtype=torch.float32)
        total = (labels != IGNORED).sum()
        for part, some_labels, loss, grad_part in zip(
            *(tensor.split(part_rows(*rows.shape, weight.size(0))) for tensor in (rows, labels, losses, grad_rows)),
            strict=True,
        ):
            logits = part @ weight.t()
            logits = logits.float()
            logits = logits.to(rows.dtype)
            alpha = some_labels.numel() / total
            loss.copy_(loss * alpha)
            grad_logits = logits * alpha
            grad_part.copy_(grad_logits @ weight)
            torch.addmm(grad_weight, logits.t(), part, out=grad_weight)
        ctx.save_for_backward(grad_rows, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.saved_tensors, None)


@pytest.mark.parametrize(
    ("rows", "figure_mib", "within_mib"),
    [(4096, 4245.5478515625, 0), (8192, 4466.9697265625, 2), (16384, 4910.4384765625, 2), (32768, 5794.6259765625, 2)],
)
def test_a_fused_loss_is_traced_to_its_published_peak(rows: int, figure_mib: float, within_mib: int) -> None:
    """linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv: fused_linear_cross_entropy, liger, full, an A100.

    Two heads, gradients of the run before, and cuBLAS's workspaces of both threads, as in test_published.py. A cached
    block is handed out whole where less than 1 MiB would be left of it, so that what earlier benchmarks left in the
    process's cache can move each of the larger blocks by as much.
    """
    with tracing("a100-80g", frames=False) as trace:
        x = torch.zeros(8, 8, dtype=BF16, requires_grad=True)
        F.linear(x, x).sum().backward()
        del x
        head, _other = (torch.randn(128_256, 4096, dtype=BF16, requires_grad=True) for _ in range(2))
        states = torch.randn(rows, 4096, dtype=BF16, requires_grad=True)
        labels = torch.randint(128_256, (rows,))
        for _ in range(3):
            trace.reset_peak()
            Liger042.apply(states, head, labels).backward()  # type: ignore[no-untyped-call]
    assert abs(trace.peak_allocated_bytes / MIB - figure_mib) <= within_mib
