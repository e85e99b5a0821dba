"""A stand-in for an optimizer whose kernels no trace can run: plain SGD, beside which lie tensors of the sizes that it
would keep and make."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from memplan.record.module import OptimizerSizes, Size
from memplan.spec.run import RunSpec
from memplan.step.builder import TrainStep
from memplan.step.optimizer_low_bit import LOW_BIT
from memplan.step.update import UpdateInBackward
from memplan.trace.storages import inside

SizesOf = Callable[[list[Size]], OptimizerSizes]
"""Shape and dtype of each parameter of an optimizer -> what that keeps and makes."""


def needs_stand_in(run: RunSpec) -> bool:
    """Whether the optimizer of `run` cannot be traced."""
    return run.step.optimizer in LOW_BIT


def with_sgd(run: RunSpec) -> RunSpec:
    """`run` with an optimizer that keeps and makes nothing."""
    return dataclasses.replace(run, step=dataclasses.replace(run.step, optimizer="sgd"))


def stand_in(step: TrainStep, sizes_of: SizesOf) -> None:
    """Makes each optimizer of `step`, which are SGD, keep what `sizes_of` says from its first step on, for parameters
    that have a gradient then, and make and drop the rest in each."""
    update = step.update
    for one in update.updates.values() if isinstance(update, UpdateInBackward) else [update]:
        one.optimizer.register_step_pre_hook(Kept(sizes_of))


class Kept:
    """What one optimizer keeps."""

    def __init__(self, sizes_of: SizesOf) -> None:
        self.sizes_of = sizes_of
        self.sizes: OptimizerSizes | None = None
        self.tensors: list[Tensor] = []

    def __call__(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        params = [inside(one) for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if self.sizes is None:
            self.sizes = self.sizes_of([(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in params])
            self.tensors = [made(size) for some in (self.sizes.shared, *self.sizes.each) for size in some]
        for sizes in self.sizes.passing:
            held = [made(((size,), "uint8")) for size in sizes]
            del held


def made(size: Size) -> Tensor:
    """An empty tensor."""
    return torch.empty(size[0], dtype=getattr(torch, size[1]))
