"""torch's optimizers by the names of `StepSpec.optimizer`."""

from collections.abc import Iterable

import torch
from torch import nn

LEARNING_RATE = 1e-4


def make_optimizer(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over the parameters that train; frozen ones get no state."""
    trainable = [param for param in params if param.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=LEARNING_RATE, foreach=False)
    return torch.optim.AdamW(
        trainable, lr=LEARNING_RATE, fused=name == "adamw", foreach=name == "adamw-foreach", weight_decay=0.01
    )
