"""AdamW with states in 8 or 4 bits, by the libraries that have it: bitsandbytes and torchao."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from memplan.errors import MemplanError

LOW_BIT = {
    "adamw-8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "adamw-8bit-paged": ("bitsandbytes.optim", "PagedAdamW8bit"),
    "adamw-8bit-torchao": ("torchao.optim", "AdamW8bit"),
    "adamw-4bit-torchao": ("torchao.optim", "AdamW4bit"),
}
"""Module and class by the name of `StepSpec.optimizer`. Source: bitsandbytes 0.50, torchao 0.18."""
ESTIMATE = "Type memplan estimate."


def low_bit_adamw(name: str, params: Sequence[Tensor], **options: float) -> torch.optim.Optimizer:
    """The library's own optimizer; MemplanError where it is not installed, in a trace, which its kernels do not run in,
    and for bitsandbytes without CUDA, where its 8-bit states do not serve."""
    module, kind = LOW_BIT[name]
    library = module.partition(".")[0]
    refuse_fake(params, f"The optimizer {name}", library)
    require(library, f"The optimizer {name}")
    if library == "bitsandbytes" and any(not param.is_cuda for param in params):
        raise MemplanError(f"The optimizer {name} steps on a CUDA GPU only.", ESTIMATE)
    optimizer: torch.optim.Optimizer = getattr(import_module(module), kind)(params, **options)
    return optimizer


def refuse_fake(params: Iterable[Tensor], who: str, library: str) -> None:
    """MemplanError where `params`, which the kernels of `library` would read for `who`, are a trace's."""
    if any(isinstance(param, FakeTensor) for param in params):
        raise MemplanError(f"{who} runs kernels of {library}, which a trace cannot.", ESTIMATE)


def require(library: str, who: str) -> None:
    """MemplanError where `library`, which `who` is made by, is not installed."""
    if find_spec(library) is None:
        raise MemplanError(f"{who} needs {library}, which is not installed.", ESTIMATE)
