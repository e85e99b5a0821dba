"""A step spread over devices: what one rank holds, and what it sends to the others.

Every kind uses torch's own code where there is any, so that a rank of a trace allocates what a rank of a real step
does. Letters: `W` world size.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memplan.errors import MemplanError
from memplan.models.blocks import find_blocks
from memplan.models.trainable import Trainable
from memplan.spec.step import StepSpec

FAKE = "fake"
"""torch's process group whose collectives return at once and move nothing."""


class Sharding:
    """One rank of a step. This one is alone: nothing is shared out."""

    def __init__(self, step: StepSpec, model: Trainable) -> None:
        self.world = step.world
        """W."""
        self.module: nn.Module = model
        """What forward calls."""
        self.params: list[nn.Parameter] = [param for param in model.parameters() if param.requires_grad]
        """What the optimizer of this rank steps on."""
        self.kept: Sequence[Tensor] = ()
        """Parameters that wait on the host, where their optimizer runs."""
        self.on_host: Callable[[Tensor], None] | None = None
        """Who hears that a gradient was copied to the host: a trace, to which all memory looks alike."""

    def chunk(self, *, last: bool) -> AbstractContextManager[object]:
        """Forward and backward of one chunk run inside; gradients of the step are whole behind the `last` one."""
        return nullcontext()

    def finish(self) -> None:
        """What follows the optimizer's step: parameters that other ranks updated, and gradients released."""


def make_sharding(step: StepSpec, model: Trainable) -> Sharding:
    """This rank's share of `model`, which is changed in place; make the optimizer behind it.

    MemplanError where this process is not one of `step.world`.
    """
    kind = step.sharding.kind
    if kind == "single":
        return Sharding(step, model)
    if not dist.is_initialized() or dist.get_world_size() != step.world:
        raise MemplanError(
            f"parallel {kind} over {step.world} devices needs as many processes.",
            "Trace one of them: memplan trace, or a ladder with --device simulated.",
        )
    if kind == "ddp":
        from memplan.step.sharding_ddp import DdpSharding

        return DdpSharding(step, model)
    if kind == "fsdp2":
        from memplan.step.sharding_fsdp import FsdpSharding

        return FsdpSharding(step, model, list(find_blocks(model, step.blocks).values()))
    from memplan.step.sharding_zero import GradientSharding, StateSharding

    return StateSharding(step, model) if kind == "zero1" else GradientSharding(step, model)


@contextmanager
def fake_world(world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world`, the others being imagined; nothing changes where there are none.

    Source: torch/testing/_internal/distributed/fake_pg.py, torch 2.13.
    """
    if world == 1:
        yield
        return
    if not dist.is_available():
        raise MemplanError(f"torch {torch.__version__} was built without torch.distributed.")
    if dist.is_initialized():
        raise MemplanError("This process already is part of a world.", "Trace in a process of its own.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts one in its place that says the rank
    dist.init_process_group(FAKE, rank=0, world_size=world, store=FakeStore())
    try:
        with unheard_shapes():
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def is_fake() -> bool:
    """Whether the other ranks are imagined."""
    return bool(dist.get_backend() == FAKE)


@contextmanager
def unheard_shapes() -> Iterator[None]:
    """Inside, DTensor works out the shapes of its ops' results outside of every dispatch mode.

    It does so once an op by running it on fake tensors as large as the whole of what is shared out, which a recorder
    would take for memory. Source: ShardingPropagator, torch/distributed/tensor/_sharding_prop.py, torch 2.13.
    """
    from torch.distributed.tensor import _sharding_prop

    kind: Any = _sharding_prop.ShardingPropagator
    plain = kind.propagate_op_sharding_non_cached

    def unheard(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return plain(self, *args, **kwargs)

    kind.propagate_op_sharding_non_cached = unheard
    try:
        yield
    finally:
        kind.propagate_op_sharding_non_cached = plain
