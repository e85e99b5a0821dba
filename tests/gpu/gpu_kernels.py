"""Small functions that live from one rule of the trace's tables each, to be measured on a card and traced for it.

The code is written for no device: on a card it runs under `torch.device("cuda")`, in a trace as it stands. A kernel's
function takes a scale; 1 is for a card of 24 GB or more, less is for tests.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import memplan

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One function and the rule that it lives from."""

    name: str
    """Name of its row."""
    rule: str
    """File of memplan/trace/cuda_rules and the entry there."""
    run: Callable[[float], None]
    """Makes its inputs, runs, and leaves nothing behind."""
    unknown: str = ""
    """What the trace says it does not know of it; such a row is shown and not judged."""
    cuda_only: bool = False
    """Whether a CPU has no such kernel."""


def size(scale: float, number: int, multiple: int = 8) -> int:
    """`number` scaled, as a multiple."""
    return max(int(number * scale) // multiple, 1) * multiple


def backward(out: Tensor) -> None:
    """A backward whose first gradient is dense."""
    out.backward(torch.ones_like(out))


def linear(scale: float, *, bias: bool) -> None:
    layer = nn.Linear(size(scale, 4096), size(scale, 8192), bias=bias, dtype=BF16)
    backward(layer(torch.randn(size(scale, 4096), size(scale, 4096), dtype=BF16, requires_grad=True)))


def product_without_gradient(scale: float) -> None:
    n = size(scale, 8192)
    with torch.no_grad():
        torch.randn(n, n, dtype=BF16) @ torch.randn(n, n, dtype=BF16)


def attention(
    scale: float,
    backends: tuple[SDPBackend, ...] = (),
    *,
    dtype: torch.dtype = BF16,
    heads: int = 32,
    kv_heads: int = 32,
    head: int = 128,
    mask: str = "",
    causal: bool = True,
    dropout: float = 0.0,
) -> None:
    """Attention as models call it: [B, S, heads, D] turned into [B, heads, S, D]."""
    batch, seq = 2, size(scale, 2048, 64)

    def made(count: int) -> Tensor:
        return torch.randn(batch, seq, count, head, dtype=dtype, requires_grad=True).transpose(1, 2)

    query, key, value = made(heads), made(kv_heads), made(kv_heads)
    attn_mask = None
    if mask:
        allowed = torch.ones(seq, seq, dtype=torch.bool).tril()
        attn_mask = allowed if mask == "bool" else torch.zeros(seq, seq, dtype=dtype).masked_fill(~allowed, -1e4)
    with sdpa_kernel(list(backends)) if backends else nullcontext():
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, causal and not mask, enable_gqa=heads != kv_heads
        )
    backward(out)


def split_keys(scale: float) -> None:
    """Few queries over many keys, which flash attention splits."""
    query = torch.randn(1, 8, 64, 128, dtype=BF16)
    key = torch.randn(1, 8, size(scale, 16384), 128, dtype=BF16)
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(query, key, key)


def embedding(scale: float) -> None:
    table = nn.Embedding(size(scale, 128256), 2048, dtype=BF16)
    backward(table(torch.randint(0, table.num_embeddings, (4, size(scale, 4096)))))


def picked_rows(scale: float) -> None:
    rows = torch.randn(size(scale, 65536), 2048, dtype=BF16, requires_grad=True)
    backward(rows[torch.randint(0, rows.shape[0], (size(scale, 32768),))])


def norm(scale: float, function: Callable[..., Tensor], width: int = 512) -> None:
    """Many short rows, whose weight gradients are summed in parts."""
    weight = torch.ones(width, dtype=BF16, requires_grad=True)
    backward(function(torch.randn(size(scale, 262144), width, dtype=BF16, requires_grad=True), (width,), weight))


def cross_entropy(scale: float) -> None:
    logits = torch.randn(size(scale, 2048), 128256, dtype=BF16, requires_grad=True)
    F.cross_entropy(logits.float(), torch.randint(0, 128256, (logits.shape[0],))).backward()


def swiglu(scale: float) -> None:
    width = size(scale, 4096)
    up, gate, down = (
        nn.Linear(*shape, bias=False, dtype=BF16) for shape in ((width, 11008), (width, 11008), (11008, width))
    )
    backward(down(F.silu(gate(x := torch.randn(2, size(scale, 4096), width, dtype=BF16, requires_grad=True))) * up(x)))


def autocast(scale: float) -> None:
    device = "cuda" if torch.get_default_device().type == "cuda" else "cpu"
    width = size(scale, 2048)
    model = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    with torch.autocast(device, BF16):
        out = model(torch.randn(4, size(scale, 2048), width)).softmax(-1)
    backward(out)


def checkpointed(scale: float) -> None:
    width = size(scale, 2048)
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(BF16) for _ in range(4)
    ]
    x = torch.randn(4, size(scale, 2048), width, dtype=BF16, requires_grad=True)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    backward(x)


def dropout(scale: float) -> None:
    backward(F.dropout(torch.randn(size(scale, 16384), 4096, dtype=BF16, requires_grad=True), 0.1))


