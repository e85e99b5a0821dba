"""What one rank of a step over several devices holds and sends, over the ledger.

Letters: `W` world size. Source: torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`, `_fsdp_collectives.py`),
torch/csrc/distributed/c10d/reducer.cpp, torch 2.13; ZeRO (arXiv 1910.02054). Checked:
tests/estimate/test_sharding_estimated.py, against the trace of the same rank.

Known limits: reserved memory of the streams that gather and reduce is not known.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from memplan.estimate.tape import Parameter, Shape, Storage, Tape, Tensor
from memplan.spec.step import StepSpec

BUCKET_BYTES = 25 << 20
"""Bytes at which a bucket is full. Source: bucket_cap_mb, torch/nn/parallel/distributed.py, torch 2.13."""
FIRST_BUCKET_BYTES = 1 << 20
"""The same of DDP's first one. Source: compute_bucket_assignment_by_size, torch/csrc/distributed/c10d/reducer.cpp."""


class Sharding:
    """One rank of a step. This one is alone."""

    def __init__(self, tape: Tape, step: StepSpec) -> None:
        self.tape = tape
        self.world = step.world
        self.how = step.sharding

    def parameter(self, shape: Shape, dtype: str, copies: int) -> tuple[Storage, str]:
        """Memory of a parameter on this rank, and the dtype that it is computed with."""
        return self.tape.allocate("parameter", shape, dtype, category="params", copies=copies), dtype

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """What the optimizer of this rank steps on, once the model is built."""
        return trainable

    def begin_chunk(self, *, last: bool) -> None:
        """A chunk begins, the step's last one or another."""

    def enter(self) -> None:
        """A forward begins."""

    def leave(self, x: Tensor) -> Tensor:
        """A forward has come to the model's end with `x`."""
        return x

    def around(self, module: Any, call: Callable[[Any, Tensor], Tensor], x: Tensor) -> Tensor:
        """A block's call."""
        return call(module, x)

    def repeat(self, modules: list[Any]) -> None:
        """Backward of the blocks that `modules` speak for: their gradients are there now."""
        for module in modules:
            for one in module.parameters():
                if one.requires_grad and one.others is None and one.copies > 1:
                    one.others = self.tape.allocate(
                        "gradient", one.shape, one.dtype, category="grads", copies=one.copies - 1, rest=True
                    )

    def finish_backward(self) -> None:
        """Backward is over."""

    def finish_step(self) -> None:
        """The optimizer has stepped."""


class Ddp(Sharding):
    """Everything on every rank; gradients in buckets that stay, beside themselves or as views into them."""

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """Makes the buckets, in the reverse of the parameters' order, in which gradients come but for a few: the first
        of a dtype is full at 1 MiB."""
        waiting: dict[str, int] = {}
        full_at: dict[str, int] = {}
        for one in [*every(trainable)][::-1]:
            if not one.idle:
                waiting[one.dtype] = waiting.get(one.dtype, 0) + one.numel
                if waiting[one.dtype] * one.width >= full_at.get(one.dtype, FIRST_BUCKET_BYTES):
                    self.make(waiting.pop(one.dtype), one.dtype)
                    full_at[one.dtype] = BUCKET_BYTES
        for dtype, num in waiting.items():
            self.make(num, dtype)
        return trainable

    def make(self, num: int, dtype: str) -> None:
        """Makes the bucket of so many gradients' elements."""
        self.tape.kept.append(self.tape.allocate("bucket", (num,), dtype, category="comm"))

    def begin_chunk(self, *, last: bool) -> None:
        """Gradients become views in the backward that averages them, the last one's."""
        self.tape.on_grad = self.moved if self.how.view and last else None

    def moved(self, parameter: Parameter) -> None:
        """Leaves a gradient in its bucket alone."""
        parameter.grad = Tensor(parameter.storage, parameter.shape, parameter.dtype)
        parameter.others = None

    def repeat(self, modules: list[Any]) -> None:
        """Nothing beside the buckets where gradients are views."""
        if self.tape.on_grad is None:
            super().repeat(modules)


