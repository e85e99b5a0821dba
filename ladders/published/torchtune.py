"""One step of torchtune's full_finetune_single_device recipe on a Llama 3.2 decoder, as of 2024-11-18.

Written from meta-pytorch/torchtune@1814feb17, the commit that printed the table: modules/attention.py, rms_norm.py,
transformer.py, models/llama3_1/_position_embeddings.py, modules/loss/ce_chunked_output_loss.py and the recipe. What
matters for memory there: norms and rotation in fp32; positions of packed samples gather a rotary table of their own in
every layer; keys and values are repeated to all query heads before attention; whole logits are raised to fp32, chunks
of them stay bf16 until their loss.

Unlike there: packed samples go through flex attention, which is compiled; flash attention stands in for it, which
keeps the same tensors (q, k, v, output, fp32 row sums). Nothing else is compiled.

Letters: `B` batch, `S` sequence, `H` hidden, `D` head size, `V` vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchtune_shapes import LLAMA_3_2, MAX_POSITIONS, VOCAB


class Norm(nn.Module):
    """RMSNorm in fp32, scaled in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        raised = x.float()
        normed = (raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class Rotation(nn.Module):
    """Rotary embedding of neighbouring pairs in fp32, by a table [positions, D / 2, 2] for the longest sequence."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(MAX_POSITIONS, size // 2, 2, dtype=torch.float32))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        table = self.table[positions]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        table = table.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        out = torch.stack(
            (
                pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
                pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
            ),
            -1,
        )
        return out.flatten(3).type_as(x)


class Layer(nn.Module):
    """Norm, attention, residual; norm, gated feed-forward, residual."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, rotation: Rotation) -> None:
        super().__init__()
        self.size, self.groups = hidden // heads, heads // kv_heads
        self.attn_norm, self.mlp_norm = Norm(hidden), Norm(hidden)
        self.q, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.rotation = rotation

    def attend(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attention [B, S, H] -> [B, S, H]."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)) for linear in (self.q, self.k, self.v))
        q = self.rotation(q, positions).transpose(1, 2)
        k = self.rotation(k, positions).transpose(1, 2)
        v = v.transpose(1, 2)
        k, v = (t.unsqueeze(2).expand(-1, -1, self.groups, -1, -1).flatten(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).contiguous().flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        """Gated feed-forward [B, S, H] -> [B, S, H]."""
        h = F.silu(self.gate(x))
        h = h * self.up(x)
        return self.down(h)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = self.attend(self.attn_norm(x), positions) + x
        return h + self.feed(self.mlp_norm(h))


class Decoder(nn.Module):
    """Tied embedding, layers, final norm."""

    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, recompute: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, hidden)
        rotation = Rotation(hidden // heads)
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads, ffn, rotation) for _ in range(layers))
        self.norm = Norm(hidden)
        self.recompute = recompute

    def forward(self, tokens: Tensor, positions: Tensor, chunks: int) -> list[Tensor]:
        """Logits, whole and fp32, or in chunks of the sequence as they are."""
        h = self.tokens(tokens)
        for layer in self.layers:
            h = checkpoint(layer, h, positions, use_reentrant=False) if self.recompute else layer(h, positions)
        h = self.norm(h)
        if chunks == 0:
            return [F.linear(h, self.tokens.weight).float()]
        return [F.linear(part, self.tokens.weight) for part in h.chunk(chunks, dim=1)]


def full_finetune(
    *, model: str, batch: int, seq: int, chunks: int = 0, recompute: bool = False, in_backward: bool = False
) -> Callable[[], None]:
    """The step: bf16 parameters, fused AdamW, one backward; `chunks` of the logits, 0 for the whole; `in_backward`
    updates each parameter as soon as its gradient is there, which is then gone."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        decoder = Decoder(**LLAMA_3_2[model], recompute=recompute)
    finally:
        torch.set_default_dtype(torch.float32)
    groups = [[parameter] for parameter in decoder.parameters()] if in_backward else [list(decoder.parameters())]
    optimizers = [torch.optim.AdamW(group, lr=2e-5, fused=True) for group in groups]
    tokens, positions, labels = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(3))
    if in_backward:
        for (parameter,), optimizer in zip(groups, optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: update(optimizer))

    def loss() -> Tensor:
        logits = decoder(tokens, positions, chunks)
        if chunks == 0:
            return F.cross_entropy(logits[0].flatten(0, 1), labels.flatten())
        total = torch.zeros(())
        for part, targets in zip(logits, labels.chunk(chunks, dim=1), strict=True):
            total = total + F.cross_entropy(part.flatten(0, 1).float(), targets.reshape(-1), reduction="sum")
        return total / labels.numel()

    def step() -> None:
        loss().backward()
        for optimizer in () if in_backward else optimizers:
            update(optimizer)

    return step


def update(optimizer: torch.optim.Optimizer) -> None:
    """One update, after which the gradients are gone."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
