"""torch's DistributedDataParallel: everything on every rank, gradients averaged in buckets.

Its C++ reducer runs as it is, on fake tensors too. One bucket holds all gradients at first; behind the first step they
are dealt anew into buckets of 1 and 25 MiB, in the order in which gradients come. Buckets stay for good, beside the
gradients, unless these are views into them. Source: Reducer::initialize_buckets and rebuild_buckets,
torch/csrc/distributed/c10d/reducer.cpp; DistributedDataParallel._ddp_init_helper, torch 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memplan.errors import MemplanError
from memplan.models.trainable import Trainable
from memplan.spec.step import StepSpec
from memplan.step.sharding import Sharding, is_fake


class DdpSharding(Sharding):
    """A rank of DDP. Only the last chunk's backward averages, over the gradients that all chunks have added up."""

    def __init__(self, step: StepSpec, model: Trainable) -> None:
        super().__init__(step, model)
        kind = FakeDdp if is_fake() else DistributedDataParallel
        self.ddp = kind(model, gradient_as_bucket_view=step.sharding.view, init_sync=not is_fake())
        self.module = self.ddp

    @contextmanager
    def chunk(self, *, last: bool) -> Iterator[None]:
        """Averages behind the last chunk. MemplanError where a parameter got no gradient: its bucket would wait."""
        waits: AbstractContextManager[object] = nullcontext() if last else self.ddp.no_sync()
        with waits:
            yield
        idle = sum(param.grad is None for param in self.params) if last and torch.is_grad_enabled() else 0
        if idle:
            raise MemplanError(
                f"{idle} parameters get no gradient, and DDP waits for them.",
                "Freeze what is not used: --freeze, or requires_grad_(False) in a module of your own.",
            )


class FakeDdp(DistributedDataParallel):
    """DDP in a world that is imagined, where a reduction gives a bucket back as it is."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.register_comm_hook(None, given_back)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with RealIndices():  # type: ignore[no-untyped-call]
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


def given_back(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch asks for this annotation, and gives no types of it
) -> torch.futures.Future[Tensor]:
    """The reduction of `bucket`, done: the result of a fake all-reduce has no tensor in it."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class RealIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes int32 tensors for real: the reducer writes the numbers of parameters into them when it deals buckets anew.

    Source: Reducer::sync_bucket_indices, torch/csrc/distributed/c10d/reducer.cpp, torch 2.13.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and options.get("dtype") is torch.int32:
            with _disable_current_modes():
                return func(*args, **options)
        return func(*args, **options)
