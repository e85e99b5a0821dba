"""Grouped-query attention with rotation.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `K` key/value heads, `D` head size. No tensor outlives
its last reader: what autograd does not save is gone when its line is.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.models.cache import KVLayer
from memplan.models.norms import RMSNorm
from memplan.spec.model import DecoderSpec

Rope = tuple[Tensor, Tensor]
KVStore = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [B, K, S, D] that blocks leave to later blocks, by number of the block."""


class Attention(nn.Module):
    """Grouped-query attention [B, S, H] -> [B, S, H] with rotation, by torch's SDPA or by eager matmuls.

    Where `spec` says so, the keys and values of block `index` go into `store` for later blocks, or come from there.
    """

    def __init__(
        self, spec: DecoderSpec, *, attention: str, norm: str, index: int = 0, store: KVStore | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.kind = attention
        self.index = index
        self.source = spec.kv_source(index)
        self.leaves_kv = spec.leaves_kv(index)
        self.store: KVStore = {} if store is None else store
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if self.source is not None:
            self.q = nn.Linear(spec.hidden, q_width, bias=spec.qkv_bias)
        elif spec.projections == "fused":
            self.qkv = nn.Linear(spec.hidden, q_width + 2 * kv_width, bias=spec.qkv_bias)
        else:
            self.q = nn.Linear(spec.hidden, q_width, bias=spec.qkv_bias)
            self.k = nn.Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
            self.v = nn.Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, norm, offset=spec.norm_offset)
        if spec.qk_norm and self.source is None:
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, norm, offset=spec.norm_offset)
        self.out = nn.Linear(q_width, spec.hidden, bias=spec.out_bias)

    def forward(
        self, x: Tensor, rope: Rope | None, mask: Tensor | None, past: KVLayer | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The layer's output; with `past`, which it sees too, also the keys and values of `x` [B, K, S, D], for the
        caller to append."""
        q, k, v = self.projected(x, rope)
        if past is None:
            out = self.weigh(q, k, v, mask)
            del q, k, v
            return self.out(out.transpose(1, 2).flatten(2))
        if self.spec.projections == "fused":
            v = v.clone()  # a view would keep the whole fused projection alive as long as the cache
        out = self.weigh(q, *past.joined(k, v), mask)
        del q
        return self.out(out.transpose(1, 2).flatten(2)), k, v

    def projected(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, A, S, D], keys and values [B, K, S, D], normed and rotated."""
        if self.source is not None:
            q = self.q(x).unflatten(-1, (-1, self.spec.head_dim))
            q = (q if self.q_norm is None else self.q_norm(q)).transpose(1, 2)
            return q if rope is None else rotate(q, rope, self.spec.rope_fp32), *self.store[self.source]
        q, k, v = self.project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rope is not None:
            q = rotate(q, rope, self.spec.rope_fp32)
            k = rotate(k, rope, self.spec.rope_fp32)
        if self.leaves_kv:
            self.store[self.index] = k, v
        return q, k, v

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention [B, A, S, D] by the kernel asked for."""
        return sdpa(q, k, v, mask) if self.kind == "sdpa" else eager_attention(q, k, v, mask)

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
        one = q.size(2) == 1  # a single query sees every key, and the flag would let it see the first alone
        return F.scaled_dot_product_attention(q, k, v, is_causal=not one, enable_gqa=k.size(1) != q.size(1))
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
