"""Feed-forward layers.

Letters: `F` feed-forward.
"""

import torch.nn.functional as F
from torch import Tensor, nn


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
