"""Published peaks of single layers and losses in eager PyTorch on an A100, traced without one.

Liger-Kernel's rows are the `huggingface` ones of its `benchmark/data/all_benchmark_data.csv`, Cut Cross-Entropy's the
`baseline` ones of its README. Both benchmarks build tensors once, run many times and read the peak of allocated bytes
from a reset just before a run:

- Liger-Kernel (`benchmark/scripts/utils.py`, `_test_memory`, at b5672a15 for 0.2.1 and at v0.4.2): the median of ten
  runs' `max_memory_allocated() / 2**20`, by way of float32, with everything that is alive. Gradients of the run before
  are still there and are added to. The speed benchmarks of the same process came first, so cuBLAS has its workspaces.
- Cut Cross-Entropy (`benchmark/memory.py`): the peak less what was allocated at the reset, in MiB, after a first
  repetition that is not kept; gradients are cleared before. The table has one decimal.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.trace.replay import alive_at
from memplan.trace.tracing import Tracing, tracing
from memplan.units import MIB

GPU = "a100-80g"
"""The card of every row: NVIDIA A100-SXM4-80GB in Liger-Kernel's table, "A100 SMX4" in the README."""
WORKSPACE_MIB = 8.125
"""cuBLAS on an A100, one a thread: 2 x 4096 KiB + 8 x 16 KiB (CUBLAS_WORKSPACE_CONFIG's default)."""
BF16 = torch.bfloat16
Run = Callable[[], object]
Make = Callable[[Tracing], Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published figure."""

    id: str
    """Its short name."""
    source: str
    """Where it is printed."""
    figure_mib: float
    """The peak in MiB, as printed."""
    make: Make
    """Builds what the benchmark builds and returns what it runs; a run may reset the peak once more."""
    above_start: bool
    """Whether the figure leaves out what was allocated at the reset."""
    printed: Callable[[float], float]
    """A peak in MiB as the source would print it."""


def float32(value: float) -> float:
    """`value` rounded to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def earlier_benchmarks() -> None:
    """What the speed benchmarks of the same process leave behind: cuBLAS's memory of both threads."""
    x = torch.zeros(8, 8, dtype=BF16, requires_grad=True)
    F.linear(x, x).sum().backward()


def cross_entropy(vocab: int) -> Make:
    """Liger-Kernel, benchmark_cross_entropy.py: fp32 logits [8 * 2048, V]."""

    def make(trace: Tracing) -> Run:
        logits = torch.randn(8 * 2048, vocab, requires_grad=True)
        target = torch.randint(vocab, (8 * 2048, 1)).squeeze(1)
        return lambda: F.cross_entropy(logits, target).backward()

    return make


def head_and_cross_entropy(rows: int) -> Make:
    """Liger-Kernel, benchmark_fused_linear_cross_entropy.py: the head of the other provider is there too."""

    def make(trace: Tracing) -> Run:
        earlier_benchmarks()
        head, other = (nn.Linear(4096, 128256, bias=False, dtype=BF16) for _ in range(2))
        x = torch.randn(rows, 4096, dtype=BF16, requires_grad=True)
        target = torch.randint(128256, (rows, 1)).squeeze(1)

        return lambda _other=other: F.cross_entropy(head(x), target).backward()

    return make


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) without biases, 4096 wide, 11008 inside."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(4096, 11008, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(11008, 4096, bias=False, dtype=BF16)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh."""
    return F.gelu(x, approximate="tanh")


def mlp(act: Callable[[Tensor], Tensor], batch: int, seq: int, mode: str = "full") -> Make:
    """Liger-Kernel, benchmark_geglu.py and benchmark_swiglu.py."""

    def make(trace: Tracing) -> Run:
        earlier_benchmarks()
        x = torch.randn(batch, seq, 4096, dtype=BF16, requires_grad=True)
        layer = GatedMlp(act)

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

    return make


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


def rms_norm(width: int) -> Make:
    """Liger-Kernel, benchmark_rms_norm.py: bf16 rows [2048, H]; the norm of the other provider is there too."""

    def make(trace: Tracing) -> Run:
        other, norm = RmsNorm(width), RmsNorm(width)
        x = torch.randn(2048, width, dtype=BF16)
        grad = torch.randn_like(x)
        x.requires_grad_(True)

        return lambda _other=other: norm(x).backward(grad, retain_graph=True)

    return make


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by two halves, cut in this order: backward takes the cuts in the reverse."""
    products, half = x * cos, x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return products + torch.cat((-second, first), dim=-1) * sin


def rope(width: int, seq: int) -> Make:
    """Liger-Kernel, benchmark_rope.py: 32 query and 8 key heads; the tables are made by a matmul in fp32."""

    def make(trace: Tracing) -> Run:
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

        def run(_alive: tuple[Tensor, ...] = (frequencies, positions)) -> None:
            out = rotated(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotated(k, cos.unsqueeze(1), sin.unsqueeze(1))
            torch.autograd.grad(out, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

        return run

    return make


def softcapped_head(kind: str) -> Make:
    """Cut Cross-Entropy, benchmark/__main__.py (baseline) on Gemma-2-2B's head: 8192 valid tokens, width 2304,
    256000 words, logits capped at 30."""

    def make(trace: Tracing) -> Run:
        x = torch.randn(8192, 2304, dtype=BF16, requires_grad=True)
        weight = torch.randn(256000, 2304, dtype=BF16, requires_grad=True)
        target = torch.randint(256000, (8192,))

        def loss() -> Tensor:
            logits = x @ weight.T
            logits = torch.tanh(logits / 30.0) * 30.0
            return F.cross_entropy(logits.float(), target)

        def run() -> None:
            x.grad = weight.grad = None
            trace.reset_peak()
            value = loss()
            if kind == "bw":
                trace.reset_peak()
            if kind != "fw":
                value.backward()

        return run

    return make


def liger(id: str, figure_mib: float, make: Make) -> Row:
    """A row of Liger-Kernel's."""
    source = "linkedin/Liger-Kernel benchmark/data/all_benchmark_data.csv"
    return Row(id=id, source=source, figure_mib=figure_mib, make=make, above_start=False, printed=float32)