class StateSharding(Sharding):
    """ZeRO-1: an optimizer for the parameters that this rank owns."""

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """Rank 0's part, as ZeroRedundancyOptimizer deals it: the largest first, each to the rank with least."""
        self.whole = trainable
        loads, owned = [0] * self.world, dict.fromkeys(trainable, 0)
        each = [one for one in trainable for _ in range(one.copies)]
        for one in sorted(each, key=lambda one: -one.numel):
            rank = loads.index(min(loads))
            loads[rank] += one.numel
            owned[one] += rank == 0
        self.shares = {one: share(one, one.shape, one.dtype, copies=count) for one, count in owned.items() if count}
        return list(self.shares.values())

    def begin_chunk(self, *, last: bool) -> None:
        """Gradients are whole behind the `last` one."""
        self.last = last

    def finish_backward(self) -> None:
        """Gives this rank's part the gradients of what it owns."""
        for one, mine in self.shares.items() if self.last else ():
            mine.grad, one.grad = one.grad, None
            if one.others is not None:
                one.others, rest = None, (mine.copies - 1, one.copies - mine.copies)
                mine.others, one.others = (
                    self.tape.allocate("gradient", one.shape, one.dtype, category="grads", copies=num, rest=True)
                    if num
                    else None
                    for num in rest
                )

    def finish_step(self) -> None:
        """Lets the other gradients go."""
        for one in self.whole:
            one.grad = one.others = None


class GradientSharding(Sharding):
    """ZeRO-2: parameters lie in buckets one behind the other; gradients move into the buffer of their bucket, of which
    one W-th stays."""

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """Deals the buckets, in the reverse of the parameters' order, those of all blocks."""
        self.buckets: list[Bucket] = []
        self.homes: dict[Parameter, list[Bucket]] = {one: [] for one in trainable}
        part: list[Parameter] = []
        for one in [*every(trainable)][::-1]:
            full = sum(other.numel * other.width for other in part) + one.numel * one.width > BUCKET_BYTES
            if part and (full or one.dtype != part[0].dtype):
                self.make(part)
                part = []
            part.append(one)
        if part:
            self.make(part)
        self.tape.on_grad = self.take
        return [bucket.shard for bucket in self.buckets]

    def make(self, part: list[Parameter]) -> None:
        """Makes the bucket of `part`."""
        bucket = Bucket(self.tape, part, self.world)
        self.buckets.append(bucket)
        for one in part:
            self.homes[one].append(bucket)

    def begin_chunk(self, *, last: bool) -> None:
        """No gradient has come yet."""
        self.next_home = {one: iter(homes) for one, homes in self.homes.items()}

    def take(self, one: Parameter) -> None:
        """Moves a gradient into its bucket's buffer."""
        next(self.next_home[one]).take(one)

    def repeat(self, modules: list[Any]) -> None:
        """The gradients of the other copies come and go, those of the last block first."""
        own = [one for module in modules for one in module.parameters() if one in self.homes and not one.idle]
        for _ in range(own[0].copies - 1 if own else 0):
            for one in reversed(own):
                self.take(one)

    def finish_backward(self) -> None:
        """Sums what is left over."""
        for bucket in self.buckets:
            bucket.reduce()


class Bucket:
    """Parameters of one dtype in one storage, padded to a multiple of W."""

    def __init__(self, tape: Tape, part: list[Parameter], world: int) -> None:
        dtype, rows = part[0].dtype, -(-sum(one.numel for one in part) // world)
        self.size = self.waiting = len(part)
        self.shape: Shape = (rows * world,)
        values = tape.allocate("zeros", self.shape, dtype, category="params")
        for one in part:
            one.storage = values
        self.shard = share(part[0], (rows,), dtype, copies=1)
        self.shard.idle = all(one.idle for one in part)
        self.buffer: Storage | None = None

    def take(self, one: Parameter) -> None:
        """Moves the gradient of `one` into the buffer, which is made for the first and summed behind the last."""
        if self.buffer is None:
            self.buffer = self.shard.tape.allocate("zeros", self.shape, one.dtype, category="comm")
        one.grad = None
        self.waiting -= 1
        if not self.waiting:
            self.reduce()

    def reduce(self) -> None:
        """Keeps this rank's part of the buffer."""
        if self.buffer is None:
            return
        mine = self.shard
        part = mine.tape.new("reduce_scatter", mine.shape, mine.dtype, category="grads")
        self.buffer, self.waiting = None, self.size
        if mine.grad is None:
            mine.grad = part


def every(trainable: list[Parameter]) -> Iterator[Parameter]:
    """Parameters in the order of the whole model, in which those of equal blocks come again and again."""
    for copies, row in groupby(trainable, key=lambda one: one.copies):
        yield from [*row] * copies


def share(one: Parameter, shape: Shape, dtype: str, *, copies: int | None = None) -> Parameter:
    """What a rank holds of a parameter, in the same storage."""
    mine = Parameter(
        one.storage,
        shape,
        dtype,
        name=one.name,
        component=one.component,
        copies=one.copies if copies is None else copies,
    )
    mine.requires_grad, mine.idle = one.requires_grad, one.idle
    return mine
