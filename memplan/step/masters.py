"""fp32 copies of low-precision parameters, which the optimizer steps on."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Masters:
    """An fp32 copy of each parameter as it was when this was made.

    Before a step every gradient is cast to fp32, and the one in low precision is freed right behind its cast: at the
    end of it all gradients are there in fp32. After the step every copy is cast back into its parameter, without a
    temporary. Source: `_copy_model_grads_to_main_grads` and `_copy_main_params_to_model_params` of
    Float16OptimizerWithFloat16Params, megatron/core/optimizer/optimizer.py, Megatron-LM core 0.12.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self.copies = [param.detach().float().requires_grad_() for param in params]

    def take_gradients(self) -> None:
        """Moves each parameter's gradient to its copy, in fp32."""
        for param, copy in zip(self.params, self.copies, strict=True):
            if param.grad is not None:
                copy.grad = param.grad.float()
                param.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Gives each parameter its copy's value."""
        for param, copy in zip(self.params, self.copies, strict=True):
            param.copy_(copy)
