"""What one rank of a step over several devices holds and sends, over the ledger.

Letters: `W` world size. Source: torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`, `_fsdp_collectives.py`),
torch/csrc/distributed/c10d/reducer.cpp, torch 2.13; ZeRO (arXiv 1910.02054). Checked:
tests/estimate/test_sharding_estimated.py, against the trace of the same rank.

Known limits: reserved memory of the streams that gather and reduce is not known; ZeRO-2's buckets are dealt over the
blocks that run, each of which stands for its equals.
"""

from collections.abc import Callable
from typing import Any

from memplan.estimate.ops import to
from memplan.estimate.setup import DTYPES
from memplan.estimate.tape import Parameter, Shape, Storage, Tape, Tensor
from memplan.spec.step import StepSpec

BUCKET_BYTES = 25 << 20
"""Most bytes of a bucket of several gradients. Source: bucket_cap_mb, torch/nn/parallel/distributed.py, torch 2.13."""


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

    def leave(self) -> None:
        """A forward has come to the model's end."""

    def around(self, module: Any, call: Callable[[Any, Tensor], Tensor], x: Tensor) -> Tensor:
        """A block's call."""
        return call(module, x)

    def repeat(self, modules: list[Any]) -> None:
        """Backward of the blocks that `modules` speak for: their gradients are there now."""
        for module in modules:
            for one in module.parameters():
                if one.requires_grad and one.others is None and one.copies > 1:
                    one.others = self.tape.allocate(
                        "gradient", one.shape, one.dtype, category="grads", copies=one.copies - 1
                    )

    def finish_backward(self) -> None:
        """Backward is over."""

    def finish_step(self) -> None:
        """The optimizer has stepped."""


class Ddp(Sharding):
    """Everything on every rank; gradients in buckets that stay, beside themselves or as views into them."""

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """Makes the buckets."""
        for one in trainable:
            if not one.idle:
                bucket = self.tape.allocate("bucket", one.shape, one.dtype, category="comm", copies=one.copies)
                self.tape.kept.append(bucket)
        return trainable

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
        return [share(one, one.shape, one.dtype, copies=count) for one, count in owned.items() if count]

    def finish_backward(self) -> None:
        """Shows the owned parameters their gradients."""
        # They are the whole ones, which `finish_step` lets go.

    def finish_step(self) -> None:
        """Lets all gradients go."""
        for one in self.whole:
            one.grad = one.others = None


