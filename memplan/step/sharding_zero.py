"""Optimizer state split over ranks (ZeRO-1), and gradients with it (ZeRO-2); parameters are whole on every rank.

Source: ZeRO (arXiv 1910.02054), section 5. Letters: `W` world size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memplan.models.trainable import Trainable
from memplan.spec.step import StepSpec
from memplan.step.sharding import Sharding

BUCKET_BYTES = 25 << 20
"""Most bytes of a bucket that holds more than one tensor, DDP's. Source: `_DEFAULT_FIRST_BUCKET_BYTES` and
`bucket_cap_mb`, torch/nn/parallel/distributed.py, torch 2.13."""

REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Their names since torch 2.13, and those before."""


class StateSharding(Sharding):
    """A rank of ZeRO-1: it steps on parameters of its own and gives them to the others.

    Gradients are whole and averaged in place after each chunk, where an average that is there already stays what it is:
    no second copy as in DDP's buckets. Leaves out the collectives' own buffers, which no allocator of torch's sees.
    """

    def __init__(self, step: StepSpec, model: Trainable) -> None:
        super().__init__(step, model)
        self.whole = self.params
        self.owners = owners([param.numel() for param in self.whole], step.world)
        rank = dist.get_rank()
        self.params = [param for param, owner in zip(self.whole, self.owners, strict=True) if owner == rank]

    @contextmanager
    def chunk(self, *, last: bool) -> Iterator[None]:
        """Averages every gradient in place."""
        yield
        for param in self.whole:
            if param.grad is not None:
                dist.all_reduce(param.grad.div_(self.world))

    @torch.no_grad()
    def finish(self) -> None:
        """Takes each parameter from the rank that updated it."""
        for param, owner in zip(self.whole, self.owners, strict=True):
            param.grad = None
            dist.broadcast(param.detach(), owner)


class GradientSharding(Sharding):
    """A rank of ZeRO-2: flat buckets of parameters, of whose gradients and states it keeps one W-th.

    Backward copies each gradient into its bucket's buffer and frees it; a full buffer is summed over the ranks, each of
    which keeps its part. After the step every rank gathers the parts of the parameters in place.
    """

    def __init__(self, step: StepSpec, model: Trainable) -> None:
        super().__init__(step, model)
        self.buckets = [Bucket(part, step.world) for part in dealt(self.params[::-1])]
        self.params = [bucket.shard for bucket in self.buckets]

    @contextmanager
    def chunk(self, *, last: bool) -> Iterator[None]:
        """Sums what is left over in buckets that were not filled."""
        yield
        for bucket in self.buckets:
            bucket.reduce()

    @torch.no_grad()
    def finish(self) -> None:
        """Takes the other ranks' parts of the parameters."""
        for bucket in self.buckets:
            ALL_GATHER(bucket.flat, bucket.shard.detach())


class Bucket:
    """Parameters that lie one behind the other in one storage, padded to a multiple of W."""

    def __init__(self, params: Sequence[nn.Parameter], world: int) -> None:
        first = params[0]
        sizes = [param.numel() for param in params]
        share = -(-sum(sizes) // world)
        with torch.no_grad():
            self.flat = torch.zeros(share * world, dtype=first.dtype, device=first.device)
            for param, part in zip(params, torch.split(self.flat, [*sizes, share * world - sum(sizes)]), strict=False):
                part.copy_(param.flatten())
                param.data = part.view(param.shape)
        self.world = world
        self.shard = nn.Parameter(self.flat.detach().narrow(0, share * dist.get_rank(), share))
        self.places = dict(zip(params, offsets(sizes), strict=True))
        self.waiting = len(params)
        self.buffer: Tensor | None = None
        for param in params:
            param.register_post_accumulate_grad_hook(self.take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def take(self, param: Tensor) -> None:
        """Moves the gradient of `param` into the buffer, which is made for the first and summed behind the last."""
        assert param.grad is not None
        if self.buffer is None:
            self.buffer = torch.zeros_like(self.flat)
        at = self.places[param]  # type: ignore[index]
        self.buffer.narrow(0, at, param.numel()).copy_(param.grad.flatten())
        param.grad = None
        self.waiting -= 1
        if not self.waiting:
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Adds this rank's part of the mean of all ranks' buffers to the shard's gradient."""
        if self.buffer is None:
            return
        part = torch.empty_like(self.shard)
        REDUCE_SCATTER(part, self.buffer)
        part.div_(self.world)
        self.buffer, self.waiting = None, len(self.places)
        if self.shard.grad is None:
            self.shard.grad = part
        else:
            self.shard.grad += part


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """The rank that steps on each parameter: the largest first, each to the rank that has least so far.

    Source: ZeroRedundancyOptimizer._partition_parameters, torch/distributed/optim/zero_redundancy_optimizer.py, 2.13.
    """
    loads, found = [0] * world, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        rank = loads.index(min(loads))
        found[index] = rank
        loads[rank] += sizes[index]
    return found


def dealt(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """`params` in their order, as many together as a bucket holds; one that is larger has a bucket to itself."""
    part: list[nn.Parameter] = []
    for param in params:
        full = sum(one.nbytes for one in part) + param.nbytes > BUCKET_BYTES
        if part and (full or param.dtype != part[0].dtype):
            yield part
            part = []
        part.append(param)
    yield part


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each of `sizes` begins when they lie one behind the other."""
    return [sum(sizes[:index]) for index in range(len(sizes))]
