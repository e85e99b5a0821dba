"""Single layers and losses of Liger-Kernel's benchmarks, by the provider `huggingface`: eager PyTorch on bf16 tensors.

Written from linkedin/Liger-Kernel benchmark/scripts (benchmark_cross_entropy.py, benchmark_geglu.py,
benchmark_fused_linear_cross_entropy.py, benchmark_swiglu.py, benchmark_rms_norm.py), liger 0.2.1. The layer of the
other provider is there too, and what the speed benchmarks of the same process leave behind: cuBLAS's memory of both
threads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16 = torch.bfloat16
Step = Callable[[], object]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}


def earlier_benchmarks() -> None:
    """A product in each thread."""
    x = torch.zeros(8, 8, dtype=BF16, requires_grad=True)
    F.linear(x, x).sum().backward()


def cross_entropy(*, vocab: int) -> Step:
    """Of fp32 logits [8 * 2048, vocab]."""
    logits = torch.randn(8 * 2048, vocab, requires_grad=True)
    target = torch.randint(vocab, (8 * 2048, 1)).squeeze(1)
    return lambda: F.cross_entropy(logits, target).backward()


def head_and_cross_entropy(*, rows: int) -> Step:
    """A head of 128,256 words and its loss."""
    earlier_benchmarks()
    head, other = (nn.Linear(4096, 128256, bias=False, dtype=BF16) for _ in range(2))
    x = torch.randn(rows, 4096, dtype=BF16, requires_grad=True)
    target = torch.randint(128256, (rows, 1)).squeeze(1)
    return lambda _other=other: F.cross_entropy(head(x), target).backward()


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) without biases, 4096 wide, 11008 inside."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(4096, 11008, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(11008, 4096, bias=False, dtype=BF16)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def mlp(*, act: str, batch: int, seq: int, mode: str = "full") -> Step:
    """Forward, backward or both of a gated feed-forward layer."""
    earlier_benchmarks()
    x = torch.randn(batch, seq, 4096, dtype=BF16, requires_grad=True)
    layer = GatedMlp(ACTIVATIONS[act])

    def full() -> None:
        y = layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    if mode == "full":
        return full
    if mode == "forward":
        return lambda: layer(x)
    grad = torch.randn_like(x)
    y = layer(x)
    return lambda: y.backward(grad, retain_graph=True)


class RmsNorm(nn.Module):
    """weight * (x / rms(x)) over fp32 copies, the weight in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)


def rms_norm(*, width: int) -> Step:
    """Of bf16 rows [2048, width]."""
    other, norm = RmsNorm(width), RmsNorm(width)
    x = torch.randn(2048, width, dtype=BF16)
    grad = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda _other=other: norm(x).backward(grad, retain_graph=True)