def cce(id: str, figure_mib: float, make: Make) -> Row:
    """A row of Cut Cross-Entropy's."""

    def printed(peak_mib: float) -> float:
        return round(peak_mib, 1)

    source = "apple/ml-cross-entropy README.md"
    return Row(id=id, source=source, figure_mib=figure_mib, make=make, above_start=True, printed=printed)


ROWS = (
    liger("LK-007", 1280.1259765625, cross_entropy(4096)),
    liger("LK-009", 5120.1259765625, cross_entropy(16384)),
    liger("LK-011", 20480.125, cross_entropy(65536)),
    liger("LK-017", 6092.2822265625, head_and_cross_entropy(4096)),
    liger("LK-019", 15302.3759765625, head_and_cross_entropy(16384)),
    liger("LK-025", 1992.25, mlp(gelu, 8, 1024)),
    liger("LK-027", 6372.25, mlp(gelu, 8, 4096)),
    liger("LK-033", 1090.25, mlp(gelu, 8, 1024, "forward")),
    liger("LK-035", 3538.25, mlp(gelu, 8, 4096, "forward")),
    liger("LK-041", 1992.25, mlp(gelu, 8, 1024, "backward")),
    liger("LK-043", 6372.25, mlp(gelu, 8, 4096, "backward")),
    liger("LK-051", 80.01953125, rms_norm(1024)),
    liger("LK-053", 320.0546875, rms_norm(4096)),
    liger("LK-055", 1280.1953125, rms_norm(16384)),
    liger("LK-061", 64.64111328125, rope(2048, 2048)),
    liger("LK-069", 234.14111328125, rope(8192, 2048)),
    liger("LK-071", 912.18798828125, rope(8192, 8192)),
    liger("LK-077", 1294.25, mlp(F.silu, 4, 1024)),
    liger("LK-079", 3452.25, mlp(F.silu, 4, 4096)),
    cce("CE-003", 24000.0, softcapped_head("fw")),
    cce("CE-006", 16000.0, softcapped_head("bw")),
    cce("CE-009", 28000.0, softcapped_head("fw-bw")),
)
"""Every row of these two sources that runs eager PyTorch. The others run Triton kernels or torch.compile."""


def traced_mib(row: Row, *, hidden: bool = True) -> float:
    """The peak of a steady run; without memory that ops take inside themselves when `hidden` is False."""
    with tracing(gpu=GPU, frames=False) as trace:
        if not hidden:
            trace.recorder.hidden = None
        run = row.make(trace)
        for _ in range(2):
            run()
        trace.reset_peak()
        run()
    found = trace.replayed()
    peak = found.peaks.allocated_bytes
    if row.above_start:
        peak -= sum(found.block_bytes[index] for index in alive_at(found, found.start - 1))
    return peak / MIB


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_published_peak_is_traced_to_its_last_digit(row: Row) -> None:
    assert row.printed(traced_mib(row)) == row.figure_mib, row.source


@pytest.mark.parametrize(("id", "num_workspaces"), [("LK-077", 2), ("LK-061", 1), ("LK-053", 0)])
def test_without_cublas_workspaces_the_peak_falls_short_by_them(id: str, num_workspaces: int) -> None:
    """One for the thread of forward, one for that of backward where it multiplies matrices too."""
    row = next(row for row in ROWS if row.id == id)
    assert row.figure_mib - traced_mib(row, hidden=False) == num_workspaces * WORKSPACE_MIB


def test_a_gradient_more_or_less_is_seen() -> None:
    """The first run of all finds no gradients to add to: the figure is that of a later one."""
    row = next(row for row in ROWS if row.id == "LK-017")
    with tracing(gpu=GPU, frames=False) as trace:
        run = row.make(trace)
        trace.reset_peak()
        run()
    head_grad_mib = 128256 * 4096 * 2 / MIB
    assert row.figure_mib - trace.peak_allocated_bytes / MIB >= head_grad_mib
