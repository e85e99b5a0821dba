"""Molmo2's connector: patches pooled by cross-attention, then projected into the decoder's width.

Letters: `B` batch, `P` patches of all crops of a sample, `T` image tokens of a sample, `p` patches pooled into one
token, `h` width of the tower, `H` hidden of the decoder.
"""

import torch
from torch import Tensor, nn

from memplan.models.feedforward import SwiGLU
from memplan.models.vision import CrossAttention
from memplan.spec.model import ConnectorSpec, VisionSpec


class Connector(nn.Module):
    """Features [B, P, layers * h] and indices [B, T, p] (-1 pads) -> image tokens [B, T, H]."""

    def __init__(self, vision: VisionSpec, spec: ConnectorSpec, text_hidden: int, *, attention: str = "sdpa") -> None:
        super().__init__()
        self.pooling = CrossAttention(
            vision.hidden * len(vision.layers_read),
            spec.hidden,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            attention=attention,
        )
        self.projector = SwiGLU(spec.hidden, spec.ffn, text_hidden)

    def forward(self, features: Tensor, pooled_idx: Tensor) -> Tensor:
        valid = pooled_idx >= 0
        patches = gather_patches(features, pooled_idx, valid).flatten(0, 1)
        del features
        valid = valid.flatten(0, 1)
        count = valid.sum(-1, dtype=torch.float32).clamp_(min=1).to(patches.dtype)
        queries = patches.sum(1, keepdim=True) / count[:, None, None]
        pooled = self.pooling(queries, patches, valid[:, None, None])
        del queries, patches, count, valid
        tokens: Tensor = self.projector(pooled.view(*pooled_idx.shape[:2], -1))
        return tokens


def gather_patches(features: Tensor, pooled_idx: Tensor, valid: Tensor) -> Tensor:
    """The patches [B, T, p, layers * h] that each token pools, zero where there is none."""
    sample = torch.arange(features.size(0), device=features.device)[:, None, None]
    return features[sample, pooled_idx.clamp(min=0)] * valid[..., None].to(features.dtype)
