"""torch's FSDP2 on each block and on the root: parameters, gradients and optimizer state split over the ranks.

What the root holds itself (embedding, final norm, head) stays gathered from forward to the end of backward.

Known limits: on a CPU mesh there is one stream. On CUDA, FSDP2 gathers and reduces on streams of its own, each of which
has a pool of the caching allocator to itself: allocated bytes follow the host's order of calls and are the same, reserved
bytes are more. FSDP2 keeps a collective's buffer until the next one by a reference, not by an event, and so it does here.
"""

from collections.abc import Sequence


from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from memplan.models.trainable import Trainable
from memplan.spec.step import StepSpec
from memplan.step.precision import DTYPES
from memplan.step.sharding import Sharding


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
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not how.keep, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if not how.prefetch:
            for block in blocks:
                block.set_modules_to_backward_prefetch([block])  # itself, which is gathered by then
        super().__init__(step, model)