class GradientSharding(Sharding):
    """ZeRO-2: gradients move into the buffer of their bucket, of which one W-th stays."""

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """Deals the buckets, in the reverse of the parameters' order."""
        self.shares: dict[Parameter, Parameter] = {
            one: share(one, (-(-one.numel // self.world),), one.dtype) for one in trainable
        }
        self.bucket_of: dict[Parameter, int] = {}
        self.buckets: list[list[Parameter]] = []
        size = 0
        for one in reversed(trainable):
            num_bytes = one.numel * one.width
            if not self.buckets or size + num_bytes > BUCKET_BYTES:
                self.buckets.append([])
                size = 0
            size += num_bytes
            self.bucket_of[one] = len(self.buckets) - 1
            self.buckets[-1].append(one)
        self.buffers: dict[int, tuple[Storage, set[Parameter]]] = {}
        self.tape.on_grad = self.take
        return list(self.shares.values())

    def take(self, one: Parameter) -> None:
        """Moves a gradient into its bucket's buffer, and sums that up where it is full."""
        number = self.bucket_of[one]
        if number not in self.buffers:
            numel = sum(member.numel for member in self.buckets[number])
            self.buffers[number] = (self.tape.allocate("zeros", (numel,), one.dtype, category="comm"), set())
        self.buffers[number][1].add(one)
        one.grad = None
        if len(self.buffers[number][1]) == len(self.buckets[number]):
            self.reduce(number)

    def reduce(self, number: int) -> None:
        """Keeps this rank's part of a buffer."""
        for one in self.buckets[number]:
            mine = self.shares[one]
            if mine.grad is None:
                mine.grad = self.tape.new("reduce_scatter", mine.shape, mine.dtype, category="grads")
        del self.buffers[number]

    def repeat(self, modules: list[Any]) -> None:
        """One W-th of the other copies' gradients."""
        for mine in (self.shares.get(one) for module in modules for one in module.parameters()):
            if mine is not None and mine.others is None and mine.copies > 1:
                mine.others = self.tape.allocate(
                    "reduce_scatter", mine.shape, mine.dtype, category="grads", copies=mine.copies - 1
                )

    def finish_backward(self) -> None:
        """Sums what is left over."""
        for number in list(self.buffers):
            self.reduce(number)


class Group:
    """Parameters that FSDP2 gathers and reduces together: those of a block, or what the root holds itself."""

    def __init__(self, sharding: "Fsdp", parameters: list[Parameter]) -> None:
        self.sharding = sharding
        self.parameters = parameters
        self.shares = {one: sharding.shares[one] for one in parameters}
        self.flat: Storage | None = None
        self.whole: list[Storage] = []
        self.done = True

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return sum(share.numel for share in self.shares.values())

    def gather(self) -> None:
        """Sends for the other ranks' parts, into a buffer of all of them."""
        if self.whole or self.flat is not None:
            return
        tape, how, copies = self.sharding.tape, self.sharding.how, []
        if how.offload:
            copies += [tape.allocate("copy", one.shape, one.dtype) for one in self.shares.values()]
        dtype = self.parameters[0].dtype
        if any(one.dtype != dtype for one in self.shares.values()):
            copies.append(tape.allocate("to", (self.numel,), dtype))
        self.flat = tape.allocate("all_gather", (self.numel * self.sharding.world,), dtype, category="comm")
        copies.clear()

    def wait(self) -> None:
        """Puts the parts into whole parameters; the buffer is the caller's to let go."""
        tape, world = self.sharding.tape, self.sharding.world
        if not self.whole:
            self.whole = [
                tape.allocate("unsharded", (share.numel * world,), one.dtype, category="comm")
                for one, share in self.shares.items()
            ]

    def reduce(self) -> None:
        """Sums the gradients over the ranks, of which this one keeps its part."""
        self.done = True
        grads = [one for one in self.parameters if one.grad is not None]
        if not grads:
            return
        tape, sharding = self.sharding.tape, self.sharding
        dtype = sharding.reduce_dtype or grads[0].dtype
        numel = sum(self.shares[one].numel for one in grads)
        sharding.reducing = None
        buffer = tape.allocate("reduce_scatter_input", (numel * sharding.world,), dtype, category="comm")
        last = grads[-1].grad
        for one in grads:
            one.grad = None
        out = tape.new("reduce_scatter", (numel,), dtype, category="grads")
        del last
        stored = self.shares[grads[0]].dtype
        if stored != dtype:
            out = tape.new("to", (numel,), stored, category="grads")
        sharding.reducing = buffer
        if sharding.how.offload:
            return
        for one in grads:
            mine = self.shares[one]
            if mine.grad is None:
                mine.grad = out.alias(mine.shape)


class Fsdp(Sharding):
    """FSDP2: parameters, gradients and states split by rows; a block's parameters are whole while it runs."""

    def __init__(self, tape: Tape, step: StepSpec) -> None:
        super().__init__(tape, step)
        self.param_dtype = DTYPES.get(self.how.param_dtype, "")
        self.reduce_dtype = DTYPES.get(self.how.reduce_dtype, "")
        self.shares: dict[Parameter, Parameter] = {}
        self.gathered: Storage | None = None
        self.reducing: Storage | None = None
        self.forward_done = False
        self.groups: dict[int, Group] = {}
        self.order: list[Group] = []

    def parameter(self, shape: Shape, dtype: str, copies: int) -> tuple[Storage, str]:
        """This rank's rows, which wait on the host where they are offloaded."""
        rows = (0,) if self.how.offload else self.part_of(shape)
        storage = self.tape.allocate("parameter", rows, dtype, category="params", copies=copies)
        return storage, self.param_dtype or dtype

    def part_of(self, shape: Shape) -> Shape:
        """A rank's rows of a parameter, padded."""
        return (-(-shape[0] // self.world), *shape[1:])

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """Groups the parameters: each block's, and the root's."""
        stored = self.tape.setup.dtype
        self.shares = {one: share(one, self.part_of(one.shape), stored) for one in self.tape.parameters}
        inside: set[Parameter] = set()
        for module in self.tape.blocks:
            group = Group(self, module.parameters())
            inside.update(group.parameters)
            self.groups[id(module)] = group
            self.order.append(group)
        self.root = Group(self, [one for one in self.tape.parameters if one not in inside])
        return [] if self.how.offload else [self.shares[one] for one in trainable]

    def enter(self) -> None:
        """Gathers the root, which stays whole to the end of backward."""
        self.root.gather()
        self.root.wait()
        self.gathered, self.root.flat = self.root.flat, None

    def leave(self) -> None:
        """Lets the last buffer go."""
        self.gathered = None

    def around(self, module: Any, call: Callable[[Any, Tensor], Tensor], x: Tensor) -> Tensor:
        """Gathers a block's parameters for its call, lets them go, and again in backward."""
        group = self.groups[id(module)]
        group.gather()
        group.wait()
        self.gathered, group.flat = group.flat, None
        if self.param_dtype:
            x = to(x, self.param_dtype)
        x = self.noted("post_backward", x, group)
        x = call(module, x)
        if not (self.how.keep or (self.how.keep_last and group is self.order[-1])):
            group.whole.clear()
        group.done = False
        return self.noted("pre_backward", x, group)

    def noted(self, name: str, x: Tensor, group: Group) -> Tensor:
        """`x` behind a node that tells when its gradient is there."""
        act = self.after if name == "post_backward" else self.before

        def backward(node: Any, saved: list[Any], grads: list[Any]) -> list[Any]:
            act(group)
            return list(grads)

        node = self.tape.record(name, (x,), backward)
        return x if node is None else self.tape.link(node, x.alias())

    def before(self, group: Group) -> None:
        """A block's backward begins: its parameters are whole again, and the block before it is sent for."""
        group.gather()
        group.wait()
        group.flat = None
        if self.how.prefetch and (number := self.order.index(group)) > 0:
            self.order[number - 1].gather()

    def after(self, group: Group) -> None:
        """A block's backward is over."""
        group.whole.clear()
        group.reduce()

    def repeat(self, modules: list[Any]) -> None:
        """A rank's part of the other copies' gradients."""
        if self.how.offload:
            return
        for one in [one for module in modules for one in module.parameters()]:
            mine = self.shares[one]
            if one.requires_grad and mine.others is None and mine.copies > 1:
                mine.others = self.tape.allocate(
                    "reduce_scatter", mine.shape, mine.dtype, category="grads", copies=mine.copies - 1
                )

    def finish_backward(self) -> None:
        """Reduces what no input's gradient told of, and the root."""
        for group in self.order:
            if not group.done:
                self.after(group)
            group.flat = None
        self.after(self.root)
        self.reducing = None


def share(one: Parameter, shape: Shape, dtype: str, *, copies: int | None = None) -> Parameter:
    """What a rank holds of a parameter, in the same storage."""
    mine = Parameter(
        one.storage, shape, dtype, name=one.name, component=one.component, copies=one.copies if copies is None else copies
    )
    mine.requires_grad = one.requires_grad
    return mine


KINDS: dict[str, type[Sharding]] = {
    "single": Sharding, "ddp": Ddp, "zero1": StateSharding, "zero2": GradientSharding, "fsdp2": Fsdp,
}  # fmt: skip
"""By the kinds of `spec.parallel`."""


def make_sharding(tape: Tape, step: StepSpec) -> Sharding:
    """This rank's share of a step."""
    return KINDS[step.sharding.kind](tape, step)


