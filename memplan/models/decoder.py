"""A lean pre-norm decoder: the reference implementation whose memory the estimate speaks of.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `K` key/value heads, `D` head size, `F` feed-forward,
`V` vocabulary. No tensor outlives its last reader: what autograd does not save is gone when its line is.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.spec.model import DecoderSpec

Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, `eager` by elementwise ops in fp32 or `fused` by torch."""

    def __init__(self, width: int, eps: float, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "fused":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        dtype = x.dtype
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(dtype)


class LayerNorm(nn.Module):
    """torch's layer norm with an optional bias."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Embedding(nn.Module):
    """Token table [V, H], with a second table of `extra` rows concatenated below it at each forward."""

    def __init__(self, vocab: int, extra: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        self.extra = nn.Parameter(torch.empty(extra, width)) if extra else None

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.weight if self.extra is None else torch.cat((self.weight, self.extra))
        return F.embedding(tokens, table)


class Attention(nn.Module):
    """Grouped-query attention [B, S, H] -> [B, S, H] with rotation, by torch's SDPA or by eager matmuls."""

    def __init__(self, spec: DecoderSpec, *, attention: str, norm: str) -> None:
        super().__init__()
        self.spec = spec
        self.kind = attention
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if spec.projections == "fused":
            self.qkv = nn.Linear(spec.hidden, q_width + 2 * kv_width, bias=spec.qkv_bias)
        else:
            self.q = nn.Linear(spec.hidden, q_width, bias=spec.qkv_bias)
            self.k = nn.Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
            self.v = nn.Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, norm) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, norm) if spec.qk_norm else None
        self.out = nn.Linear(q_width, spec.hidden, bias=spec.out_bias)

    def forward(self, x: Tensor, rope: Rope | None, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rope is not None:
            q = rotate(q, rope, self.spec.rope_fp32)
            k = rotate(k, rope, self.spec.rope_fp32)
        out = sdpa(q, k, v, mask) if self.kind == "sdpa" else eager_attention(q, k, v, mask)
        del q, k, v
        out = out.transpose(1, 2).flatten(2)
        return self.out(out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, A, D], keys and values [B, S, K, D]; views of one tensor when the projection is fused."""
        spec = self.spec
        if spec.projections == "fused":
            heads = self.qkv(x).unflatten(-1, (-1, spec.head_dim))
            q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=2)
            return q, k, v
        shape = (-1, spec.head_dim)
        return self.q(x).unflatten(-1, shape), self.k(x).unflatten(-1, shape), self.v(x).unflatten(-1, shape)


def rotate(x: Tensor, rope: Rope, in_fp32: bool) -> Tensor:
    """Rotary embedding of `x` [B, heads, S, D] by tables [S, D], rotated as two halves."""
    cos, sin = rope
    dtype = x.dtype
    if in_fp32:
        x = x.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(dtype if in_fp32 else cos.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [B, A, S, D] by torch's kernels: causal with grouped heads, or under an additive mask with heads
    repeated."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) != q.size(1))
    k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [B, A, S, D] by matmul, fp32 softmax, matmul; `mask` is added to the scaled scores [B, A, S, S]."""
    k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """`x` [B, K, S, D] with every head repeated to make `num_heads`; `x` itself when it has as many."""
    return x if x.size(1) == num_heads else x.repeat_interleave(num_heads // x.size(1), dim=1)


class SwiGLU(nn.Module):
    """Gated SiLU, with gate and up as two matrices or one."""

    def __init__(self, width: int, ffn: int, out_width: int, *, bias: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(width, 2 * ffn, bias=bias)
        else:
            self.gate = nn.Linear(width, ffn, bias=bias)
            self.up = nn.Linear(width, ffn, bias=bias)
        self.down = nn.Linear(ffn, out_width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up, [..., F]."""
        if self.fused:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.silu(self.gate(x)) * self.up(x)


class Gelu(nn.Module):
    """Two matrices with a GELU between them, exact or by tanh."""

    def __init__(self, width: int, ffn: int, *, bias: bool, approximate: str) -> None:
        super().__init__()
        self.up = nn.Linear(width, ffn, bias=bias)
        self.down = nn.Linear(ffn, width, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """Norm, attention, residual; norm, feed-forward, residual: [B, S, H] -> [B, S, H]."""

    def __init__(self, spec: DecoderSpec, *, attention: str, norm: str) -> None:
        super().__init__()
        self.attn_norm = make_norm(spec, norm)
        self.attn = Attention(spec, attention=attention, norm=norm)
        self.mlp_norm = make_norm(spec, norm)
        self.mlp: nn.Module
        if spec.mlp == "swiglu":
            fused = spec.projections == "fused"
            self.mlp = SwiGLU(spec.hidden, spec.ffn, spec.hidden, bias=spec.mlp_bias, fused=fused)
        else:
            approximate = "tanh" if spec.mlp == "gelu-tanh" else "none"
            self.mlp = Gelu(spec.hidden, spec.ffn, bias=spec.mlp_bias, approximate=approximate)

    def forward(self, x: Tensor, rope: Rope | None, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope, mask)
        return x + self.mlp(self.mlp_norm(x))


def make_norm(spec: DecoderSpec, kind: str) -> nn.Module:
    """The norm over H that `spec` asks for."""
    if spec.norm == "rms":
        return RMSNorm(spec.hidden, spec.norm_eps, kind)
    return LayerNorm(spec.hidden, spec.norm_eps, spec.norm_bias)


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head."""

    def __init__(self, spec: DecoderSpec, *, attention: str = "sdpa", norm: str = "eager") -> None:
        super().__init__()
        self.spec = spec
        self.attention = attention
        self.embedding = Embedding(spec.vocab, spec.extra_vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_positions, spec.hidden) if spec.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(spec, attention=attention, norm=norm) for _ in range(spec.num_layers))
        self.norm = make_norm(spec, norm)
        self.head = None if spec.tied else nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.positions == "rope":
            self.inv_freq: Tensor
            self.register_buffer("inv_freq", inverse_frequencies(spec), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, H]; the base embedding's own when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, S, H] of `tokens` [B, S]."""
        hidden: Tensor = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        return hidden

    def trunk(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Final normed hidden states [B, S, H] from embedded ones; `mask` is additive, fp32 [B, 1, S, S]."""
        rope = self.rope_tables(hidden) if self.spec.positions == "rope" else None
        if mask is None:
            mask = self.causal_mask(hidden)
        for block in self.blocks:
            hidden = block(hidden, rope, mask)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed hidden states [..., H]."""
        return F.linear(hidden, self.head_weight)

    def rope_tables(self, hidden: Tensor) -> Rope:
        """Cosines and sines [S, D] in the dtype of `hidden`, or in fp32 when rotation is."""
        positions = torch.arange(hidden.size(1), device=hidden.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        dtype = torch.float32 if self.spec.rope_fp32 else hidden.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def causal_mask(self, hidden: Tensor) -> Tensor | None:
        """The additive mask fp32 [B or 1, 1, S, S] that dense masks and eager attention need, or None."""
        if self.spec.mask == "causal" and self.attention == "sdpa":
            return None
        size = hidden.size(1)
        rows = hidden.size(0) if self.spec.mask == "dense" else 1
        lowest = torch.finfo(torch.float32).min
        return torch.full((rows, 1, size, size), lowest, dtype=torch.float32, device=hidden.device).triu_(1)


def inverse_frequencies(spec: DecoderSpec) -> Tensor:
    """Rotary frequencies fp32 [D / 2], rescaled as Llama 3.1 does where the model asks for it.

    Source: RoFormer (arXiv 2104.09864) section 3.2.2; the Llama 3.1 model card for the rescaling.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
