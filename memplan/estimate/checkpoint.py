"""Checkpointed regions over the ledger: what runs again, when, and what a selective policy keeps.

Source: torch/utils/checkpoint.py (`_checkpoint_without_reentrant_generator`, `_recomputation_hook`,
`_CachingTorchDispatchMode`), torch 2.13.
"""

import re
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from memplan.estimate.offload import Offload
from memplan.estimate.tape import Holder, Shape, Tape, Tensor
from memplan.spec.checkpointing import Checkpointing

PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "grouped_mm", "grouped_mm_fallback")
)  # fmt: skip
ATTENTION = re.compile(r"_scaled_dot_product_\w*attention(_for_cpu)?|flex_attention")
DEAR = frozenset(("convolution", "upsample_bilinear2d"))
GROUPS = {"sdpa": ATTENTION.pattern, "matmul": "mm|bmm|addmm|baddbmm", "linear": "mm|addmm"}
DRAWS = frozenset(("native_dropout", "bernoulli"))


class StopRecomputation(Exception):
    """All that backward reads is there again."""


class Policy:
    """Which results of one call of a region are kept: attention, every second product, or what `ops` names."""

    def __init__(self, ops: tuple[str, ...]) -> None:
        self.kept = re.compile("|".join(GROUPS.get(name, name) for name in ops)) if ops else None
        self.again = False
        """Whether it is the recomputation that asks."""
        self.store: dict[str, list[list[Tensor]]] = defaultdict(list)
        self.num_products = [0, 0]

    def saves(self, op: str) -> bool:
        """Whether the results of this call of `op` are kept."""
        if op in DRAWS:
            return False
        if self.kept is not None:
            return self.kept.fullmatch(op) is not None
        if op in PRODUCTS:
            self.num_products[self.again] += 1
            return self.num_products[self.again] % 2 == 1
        return op in DEAR or ATTENTION.fullmatch(op) is not None

    def outputs(self, tape: Tape, op: str, outputs: tuple[tuple[Shape, str], ...]) -> list[Tensor]:
        """What `op` makes, or had made and kept."""
        saves = self.saves(op)
        if saves and self.again:
            return self.store[op].pop(0)
        made = [tape.new(op, shape, dtype) for shape, dtype in outputs]
        if saves:
            self.store[op].append([tensor.alias() for tensor in made])
        return made


class Frame:
    """One call of a region: its inputs, and what backward has made of it again."""

    def __init__(self, tape: Tape, function: Callable[..., Any], args: tuple[Any, ...], policy: Policy | None) -> None:
        self.function = function
        self.args = tuple(alias(arg) for arg in args)
        self.policy = policy
        self.autocast = tape.autocast
        self.part = tape.part
        self.num_saved = 0
        self.holders: list[weakref.ref[Holder]] = []
        """Places in forward's order; one is gone with its node."""
        self.again = False
        self.made: dict[int, Tensor] = {}

    def forward(self, tape: Tape, args: tuple[Any, ...]) -> Any:
        """Runs the region, keeping its inputs and what the policy says."""
        tape.frame, tape.policy = self, self.policy
        try:
            return self.function(*args)
        finally:
            tape.frame = tape.policy = None

    def pack(self, tensor: Tensor) -> Any:
        """What a node of the region holds: a place in forward, the tensor when it is made again."""
        number = self.num_saved
        self.num_saved += 1
        if not self.again:
            holder = Holder(self, number)
            self.holders.append(weakref.ref(holder))
            return holder
        if self.holders[number]() is not None:
            self.made[number] = tensor.alias()
        if number == self.total - 1:
            raise StopRecomputation
        return tensor.alias()

    def unpack(self, tape: Tape, number: int) -> Tensor:
        """A tensor that the region saved; the first time the region runs again."""
        if not self.again:
            self.run_again(tape)
        return self.made.pop(number)

    def run_again(self, tape: Tape) -> None:
        """Makes again what backward reads, up to the last of it."""
        self.again, self.total, self.num_saved = True, self.num_saved, 0
        before = tape.part, tape.autocast, tape.casts, tape.cast_others, tape.frame, tape.policy
        tape.mark("recompute")
        tape.part, tape.autocast, tape.casts, tape.cast_others = self.part, self.autocast, {}, []
        tape.frame, tape.policy, tape.grad_enabled = self, self.policy, True
        if self.policy is not None:
            self.policy.again = True
        try:
            self.function(*self.args)
        except StopRecomputation:
            pass
        finally:
            tape.grad_enabled = False
            tape.part, tape.autocast, tape.casts, tape.cast_others, tape.frame, tape.policy = before
            self.policy = None  # its contexts are over, and what they kept beyond that is let go
            tape.mark("backward")


def alias(value: Any) -> Any:
    """A tensor without its history, that still asks for a gradient; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(alias(one) for one in value)
    if not isinstance(value, Tensor):
        return value
    copy = value.alias()
    copy.requires_grad = value.requires_grad
    if copy.requires_grad:
        copy.node = LEAF
    return copy


def region(tape: Tape, function: Callable[..., Any], ops: tuple[str, ...] | None) -> Callable[..., Any]:
    """`function` checkpointed; `ops` is what a selective policy keeps, None without one."""

    def run(*args: Any) -> Any:
        if not tape.grad_enabled or tape.frame is not None:
            return function(*args)
        frame = Frame(tape, function, args, None if ops is None else Policy(ops))
        return frame.forward(tape, args)

    return run


class _Leaf:
    """The end of a recomputed graph, which no gradient ever reaches."""

    dtypes: tuple[str, ...] = ()
    edges: tuple[Any, ...] | list[Any] = ()


LEAF: Any = _Leaf()


def put_on(tape: Tape, blocks: list[Any], mode: Checkpointing, *, shares_kv: bool = False) -> None:
    """Puts `mode` on each of `blocks`, modules of one unit with their number in the stack."""
    if mode.kind == "offload":
        offload = Offload(tape)
        for _, block in blocks:
            block.around = offload.around(block)
    if mode.kind in ("none", "offload"):
        return
    ops = mode.ops if mode.kind == "selective" and not shares_kv else None
    for number, block in blocks:
        if not mode.treats(number):
            continue
        if mode.kind == "submodule" or shares_kv:
            for name, child in block.children().items():
                if child.parameters() and not (shares_kv and re.search(r"(^|_)(attn|attention)$", name)):
                    child.around = region(tape, child.forward, ops)
        else:
            block.around = region(tape, block.forward, ops)
