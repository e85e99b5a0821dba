"""Feed-forward layers.

Letters: `F` feed-forward.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from memplan.models.moe import MoE
from memplan.spec.model import DecoderSpec


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
        """The activated gate times up, [..., F]."""
        if self.fused:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.activated(gate) * up
        return self.activated(self.gate(x)) * self.up(x)

    def activated(self, gate: Tensor) -> Tensor:
        """What `up` is multiplied by."""
        return F.silu(gate)


class GeGLU(SwiGLU):
    """Gated GELU by tanh, in the same matrices."""

    def activated(self, gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh")


class Gelu(nn.Module):
    """Two matrices with a GELU between them, exact or by tanh."""

    def __init__(self, width: int, ffn: int, *, bias: bool, approximate: str) -> None:
        super().__init__()
        self.up = nn.Linear(width, ffn, bias=bias)
        self.down = nn.Linear(ffn, width, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


def make_mlp(spec: DecoderSpec) -> nn.Module:
    """The feed-forward layer of a block, [B, S, H] -> [B, S, H], that `spec` asks for."""
    if spec.experts:
        return MoE(spec)
    if spec.mlp in ("swiglu", "geglu"):
        gated = SwiGLU if spec.mlp == "swiglu" else GeGLU
        return gated(spec.hidden, spec.ffn, spec.hidden, bias=spec.mlp_bias, fused=spec.projections == "fused")
    approximate = "tanh" if spec.mlp == "gelu-tanh" else "none"
    return Gelu(spec.hidden, spec.ffn, bias=spec.mlp_bias, approximate=approximate)
