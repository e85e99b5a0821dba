"""Single layers and losses of Liger-Kernel's benchmarks, by the provider `huggingface`: eager PyTorch on bf16 tensors.

Written from linkedin/Liger-Kernel benchmark/scripts (benchmark_cross_entropy.py, benchmark_geglu.py,
benchmark_fused_linear_cross_entropy.py, benchmark_swiglu.py, benchmark_rms_norm.py), liger 0.2.1. The layer of the
other provider is there too, and what the speed benchmarks of the same process leave behind: cuBLAS's memory of both
threads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from kernels_turns import turns
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


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by two halves, cut in this order: backward takes the cuts in the reverse."""
    products, half = x * cos, x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return products + torch.cat((-second, first), dim=-1) * sin


def rope(*, width: int, seq: int) -> Step:
    """32 query and 8 key heads; the tables are made by a matmul in fp32."""
    size = width // 32
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
    q, k = (torch.randn(1, seq, heads, size, dtype=BF16, requires_grad=True).transpose(1, 2) for heads in (32, 8))
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(seq).unsqueeze(0)
    with torch.no_grad():
        angles = (frequencies[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    del angles

    def step(_alive: tuple[Tensor, ...] = (frequencies, positions)) -> None:
        outs = rotated(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotated(k, cos.unsqueeze(1), sin.unsqueeze(1))
        torch.autograd.grad(outs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return step


def softcapped_head(*, kind: str) -> Step:
    """Cut Cross-Entropy's `baseline` (apple/ml-cross-entropy benchmark/__main__.py at af5f96a) on Gemma-2-2B's head:
    8192 valid tokens, width 2304, 256000 words, logits capped at 30; what is run says `turns`."""
    earlier_benchmarks()
    x = torch.randn(8192, 2304, dtype=BF16, requires_grad=True)
    weight = torch.randn(256000, 2304, dtype=BF16, requires_grad=True)
    target = torch.randint(256000, (8192,))

    def loss() -> Tensor:
        logits = x @ weight.T
        logits = torch.tanh(logits / 30.0) * 30.0
        return F.cross_entropy(logits.float(), target)

    return turns(kind, loss, Tensor.backward, (x, weight))
