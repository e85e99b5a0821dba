"""`module.to(...)` on fake parameters.

torch exchanges a fake parameter's contents by `swap_tensors`, which refuses a tensor that anybody refers to weakly, as
the fake mode itself does. While a trace is made, a converted parameter takes the old one's place instead; parameters
that two modules share stay shared. Optimizers made before the conversion keep the old ones, so convert first.
Source: Module._apply, torch/nn/modules/module.py, torch 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def replaced_parameters() -> Iterator[None]:
    """Conversions of modules put new parameters in the place of old ones while this is open."""
    plain = nn.Module._apply
    nn.Module._apply = _convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


def _convert(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`self` with `fn` of each parameter, its gradient and each buffer in their places."""
    made: dict[int, nn.Parameter | None] = {}
    for module in self.modules() if recurse else (self,):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _converted(parameter, fn)
            new = made[id(parameter)]
            if new is not None:
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return self


def _converted(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter | None:
    """The new parameter, or None where `fn` leaves it as it is."""
    with torch.no_grad():
        value = fn(parameter)
        if value is parameter:
            return None
        new = nn.Parameter(value, parameter.requires_grad)
        if parameter.grad is not None:
            new.grad = fn(parameter.grad)
    return new