def optimizer_step(scale: float, **options: bool) -> None:
    layers = nn.ModuleList(nn.Linear(size(scale, 2048), size(scale, 2048)) for _ in range(8))
    made = torch.optim.AdamW(layers.parameters(), **options)
    for _ in range(2):
        for param in layers.parameters():
            param.grad = torch.ones_like(param)
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        made.step()
        made.zero_grad()


FLASH, EFFICIENT = (SDPBackend.FLASH_ATTENTION,), (SDPBackend.EFFICIENT_ATTENTION,)
MATH, CUDNN = (SDPBackend.MATH,), (SDPBackend.CUDNN_ATTENTION,)
IN_CUDNN = "what cuDNN takes inside itself is not known"


def kernel(
    name: str, rule: str, function: Callable[..., None], *values: Any, unknown: str = "", **options: Any
) -> Kernel:
    """A kernel whose function gets `values` and `options` behind the scale."""
    return Kernel(name=name, rule=rule, run=lambda scale: function(scale, *values, **options), unknown=unknown)


def on_cuda(name: str, rule: str, *values: Any, **options: Any) -> Kernel:
    """A kernel of attention that no CPU has."""
    return replace(kernel(f"attention, {name}", rule, attention, *values, **options), cuda_only=True)


KERNELS = (
    kernel("linear", "workspaces.py: two threads", linear, bias=False),
    kernel("linear with bias", "workspaces.py: cuBLASLt", linear, bias=True),
    kernel("product without gradients", "workspaces.py: one thread", product_without_gradient),
    kernel("attention, torch's choice", "sdpa_rules.py", attention, unknown=IN_CUDNN),
    kernel("attention, torch's choice, grouped heads", "sdpa_rules.py", attention, kv_heads=8, unknown=IN_CUDNN),
    kernel("attention, math", "attention.py: math_attention", attention, MATH, heads=8, kv_heads=8),
    kernel("attention, math, grouped heads", "attention.py: math_attention", attention, MATH, heads=8, kv_heads=2),
    on_cuda("cudnn", "attention.py", CUDNN, unknown=IN_CUDNN),
    on_cuda("flash", "hidden_ops.py: flash_backward", FLASH),
    on_cuda("flash, grouped heads", "hidden_ops.py: flash_backward", FLASH, kv_heads=8),
    on_cuda("flash, head of 72", "attention.py: padded heads", FLASH, heads=16, kv_heads=16, head=72),
    on_cuda("flash, dropout", "hidden_ops.py: flash_forward", FLASH, dropout=0.1),
    replace(kernel("attention, flash, split keys", "hidden_ops.py: flash_forward", split_keys), cuda_only=True),
    on_cuda("efficient", "hidden_ops.py: efficient_backward", EFFICIENT),
    on_cuda("efficient, head of 64", "hidden_ops.py: efficient_backward", EFFICIENT, head=64),
    on_cuda("efficient, boolean mask", "attention.py: masks", EFFICIENT, mask="bool"),
    on_cuda("efficient, additive mask", "attention.py: masks", EFFICIENT, mask="additive"),
    on_cuda("efficient, fp32", "hidden_ops.py: efficient_backward", EFFICIENT, dtype=torch.float32),
    kernel("embedding", "hidden_ops.py: embedding_backward", embedding),
    kernel("picked rows", "hidden_ops.py: index_put", picked_rows),
    kernel("layer norm, short rows", "hidden_ops.py: layer_norm_backward", norm, F.layer_norm),
    kernel("rms norm, short rows", "hidden_ops.py: rms_norm_backward", norm, F.rms_norm),
    kernel("cross entropy", "hidden.py: NOTHING_HIDDEN", cross_entropy),
    kernel("swiglu", "workspaces.py", swiglu),
    kernel("autocast", "autocast_lists.py", autocast),
    kernel("checkpoint", "workspaces.py: recomputation", checkpointed),
    kernel("dropout", "ops.py: native_dropout", dropout),
    kernel("adamw, foreach", "hidden.py: NOTHING_HIDDEN", optimizer_step, foreach=True),
    kernel("adamw, fused", "hidden.py: NOTHING_HIDDEN", optimizer_step, fused=True),
)
"""Every rule that a card can refute."""


def measured_bytes(one: Kernel, device: str, scale: float = 1.0) -> int:
    """Peak of `one` on `device` above what was alive before, cuBLAS's workspaces of a fresh process included."""
    gc.collect()
    if device == "cuda":
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        torch.cuda.empty_cache()
    with memplan.PeakWindow(device) as window:
        start_bytes = window.live_bytes
        with torch.device(device):
            one.run(scale)
    return window.allocated_bytes - start_bytes


def traced_bytes(one: Kernel, card: str | None, scale: float = 1.0) -> int:
    """Peak of `one` by the trace: on `card`, or with None on the CPU."""
    with memplan.tracing(gpu=card, frames=False) as trace:
        one.run(scale)
    return trace.peak_allocated_bytes
