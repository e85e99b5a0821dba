"""torch's FSDP2 on each block and on the root: parameters, gradients and optimizer state split over the ranks.

What the root holds itself (embedding, final norm, head) stays gathered from forward to the end of backward.

Known limits: on a CPU mesh there is one stream. On CUDA, FSDP2 gathers and reduces on streams of its own, each of which
has a pool of the caching allocator to itself: allocated bytes follow the host's order of calls and are the same,
reserved bytes are more. FSDP2 keeps a collective's buffer until the next one by a reference, not by an event, and so it
does here. Of what is offloaded, a rank on the CPU shows only that it is copied in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._python_dispatch import _disable_current_modes

from memplan.errors import MemplanError
from memplan.models.trainable import Trainable
from memplan.spec.parallel import MIXED
from memplan.spec.step import StepSpec
from memplan.step.precision import DTYPES
from memplan.step.sharding import Sharding
from memplan.step.update import matrices


class FsdpSharding(Sharding):
    """A rank of FSDP2. Every chunk's backward reduces its gradients into this rank's part."""

    def __init__(self, step: StepSpec, model: Trainable, blocks: Sequence[nn.Module]) -> None:
        how = step.sharding
        device = next(model.parameters()).device
        with _disable_current_modes():
            mesh = init_device_mesh(device.type, (step.world,))
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES.get(how.param_dtype), reduce_dtype=DTYPES.get(how.reduce_dtype)
        )
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        options["offload_policy"] = (
            CPUOffloadPolicy(pin_memory=device.type == "cuda") if how.offload else OffloadPolicy()
        )
        check_dtypes(model, blocks)
        how.check_rows(step.world, [tuple(matrix.shape) for matrix in matrices(model, step)])
        for number, block in enumerate(blocks, start=1):
            keeps = how.keep or (how.keep_last and number == len(blocks))
            fully_shard(block, reshard_after_forward=not keeps, **options)
        fully_shard(model, **options)
        for block in [] if how.prefetch else blocks:
            assert isinstance(block, FSDPModule)
            block.set_modules_to_backward_prefetch([block])  # itself, which is gathered by then
        super().__init__(step, model)
        if how.offload:
            self.kept = list(model.parameters())
        if how.offload and device.type == "cpu":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    copy_in(module)
            for param in self.params:
                param.register_post_accumulate_grad_hook(self.copy_out)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def copy_out(self, param: Tensor) -> None:
        """Puts a copy, which is the host's, in the place of a gradient."""
        grad: Any = param.grad
        grad._local_tensor = grad._local_tensor.clone()
        if self.on_host is not None:
            self.on_host(grad._local_tensor)


def check_dtypes(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """MemplanError where parameters that train are of several dtypes in a block, or beside the blocks."""
    groups = [[param for param in block.parameters() if param.requires_grad] for block in blocks]
    inside = {param for group in groups for param in group}
    groups.append([param for param in model.parameters() if param.requires_grad and param not in inside])
    if any(len({param.dtype for param in group}) > 1 for group in groups):
        raise MemplanError(*MIXED)


def copy_in(module: FSDPModule) -> None:
    """Makes a rank whose device is the host copy each offloaded parameter before it is gathered, as one with a device
    of its own does. Source: FSDPParam.all_gather_inputs, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, 2.13."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for param in [param for group in groups if group is not None for param in group.fsdp_params]:
        param.__class__ = CopiedIn


class CopiedIn(FSDPParam):
    """A parameter on the host, a copy of which is gathered."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The copy, in the dtype of the gathering."""
        copy: Any = self._sharded_param_data.clone()
        return [copy if self.param_dtype is None else copy.to(self.param_dtype)]
