"""Selective checkpointing: within a block, keep the results of some ops and run the others again.

The standing policy keeps what is dear to compute: attention, collectives and every second matrix product; everything
else runs again. Products are counted separately in forward and in the recomputation, so that both decide alike
whatever number of them a block has.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memplan.errors import MemplanError, near_names
from memplan.step.mutation import tensors, written
from memplan.step.region import Contexts

TORCH_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "linear",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
)
OWN_PRODUCTS = ("grouped_mm", "grouped_mm_fallback")  # memplan's and transformers' ops, for dtypes that torch's refuses
PRODUCTS = frozenset((*TORCH_PRODUCTS, *OWN_PRODUCTS))
"""Matrix products and grouped ones, of which every second is kept."""
ATTENTION = re.compile(
    r"_scaled_dot_product_\w*attention(_for_cpu|_overrideable)?|_(flash|efficient|cudnn)_attention_forward"
    r"|flex_attention|_varlen_attn"
)
"""Attention kernels, which are kept. Source: native_functions.yaml, torch 2.13, and torch's higher-order op."""
COLLECTIVES = re.compile(r"(all_gather|reduce_scatter|all_reduce|all_to_all)\w*")
"""Collectives of `_c10d_functional`, which are kept: a second call would wait for the other devices again."""
DEAR = frozenset(("convolution", "convolution_backward", "upsample_bilinear2d"))
"""Other ops that are dear to compute, for a torch whose partitioner does not list them."""
GROUPS = {"sdpa": ATTENTION.pattern, "matmul": "mm|bmm|addmm|baddbmm", "linear": "mm|addmm"}
"""Words for several ops: any attention kernel, and what torch makes of products of more dimensions."""

SAVE, RECOMPUTE, ALTERNATE = "SAVE", "RECOMPUTE", "ALTERNATE"


def selective_contexts(ops: tuple[str, ...] = ()) -> Callable[[], Contexts]:
    """What makes the contexts of one call of a region: of the standing policy, or of one that keeps just `ops`, aten
    names without overload. MemplanError where a name is no op that can be kept."""
    for name in ops:
        check_name(name)
    return partial(policy_contexts, ops)


def policy_contexts(ops: tuple[str, ...]) -> Contexts:
    """Contexts of one call, with counters of its own."""
    return create_selective_checkpoint_contexts(Policy(ops))  # type: ignore[no-untyped-call]  # torch gives it no types


class Policy:
    """Which results of one call of a region are kept: asked about each op in turn.

    An op of the region that writes to a kept result raises MemplanError: run again, it would write a second time. torch
    sees that by a tensor's version, which is another one behind `_unsafe_view`, the last op of each product of more
    than two dimensions. A torch that does not show results (2.9) leaves those to the user.
    """

    def __init__(self, ops: tuple[str, ...] = ()) -> None:
        self.kept = re.compile("|".join(GROUPS.get(name, name) for name in ops)) if ops else None
        self._num_products: Counter[bool] = Counter()  # by whether it is the recomputation that asks
        self._makers: dict[int, Any] = {}  # storages of what is kept, which lives as long as this, with the op

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        again = bool(ctx.is_recompute)  # torch 2.13 asks in forward alone
        if not again and not torch.compiler.is_compiling():  # a graph writes nothing in place
            self._check_writes(op, args, kwargs)
        role = self.role(op, args, kwargs)
        if role == ALTERNATE:
            role = RECOMPUTE if self._num_products[again] % 2 else SAVE
            self._num_products[again] += 1
        if role != SAVE:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._makers |= {tensor.untyped_storage()._cdata: op for tensor in tensors(getattr(ctx, "op_output", None))}
        return CheckpointPolicy.MUST_SAVE

    def _check_writes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written(op, args, kwargs):
            maker = self._makers.get(tensor.untyped_storage()._cdata)
            if maker is not None:
                raise MemplanError(
                    f"{op} writes to a result of {maker} that selective keeps, and would write again when it is run "
                    "again.",
                    "Write elsewhere (inplace=False), keep other ops, or use --ckpt full.",
                )

    def role(self, op: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> str:
        """`SAVE`, `RECOMPUTE` or `ALTERNATE`.

        Never kept, whatever the policy: a result that shares the memory of an input (a view costs nothing, and what is
        written in place changes), and what draws random numbers, since drawing in forward alone would leave others to
        the ops behind it.
        """
        role = self.wish(op)
        return RECOMPUTE if role != RECOMPUTE and (shares_memory(op) or draws(op, args, kwargs)) else role

    def wish(self, op: Any) -> str:
        """The role that the policy gives to `op`, whatever its results."""
        name = op_name(op)
        if self.kept is not None:
            return SAVE if self.kept.fullmatch(name) else RECOMPUTE
        if is_product(op):
            return ALTERNATE
        dear = name in dear_names() or ATTENTION.fullmatch(name)
        return SAVE if dear or (is_collective(op) and COLLECTIVES.fullmatch(name)) else RECOMPUTE


def op_name(op: Any) -> str:
    """Name of an op without namespace and overload: `mm`, `flex_attention`."""
    packet = getattr(op, "overloadpacket", op)
    return str(packet.__name__)


def is_product(op: Any) -> bool:
    """Whether `op` is a matrix product, or a grouped one."""
    return op_name(op) in PRODUCTS


def shares_memory(op: Any) -> bool:
    """Whether a result of `op` is a view of an input, or an input itself that it wrote to."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def draws(op: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Whether a call of `op` draws random numbers: an attention kernel where it drops."""
    schema = getattr(op, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "dropout_p" in names:
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        return bool(given.get("dropout_p", 0.0) > 0)
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def is_collective(op: Any) -> bool:
    """Whether `op` is one of torch's functional collectives."""
    return str(getattr(op, "namespace", "")).startswith("_c10d_functional")


@cache
def dear_names() -> frozenset[str]:
    """Ops that are dear to compute: those of torch's partitioner, where it tells, and our own."""
    try:
        from torch._functorch.partitioners import get_default_op_list

        found = {op_name(op) for op in get_default_op_list().compute_intensive_ops}
    except (ImportError, AttributeError):  # private: it may go away
        found = set()
    return DEAR | found


def check_name(name: str) -> None:
    """MemplanError unless `name` is a word for several ops or an op that can be kept."""
    if name in GROUPS or name in PRODUCTS or ATTENTION.fullmatch(name):
        return
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops._c10d_functional, name, None)
    if packet is None:
        hint = near_names(name, GROUPS.keys() | PRODUCTS | dear_names())
        raise MemplanError(f"Unknown op {name!r} in --ckpt selective.", hint)
    own = [op for op in (getattr(packet, overload) for overload in packet.overloads()) if not shares_memory(op)]
    if not own:
        raise MemplanError(f"{name} makes no result of its own that could be kept.", "Name the op behind it.")
    if all(draws(op) for op in own):
        raise MemplanError(f"{name} draws random numbers and has to draw them again.", "Keep what is dear: mm+sdpa.")
    if all(made_of_others(op) for op in own):
        parts = [other for other in (f"_{name}", f"native_{name}", f"_fused_{name}") if hasattr(torch.ops.aten, other)]
        raise MemplanError(
            f"{name} is made of other ops, and those are what can be kept.", f"Try {' or '.join(parts) or 'them'}."
        )


def made_of_others(op: Any) -> bool:
    """Whether torch runs `op` as a row of other ops, so that no policy is ever asked about it."""
    has_kernel: Callable[[str, str], bool] | None = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    return has_kernel is not None and has_kernel(op.name(), "CompositeImplicitAutograd")
