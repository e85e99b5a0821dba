"""torch's optimizers by the names of `StepSpec.optimizer`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memplan.errors import NOTHING_TRAINS, MemplanError
from memplan.step.optimizer_low_bit import LOW_BIT, low_bit_adamw

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
MOMENTUM = 0.9
FP16_EPS = 1e-4
"""What AdamW divides by at least where its states are fp16, in which squares of gradients below 1e-3 are zero."""


def make_optimizer(name: str, params: Iterable[Tensor], matrices: Sequence[Tensor] = ()) -> torch.optim.Optimizer:
    """The optimizer over those of `params` that train; frozen ones get no state. `matrices`, some of them, are what
    Muon takes where `name` is `muon`."""
    trainable = [param for param in params if param.requires_grad]
    if not trainable:
        raise MemplanError(*NOTHING_TRAINS)
    if name in LOW_BIT:
        return low_bit_adamw(name, trainable, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    if name in ("sgd", "sgd-momentum"):
        momentum = MOMENTUM if name == "sgd-momentum" else 0
        return torch.optim.SGD(trainable, lr=LEARNING_RATE, momentum=momentum, foreach=False)
    if name == "adafactor":
        return torch.optim.Adafactor(trainable)  # loops on every device where nobody says otherwise
    if name == "muon":
        return Muon(trainable, matrices)
    return adamw(trainable, fused=name == "adamw", foreach=name == "adamw-foreach")


def adamw(params: Sequence[Tensor], *, fused: bool = False, foreach: bool = False) -> torch.optim.Optimizer:
    """torch's AdamW in one of its three forms."""
    half = any(param.dtype == torch.float16 for param in params)
    return torch.optim.AdamW(
        params,
        lr=LEARNING_RATE,
        fused=fused,
        foreach=foreach,
        weight_decay=WEIGHT_DECAY,
        eps=FP16_EPS if half else 1e-8,
    )


class Muon(torch.optim.Optimizer):
    """torch's Muon on `matrices`, those of `params` with two dimensions, and fused AdamW on the others.

    Both write their states into this one's.
    """

    def __init__(self, params: Sequence[Tensor], matrices: Sequence[Tensor]) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise MemplanError(
                f"torch {torch.__version__} has no Muon, which came with 2.9.", "Type: pip install -U torch"
            )
        super().__init__(params, {"lr": LEARNING_RATE})
        chosen = {id(matrix) for matrix in matrices}
        taken = [param for param in params if id(param) in chosen]
        others = [param for param in params if id(param) not in chosen]
        self.parts: list[torch.optim.Optimizer] = []
        if taken:
            self.parts.append(
                torch.optim.Muon(taken, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self.parts.append(adamw(others, fused=True))
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of both."""
        for part in self.parts:
            part.step()
