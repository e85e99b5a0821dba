"""A rank of FSDP2 over the ledger: parameters, gradients and states split by rows.

Source: torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`, `_fsdp_collectives.py`), torch 2.13. Checked:
tests/estimate/test_sharding_estimated.py.
"""

from collections.abc import Callable
from typing import Any

from memplan.errors import MemplanError
from memplan.estimate.offload import host_size
from memplan.estimate.optimizers import OPTIMIZERS, is_matrix
from memplan.estimate.setup import DTYPES
from memplan.estimate.sharding import Ddp, GradientSharding, Sharding, StateSharding, share
from memplan.estimate.tape import Parameter, Shape, Storage, Tape, Tensor
from memplan.estimate.update import Masters
from memplan.estimate.views import FLOATS, to
from memplan.spec.parallel import MIXED
from memplan.spec.step import StepSpec


class Group:
    """Parameters that FSDP2 gathers and reduces together: those of a block, or what the root holds itself, blocks that
    are no groups of their own with all that they speak for."""

    def __init__(self, sharding: "Fsdp", parameters: list[Parameter], *, root: bool = False) -> None:
        self.sharding = sharding
        self.parameters = parameters
        self.copies = {one: one.copies if root else 1 for one in parameters}
        self.shares = {one: sharding.shares[one] for one in parameters}
        self.flat: Storage | None = None
        self.whole: list[Storage] = []
        self.done = True

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return self.part_of(self.parameters)

    def part_of(self, parameters: list[Parameter]) -> int:
        """Elements of this rank's part of some of them."""
        return sum(self.shares[one].numel * self.copies[one] for one in parameters)

    def gather(self) -> None:
        """Sends for the other ranks' parts, into a buffer of all of them."""
        if self.whole or self.flat is not None:
            return
        tape, how, copies = self.sharding.tape, self.sharding.how, []
        if how.offload:
            copies += [
                tape.allocate("copy", mine.shape, mine.dtype, copies=self.copies[one])
                for one, mine in self.shares.items()
            ]
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
                tape.allocate("unsharded", (mine.numel * world,), one.dtype, category="comm", copies=self.copies[one])
                for one, mine in self.shares.items()
            ]

    def reduce(self) -> None:
        """Sums the gradients over the ranks, of which this one keeps its part."""
        self.done = True
        grads = [one for one in self.parameters if one.grad is not None]
        if not grads:
            return
        tape, sharding = self.sharding.tape, self.sharding
        dtype = sharding.reduce_dtype or grads[0].dtype
        numel = self.part_of(grads)
        sharding.reducing = None
        buffer = tape.allocate("reduce_scatter_input", (numel * sharding.world,), dtype, category="comm")
        last = grads[-1].grad
        for one in grads:
            one.grad = one.others = None
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
            if self.copies[one] > 1:
                mine.others = out.storage


