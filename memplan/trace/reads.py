"""What a trace goes on with where Python reads a value that nobody has computed."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default: 1, aten.is_nonzero.default: True}
"""Ops that give a value to Python, and the value that a trace goes on with."""
ALARMS = {aten.isnan.default, aten.isinf.default}
"""Ops that ask whether something went wrong; in a trace nothing did."""
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
"""What `GradScaler` finds infinite gradients by: it writes the answer into its second argument, and the step is left
out where that is not zero. Source: torch/amp/grad_scaler.py `_unscale_grads_`, torch 2.13."""
CARRIERS = {
    aten.any.default,
    aten.any.dim,
    aten.bitwise_or.Tensor,
    aten.logical_or.default,
    aten.max.default,
    aten.sum.default,
}
"""Ops that put alarms together."""
FOLLOWED = ALARMS | CARRIERS | {UNSCALE}


class Alarms:
    """Tensors that say whether something is not finite: these read as zero, everything else as one."""

    def __init__(self) -> None:
        self._tensors: Any = WeakIdKeyDictionary()

    def follow(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Takes down an alarm that the op `func`, one of `FOLLOWED`, has given."""
        if func is UNSCALE:
            self._tensors[args[1]] = True
        elif isinstance(out, Tensor) and (func in ALARMS or args[0] in self._tensors):
            self._tensors[out] = True

    def read(self, func: Any, tensor: Any) -> Any:
        """The value of `tensor` that the op `func`, one of `READS`, gives to Python."""
        value = type(READS[func])(tensor not in self._tensors)
        return float(value) if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point else value
