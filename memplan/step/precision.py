"""What a step's precision asks of torch: dtypes, autocast, loss scaling."""

from typing import Any

import torch
from torch import Tensor

from memplan.spec.step import StepSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes by the names of `StepSpec.stored` and `StepSpec.computed`."""


def autocast(step: StepSpec, device: torch.device) -> torch.autocast:
    """Autocast on `device`, which does nothing where the step has none."""
    low = torch.float16 if step.computed == "fp16" else torch.bfloat16
    return torch.autocast(device.type, low, enabled=step.autocasts)


INITIAL_SCALE = 2.0**10
"""What the loss is multiplied by at first. torch's 2**16 overflows in the first steps, which are then left out: a step
that is to be measured is one that is taken."""


class LossScaler(torch.amp.GradScaler):
    """torch's scaler, which takes fp16 gradients too: they are checked for infinities and unscaled in place.

    torch refuses them, as its scaler was made for fp32 parameters; the op takes either. Source: `_unscale_grads_` in
    torch/amp/grad_scaler.py, which FSDP's scaler overrides alike, torch 2.13.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type, init_scale=INITIAL_SCALE)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