class Fsdp(Sharding):
    """FSDP2: parameters, gradients and states split by rows; a block's parameters are whole while it runs."""

    def __init__(self, tape: Tape, step: StepSpec) -> None:
        super().__init__(tape, step)
        self.step = step
        self.param_dtype = DTYPES.get(self.how.param_dtype, "")
        self.reduce_dtype = DTYPES.get(self.how.reduce_dtype, "")
        self.shares: dict[Parameter, Parameter] = {}
        self.dtypes: dict[int, str] = {}
        """Of parameters as they are trained, by their first storage."""
        self.gathered: Storage | None = None
        self.reducing: Storage | None = None
        self.forward_done = False
        self.groups: dict[int, Group] = {}
        self.order: list[Group] = []
        self.ran: list[Group] = []
        """In the order of this forward."""

    def parameter(self, shape: Shape, dtype: str, copies: int) -> tuple[Storage, str]:
        """The whole of it until the model is there."""
        storage = self.tape.allocate("parameter", shape, dtype, category="params", copies=copies)
        self.dtypes[storage.index] = dtype
        return storage, self.param_dtype or dtype

    def part_of(self, shape: Shape) -> Shape:
        """A rank's rows of a parameter, padded."""
        return (-(-shape[0] // self.world), *shape[1:])

    def prepare(self, trainable: list[Parameter]) -> list[Parameter]:
        """Groups the parameters: each block's, and the root's."""
        for module in self.tape.blocks:
            self.groups[id(module)] = self.group(module.parameters())
            self.order.append(self.groups[id(module)])
        self.root = self.group([one for one in self.tape.parameters if one not in self.shares], root=True)
        if self.step.optimizer == "muon":
            self.how.check_rows(self.world, [one.shape for one in trainable if is_matrix(one)])
        if not self.how.offload:
            return [self.shares[one] for one in trainable]
        self.tape.offloaded_bytes = offloaded_bytes(self.step, list(self.shares.values()))
        return []

    def group(self, parameters: list[Parameter], *, root: bool = False) -> Group:
        """`parameters`, of each of which this rank's rows stay on the device or go to the host."""
        tape, stored = self.tape, self.tape.setup.dtype
        if len({self.dtypes[one.storage.index] for one in parameters if one.requires_grad}) > 1:
            raise MemplanError(*MIXED)
        for one in parameters:
            rows = self.part_of(one.shape)
            stays = (0,) if self.how.offload else rows  # or goes to the host
            one.storage = tape.allocate("parameter", stays, stored, category="params", copies=one.copies)
            self.shares[one] = share(one, rows, stored)
        return Group(self, parameters, root=root)

    def enter(self) -> None:
        """Gathers the root, which stays whole to the end of backward."""
        self.ran = []
        self.root.gather()
        self.root.wait()
        self.gathered, self.root.flat = self.root.flat, None

    def leave(self, x: Tensor) -> Tensor:
        """Lets the last buffer go; backward begins with the root, which sends for the last block."""
        self.gathered = None
        return self.noted("pre_backward", x, self.root)

    def around(self, module: Any, call: Callable[[Any, Tensor], Tensor], x: Tensor) -> Tensor:
        """Gathers a block's parameters for its call, lets them go, and again in backward."""
        group = self.groups.get(id(module))
        if group is None:  # the root's
            return call(module, x)
        self.ran.append(group)
        group.gather()
        group.wait()
        self.gathered, group.flat = group.flat, None
        if self.param_dtype:
            x = to(x, self.param_dtype)
        x = self.noted("post_backward", x, group)
        before, run = module.around, module.around or module.forward
        if self.param_dtype:
            module.around = lambda *args: run(*self.cast(args))
        x = call(module, x)
        module.around = before
        if not (self.how.keep or (self.how.keep_last and group is self.order[-1])):
            group.whole.clear()
        group.done = False
        return self.noted("pre_backward", x, group)

    def cast(self, value: Any) -> Any:
        """What a block takes, masks and tables too, in the dtype that it computes in."""
        if isinstance(value, tuple):
            return tuple(self.cast(one) for one in value)
        return to(value, self.param_dtype) if isinstance(value, Tensor) and value.dtype in FLOATS else value

    def noted(self, name: str, x: Tensor, group: Group) -> Tensor:
        """`x` behind a node that tells when its gradient is there."""
        act = self.after if name == "post_backward" else self.before

        def backward(node: Any, saved: list[Any], grads: list[Any]) -> list[Any]:
            act(group)
            return list(grads)

        node = self.tape.record(name, (x,), backward)
        return x if node is None else self.tape.link(node, x.alias())

    def before(self, group: Group) -> None:
        """A block's backward begins: its parameters are whole again, and the block before it is sent for, as the last
        one is by the root, which memplan.step.sharding_fsdp never forbids to."""
        group.gather()
        group.wait()
        group.flat = None
        before = self.ran[: len(self.ran) if group is self.root else self.ran.index(group)]
        if before and (self.how.prefetch or group is self.root):
            before[-1].gather()

    def after(self, group: Group) -> None:
        """A block's backward is over."""
        group.whole.clear()
        group.reduce()

    def repeat(self, modules: list[Any]) -> None:
        """A rank's part of the other copies' gradients; all of them where they wait for the root."""
        super().repeat([module for module in modules if id(module) not in self.groups])
        if self.how.offload:
            return
        grouped = [module for module in modules if id(module) in self.groups]
        for one in [one for module in grouped for one in module.parameters()]:
            mine = self.shares[one]
            if one.requires_grad and mine.others is None and mine.copies > 1:
                mine.others = self.tape.allocate(
                    "reduce_scatter", mine.shape, mine.dtype, category="grads", copies=mine.copies - 1, rest=True
                )

    def finish_backward(self) -> None:
        """Reduces what no input's gradient told of, and the root."""
        for group in self.order:
            if not group.done:
                self.after(group)
            group.flat = None
        self.after(self.root)
        self.reducing = None


def offloaded_bytes(step: StepSpec, shares: list[Parameter]) -> int:
    """Bytes of a rank's parameters and gradients, which are pinned, and of what the host's optimizer keeps for them."""
    host = Tape("cpu")
    pinned = [host_size(one.numel * one.width, pinned=True) * one.copies * (1 + one.requires_grad) for one in shares]
    stepped = [share(one, one.shape, one.dtype) for one in shares if one.requires_grad and not one.idle]
    if step.has_masters:
        stepped = Masters(host, stepped).copies
    OPTIMIZERS[step.optimizer](host, stepped)
    return sum(pinned) + sum(alloc.num_bytes for alloc in host.allocs)


KINDS: dict[str, type[Sharding]] = {
    "single": Sharding, "ddp": Ddp, "zero1": StateSharding, "zero2": GradientSharding, "fsdp2": Fsdp,
}  # fmt: skip
"""By the kinds of `spec.parallel`."""


def make_sharding(tape: Tape, step: StepSpec) -> Sharding:
    """This rank's share of a step."""
    return KINDS[step.sharding.kind](tape, step)
