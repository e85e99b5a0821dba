"""A lean SigLIP-style vision tower.

Letters: `N` crops, `P` patches of one crop, `h` width of a patch, `A` heads, `D` head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.models.attention import eager_attention
from memplan.models.feedforward import Gelu
from memplan.models.norms import LayerNorm
from memplan.spec.model import VisionSpec


class VisionTower(nn.Module):
    """Patches [N, P, patch] -> outputs of the layers read [N, P, layers * h], side by side in the order of
    `spec.layers_read`."""

    def __init__(self, spec: VisionSpec, *, attention: str = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        self.patch = nn.Linear(spec.patch_dim, spec.hidden)
        self.positions = nn.Parameter(torch.empty(spec.num_patches, spec.hidden))
        self.blocks = nn.ModuleList(VisionBlock(spec, attention=attention) for _ in range(spec.num_layers))

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.patch(pixels.to(self.patch.weight.dtype))
        hidden = hidden + self.positions.to(hidden.dtype)
        read: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index in self.spec.layers_read:
                read[index] = hidden
        del hidden
        return torch.cat([read[index] for index in self.spec.layers_read], dim=-1)


class VisionBlock(nn.Module):
    """Norm, attention, residual; norm, GELU layer, residual: [N, P, h] -> [N, P, h]."""

    def __init__(self, spec: VisionSpec, *, attention: str) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(spec.hidden, spec.norm_eps, True)
        self.attn = CrossAttention(
            spec.hidden, spec.hidden, num_heads=spec.num_heads, head_dim=spec.head_dim, attention=attention
        )
        self.mlp_norm = LayerNorm(spec.hidden, spec.norm_eps, True)
        self.mlp = Gelu(spec.hidden, spec.ffn, bias=True, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, normed: Tensor) -> Tensor:
        """Self-attention of the normed patches [N, P, h], every patch seeing every other of its crop."""
        out: Tensor = self.attn(normed, normed, None)
        return out


class CrossAttention(nn.Module):
    """Attention with biases from `queries` [N, Q, in] over `context` [N, P, in] -> [N, Q, out]; `mask` is True where
    the context may be seen, [N, 1, 1, P]."""

    def __init__(self, in_width: int, out_width: int, *, num_heads: int, head_dim: int, attention: str) -> None:
        super().__init__()
        self.kind = attention
        self.head_dim = head_dim
        width = num_heads * head_dim
        self.q = nn.Linear(in_width, width)
        self.k = nn.Linear(in_width, width)
        self.v = nn.Linear(in_width, width)
        self.out = nn.Linear(width, out_width)

    def forward(self, queries: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        shape = (-1, self.head_dim)
        q = self.q(queries).unflatten(-1, shape).transpose(1, 2)
        k = self.k(context).unflatten(-1, shape).transpose(1, 2)
        v = self.v(context).unflatten(-1, shape).transpose(1, 2)
        if self.kind == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = eager_attention(q, k, v, None if mask is None else additive(mask, q.dtype))
        del q, k, v
        return self.out(out.transpose(1, 2).flatten(2))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros where `mask` is True and the lowest value of `dtype` elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
