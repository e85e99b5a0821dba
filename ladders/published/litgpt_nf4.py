"""bitsandbytes' frozen linear in nf4 as LitGPT's quantised rows run it.

Written from bitsandbytes 0.41.1 (18e827d6: functional.py `quantize_4bit` and `dequantize_4bit`, autograd/_functions.py
`MatMul4Bit`, nn/modules.py `Linear4bit`) and lightning 2.1 (`BitsandbytesPrecision`, which quantises halves). What
matters for memory there:

- a matrix is two elements a byte and a scale for 64 of them, in fp32 or, doubly quantised, in 8 bits with a fp32 scale
  for 256 of those;
- a product makes the matrix in fp16 first, then in the dtype of the rows, and backward does it again;
- the rows are kept as an attribute of the context wherever they want a gradient, though backward does not read them,
  and nothing lets them go before the graph itself ends.
"""

from typing import Any

import torch
import torch.nn.functional as F
from litgpt_shapes import NESTED_BLOCK, NF4_BLOCK
from torch import Tensor, nn


class MatMul4Bit(torch.autograd.Function):
    """Rows by a matrix that is made for the moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: "Nf4Linear", bias: Tensor | None) -> Tensor:
        ctx.linear = linear
        ctx.rows = x if ctx.needs_input_grad[0] else None
        return F.linear(x, linear.matrix().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return torch.matmul(grad, ctx.linear.matrix().to(grad.dtype)), None, None


class Nf4Linear(nn.Module):
    """A frozen linear in nf4; `nested` quantises its scales too."""

    def __init__(self, width: int, out: int, *, bias: bool, nested: bool) -> None:
        super().__init__()
        self.shape = out, width
        self.nested = nested
        weight = torch.empty(out, width)
        self.bias = nn.Parameter(torch.zeros(out), requires_grad=False) if bias else None
        self.quantise(weight)

    def quantise(self, weight: Tensor) -> None:
        """Takes a matrix [O, I] over, by way of fp16."""
        half = weight.half()
        scales = torch.zeros(half.numel() // NF4_BLOCK, dtype=torch.float32)
        codes = torch.zeros(half.numel() // 2, 1, dtype=torch.uint8)
        state = [codes, torch.zeros(16, dtype=torch.float32)]
        if self.nested:
            state += [scales.mean(), torch.zeros(-(-len(scales) // NESTED_BLOCK), dtype=torch.float32)]
            scales = torch.zeros_like(scales, dtype=torch.uint8)
        self.scales, self.state = scales, state

    def load(self) -> None:
        """Takes a matrix of a checkpoint over."""
        self.quantise(torch.empty(self.shape, dtype=torch.float16))

    def matrix(self) -> Tensor:
        """The matrix [O, I] in fp16."""
        scales = self.scales.new_empty(self.scales.shape, dtype=torch.float32) if self.nested else self.scales
        return scales.new_empty(self.shape, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        return MatMul4Bit.apply(x, self, self.bias)
