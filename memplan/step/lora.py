"""Low-rank adapters on a frozen model.

Letters: `r` rank, `in` and `out` widths of a linear.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.errors import MemplanError, near_names
from memplan.models.blocks import find_blocks
from memplan.spec.step import StepSpec

ALPHA_OVER_RANK = 2
"""Scale of what an adapter adds: alpha = 2 r, the usual choice."""


class LoraLinear(nn.Module):
    """A frozen linear with an adapter beside it: W x + b + 2 B (A dropout(x)); A [r, in], B [out, r] starts at zero.

    Source: LoRA (arXiv 2106.09685), section 4.1.
    """

    def __init__(self, base: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.base = base
        dtype = base.weight.dtype
        self.down = nn.Parameter(torch.empty(rank, base.in_features, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        inner = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return torch.add(out, F.linear(F.linear(inner, self.down), self.up), alpha=ALPHA_OVER_RANK)


def add_adapters(model: nn.Module, step: StepSpec) -> None:
    """Freezes `model` and gives adapters to the linears that `step.lora` names, in every block.

    MemplanError with the names that there are when one matches no linear.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    linears: dict[str, list[tuple[nn.Module, str, nn.Linear]]] = {}
    for block in find_blocks(model, step.blocks).values():
        for parent in block.modules():
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear):
                    linears.setdefault(name, []).append((parent, name, child))
    for name in step.lora_names or tuple(linears):
        if name not in linears:
            raise MemplanError(f"No linear of the blocks is called {name!r}.", near_names(name, linears))
        for parent, attribute, linear in linears[name]:
            setattr(parent, attribute, LoraLinear(linear, step.lora_rank, step.dropout))
