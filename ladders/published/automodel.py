"""NeMo Automodel's fine-tuning step of Llama-3.2-1B on one GPU, as of 2025-09-18.

Written from NVIDIA-NeMo/Automodel@b4733bdc1, the commit that printed the table (components/_transformers/auto_model.py,
components/loss/masked_ce.py, recipes/llm/train_ft.py), and the two that it builds on: transformers 4.55.4's Llama and
linkedin/Liger-Kernel v0.5.9, which `from_pretrained` puts into it by default. What matters for memory there:

- Liger's RMSNorm keeps its bf16 input and one fp32 number a row, its gated SiLU keeps gate and up only, its rotation
  works in place;
- samples of equal length need no mask, so keys and values stay as many as they are;
- the model's output, bf16 logits included, is a variable of the step until backward is done, beside the fp32
  log-probabilities and their two gradients.

Unlike there: Liger's kernels are stood for by functions that allocate what they allocate. What the table's batches were
is not said; equal lengths are assumed.

Letters: `B` batch, `S` sequence, `H` hidden, `D` head size, `V` vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from automodel_shapes import FFN, HIDDEN, KV_HEADS, LAYERS, ROW_BLOCKS, SIZE, VOCAB
from torch import Tensor, nn


class NormFunction(torch.autograd.Function):
    """liger_kernel/ops/rms_norm.py: the gradient is written over the one that comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        partial = grad.new_empty(ROW_BLOCKS, grad.size(-1), dtype=torch.float32)
        return grad, partial.sum(dim=0).to(ctx.saved_tensors[1].dtype)


class GatedFunction(torch.autograd.Function):
    """liger_kernel/ops/swiglu.py: silu(gate) * up; the gradients are written over gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


class RotateFunction(torch.autograd.Function):
    """liger_kernel/ops/rope.py: q and k are rotated in place, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q.view_as(q), k.view_as(k)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
        dq, dk = dq.transpose(1, 2).contiguous(), dk.transpose(1, 2).contiguous()
        return dq.transpose(1, 2), dk.transpose(1, 2)


class Norm(nn.Module):
    """RMSNorm by Liger."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return NormFunction.apply(x, self.weight)


class Layer(nn.Module):
    """Norm, attention, residual; norm, gated feed-forward, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = Norm(), Norm()
        self.q, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        """Attention [B, S, H] -> [B, S, H]."""
        q, k, v = (linear(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = RotateFunction.apply(q, k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).reshape(x.shape).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attn_norm(x))
        h = self.mlp_norm(x)
        return x + self.down(GatedFunction.apply(self.gate(h), self.up(h)))


def finetune(*, batch: int, seq: int) -> Callable[[], None]:
    """The step: bf16 parameters, AdamW by its default (foreach), one backward."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        embedding = nn.Embedding(VOCAB, HIDDEN)
        layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        norm = Norm()
    finally:
        torch.set_default_dtype(torch.float32)
    model = nn.ModuleDict({"embedding": embedding, "layers": layers, "norm": norm})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens, labels = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))

    def forward() -> Tensor:
        x = embedding(tokens)
        for layer in layers:
            x = layer(x)
        return F.linear(norm(x), embedding.weight)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, VOCAB).float(), labels.view(-1), reduction="sum") / labels.numel()

    def step() -> None:
        logits = forward()
        loss(logits).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
