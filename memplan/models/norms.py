"""RMSNorm and LayerNorm over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.spec.model import DecoderSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, `eager` by elementwise ops in fp32 or `fused` by torch; with an
    offset it multiplies by 1 + weight."""

    def __init__(self, width: int, eps: float, kind: str, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.offset = offset
        self.eps = eps
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "fused":
            weight = 1 + self.weight if self.offset else self.weight
            return F.rms_norm(x, weight.shape, weight, self.eps)
        dtype = x.dtype
        x = x.float()
        if self.offset:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return (x * (1 + self.weight.float())).to(dtype)
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


def make_norm(spec: DecoderSpec, kind: str) -> nn.Module:
    """The norm over H that `spec` asks for."""
    if spec.norm == "rms":
        return RMSNorm(spec.hidden, spec.norm_eps, kind, offset=spec.norm_offset)
    return LayerNorm(spec.hidden, spec.norm_eps, spec.norm_bias)
