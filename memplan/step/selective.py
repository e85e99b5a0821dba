"""Selective checkpointing: within a block, keep the results of some ops and run the others again.

The standing policy keeps what is dear to compute: attention, collectives and every second matrix product; everything
else runs again. Products are counted anew in forward and in the recomputation, so that both decide alike whatever
number of them a block has.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memplan.errors import MemplanError, near_names
from memplan.step.region import Contexts

Decision = Literal["SAVE", "RECOMPUTE", "ALTERNATE"]
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
"""Matrix products and grouped expert products: every second one is kept."""
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
"""Attention kernels, always kept. `sdpa` in a policy of one's own means all of them."""
HIGHER_ORDER = ("flex_attention",)
"""Ops of the same kind that live outside of aten."""
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter_tensor",
)
"""Of `_c10d_functional`, always kept: to run one again is to wait for the network again."""
COMPUTE_INTENSIVE = ("convolution", "convolution_backward", "_fft_c2c", "_fft_r2c", "upsample_bilinear2d")
"""What is kept where torch does not tell its own list."""


def selective_contexts(ops: tuple[str, ...] = ()) -> Callable[[], Contexts]:
    """What makes the contexts of one call of a region: of the standing policy, or of one that keeps just `ops`.

    MemplanError for an op that torch does not have.
    """
    decide = standing_policy() if not ops else named_policy(ops)

    def contexts() -> Contexts:
        return create_selective_checkpoint_contexts(Policy(decide))  # type: ignore[no-untyped-call]

    return contexts


class Policy:
    """Says for each op of one call whether its result is kept; forward and recomputation count for themselves."""

    def __init__(self, decide: Callable[[Any], Decision]) -> None:
        self._decide = decide
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decision = self._decide(op)
        if decision == "ALTERNATE":
            number = self._num_products[context.is_recompute]
            self._num_products[context.is_recompute] += 1
            decision = "SAVE" if number % 2 == 0 else "RECOMPUTE"
        return CheckpointPolicy.MUST_SAVE if decision == "SAVE" else CheckpointPolicy.PREFER_RECOMPUTE


def standing_policy() -> Callable[[Any], Decision]:
    """Products alternate; attention, collectives and what else takes long is kept."""
    products = packets(PRODUCTS)
    saved = packets(ATTENTION) | packets(COLLECTIVES, "_c10d_functional") | compute_intensive()
    saved |= {getattr(torch.ops.higher_order, name) for name in HIGHER_ORDER if hasattr(torch.ops.higher_order, name)}

    def decide(op: Any) -> Decision:
        packet = packet_of(op)
        if packet in products:
            return "ALTERNATE"
        return "SAVE" if packet in saved else "RECOMPUTE"

    return decide


def named_policy(ops: tuple[str, ...]) -> Callable[[Any], Decision]:
    """The results of `ops` are kept, aten names without overload or `sdpa`, and nothing else."""
    kept: set[Any] = set()
    for name in ops:
        found = packets(ATTENTION) if name == "sdpa" else packets((name,))
        if not found:
            known = ("sdpa", *PRODUCTS, *ATTENTION, *COMPUTE_INTENSIVE)
            raise MemplanError(f"torch has no op {name!r}.", near_names(name, known))
        kept |= found
    return lambda op: "SAVE" if packet_of(op) in kept else "RECOMPUTE"


def compute_intensive() -> set[Any]:
    """Ops that torch's own partitioner never runs again, products apart, or our list where it does not tell.

    Source: get_default_op_list, torch/_functorch/partitioners.py, torch 2.13.
    """
    try:
        from torch._functorch.partitioners import get_default_op_list

        found = set(get_default_op_list().compute_intensive_ops)
    except (ImportError, AttributeError):  # a private name, which another version of torch may lack
        found = set()
    return {packet_of(op) for op in found} | packets(COMPUTE_INTENSIVE)


def packets(names: tuple[str, ...], library: str = "aten") -> set[Any]:
    """torch's ops of these names, with all their overloads; those that this version lacks are left out."""
    return set(_packets(names, library))


def _packets(names: tuple[str, ...], library: str) -> Iterator[Any]:
    for name in names:
        try:
            yield getattr(getattr(torch.ops, library), name)
        except AttributeError:
            continue


def packet_of(op: Any) -> Any:
    """The op without its overload."""
    return getattr(op, "overloadpacket", op)
