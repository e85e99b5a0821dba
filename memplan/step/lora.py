"""Low-rank adapters on a frozen model, which may be kept in 4 bits.

Letters: `r` rank, `in` and `out` widths of a linear.
"""

import math
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.errors import MemplanError, near_names
from memplan.models.blocks import find_blocks
from memplan.spec.step import StepSpec
from memplan.step.optimizer_low_bit import refuse_fake, require
from memplan.step.precision import DTYPES

ALPHA_OVER_RANK = 2
"""Scale of what an adapter adds: alpha = 2 r, the usual choice."""


class LoraLinear(nn.Module):
    """A frozen linear, or Conv1D of transformers, with an adapter beside it: W x + b + 2 B (A dropout(x)); A [r, in],
    B [out, r] starts at zero.

    Source: LoRA (arXiv 2106.09685), section 4.1.
    """

    def __init__(self, base: nn.Module, rank: int, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = widths(base)  # which routers read
        weight: Any = base.weight
        self.down = nn.Parameter(torch.empty(rank, self.in_features, dtype=weight.dtype))
        self.up = nn.Parameter(torch.zeros(self.out_features, rank, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        inner = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return torch.add(out, F.linear(F.linear(inner, self.down), self.up), alpha=ALPHA_OVER_RANK)


def widths(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear or of a Conv1D."""
    return (module.nx, module.nf) if is_conv1d(module) else (module.in_features, module.out_features)


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is what transformers' GPT-2 has for linears: a matrix [in, out], which PEFT adapts as it does
    others. Source: `Conv1D`, transformers/pytorch_utils.py, 5.24; peft 0.21, tuners/lora/layer.py."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether an adapter can stand beside `module`."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def add_adapters(model: nn.Module, step: StepSpec) -> None:
    """Freezes `model` and gives adapters to the linears that `step.lora` names, in every block.

    A name is that of the attribute which holds the linear, whole: `q` for `blocks.0.attn.q`. MemplanError with the
    names that there are when one matches no linear, and where there are none.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    linears: dict[str, list[tuple[nn.Module, str, nn.Module]]] = {}
    for block in find_blocks(model, step.blocks).values():
        for parent in block.modules():
            for name, child in parent.named_children():
                if is_linear(child):
                    linears.setdefault(name, []).append((parent, name, child))
    if not linears:
        raise MemplanError("The blocks have no linear beside which an adapter could stand.", "Leave --lora out.")
    for name in step.lora_names or tuple(linears):
        if name not in linears:
            raise MemplanError(f"No linear of the blocks is called {name!r}.", near_names(name, linears))
        for parent, attribute, linear in linears[name]:
            setattr(parent, attribute, LoraLinear(linear, step.lora_rank, step.dropout))
    if step.lora_base:
        quantise(model, step)


def quantise(model: nn.Module, step: StepSpec) -> None:
    """Puts bitsandbytes' 4-bit linears in the place of those of the blocks; MemplanError where it is not installed or
    the model is traced."""
    who = f"A base in {step.lora_base}"
    refuse_fake(model.parameters(), who, "bitsandbytes")
    require("bitsandbytes", who)
    for block in find_blocks(model, step.blocks).values():
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if is_linear(child):
                    setattr(parent, name, in_4_bits(child, step))


def in_4_bits(linear: Any, step: StepSpec) -> nn.Linear:
    """`linear` with its weight as QLoRA keeps it: 4 bits an element, an 8-bit scale for 64 of them and an fp32 one for
    256 of those, products in the step's own dtype. A Conv1D becomes a linear of the same matrix.

    Source: QLoRA (arXiv 2305.14314), section 3; bitsandbytes 0.50; integrations/bitsandbytes.py, transformers 5.24.
    """
    library = import_module("bitsandbytes.nn")
    inputs, outputs = widths(linear)
    weight = linear.weight.detach()
    weight = weight.T.contiguous() if is_conv1d(linear) else weight
    options = {"compress_statistics": True, "quant_type": step.lora_base}
    made: nn.Linear = library.Linear4bit(
        inputs,
        outputs,
        bias=linear.bias is not None,
        compute_dtype=DTYPES[step.computed],
        device="meta",
        **options,
    )
    made.weight = library.Params4bit(weight, requires_grad=False, **options)
    made.bias = linear.bias
    return made.to(weight.device)
