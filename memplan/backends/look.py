"""One extra step under the eyes of a dispatch mode: the FLOPs of its products, and the attention kernels that ran.

The FLOPs of a step are those of its matrix products and convolutions by torch's own formulas; a causal mask takes
nothing off. Letters: `B` batch, `H` heads, `S` queries, `T` keys, `D` and `E` size of a key and of a value.
"""

import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

KERNEL = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn|fused)\w*attention\w*")
"""torch's kernels by the names of their ops, as the trace names them too."""
OTHER_KERNEL = re.compile(r"flex_attention|_?(flash|efficient|cudnn)_attn\w*|_(flash|efficient|cudnn)_attention_\w+")
"""Kernels of others, which are called by the names of their ops."""
MATH = "_safe_softmax"
"""The softmax that tells torch's math path. Source: `_scaled_dot_product_attention_math`, attention.cpp, torch 2.13."""
GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback", "_scaled_grouped_mm")
"""Grouped products, torch's, transformers' and memplan's, for which torch has no formula."""


class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered.

    What checkpointing runs again is known by where it runs: inside of backward, with gradients enabled.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hardware_flops = 0
        """Everything that ran."""
        self.extra_flops = 0
        """Of it, what is not the model's: recomputed forwards, the scores that attention's backward makes again, and
        the optimizer's own products."""
        self.complete = True
        """Whether there was a formula for every attention kernel that ran."""
        self.attention: Counter[str] = Counter()
        """Calls of attention kernels in forward and in recomputed forwards."""
        self._formulas = formulas()
        self._optimizes = False
        self._hooks: list[RemovableHandle] = []

    @property
    def model_flops(self) -> int:
        """What the step would cost with nothing recomputed."""
        return self.hardware_flops - self.extra_flops

    def __enter__(self) -> Self:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *step: self._optimize(True)),
            register_optimizer_step_post_hook(lambda *step: self._optimize(False)),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _optimize(self, begins: bool) -> None:
        self._optimizes = begins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", func)
        name = str(getattr(packet, "__name__", packet))
        if "attention" in name or "_attn" in name or name == MATH:
            self._attend(name, args)
        elif name in GROUPED:
            self._add(grouped_flops(args[0], args[1]))
        elif (formula := self._formulas.get(packet)) is not None:
            self._add(int(formula(*args, **kwargs, out_val=out)))
        return out

    def _attend(self, name: str, args: Any) -> None:
        known = KERNEL.fullmatch(name)
        if not (known or name == MATH or OTHER_KERNEL.fullmatch(name)):
            return
        backward = "backward" in name
        if not backward:
            self.attention["math" if name == MATH else known[1] if known else name] += 1
        if name == MATH:
            return  # its products are ops of their own
        tensors = [one for one in args if isinstance(one, Tensor) and one.dim() == 4]
        first = 1 if backward and known else 0  # behind the gradient
        if not (known or name.startswith("flex_attention")) or len(tensors) < first + 3:
            self.complete = False
            return
        scores, mixed = attention_flops(*tensors[first : first + 3])
        self._add(scores + 2 * (scores + mixed) if backward else scores + mixed)
        if backward:
            self.extra_flops += scores * (not runs_again())

    def _add(self, flops: int) -> None:
        self.hardware_flops += flops
        if self._optimizes or runs_again():
            self.extra_flops += flops


def formulas() -> dict[Any, Callable[..., Any]]:
    """torch's formulas by op, without those of attention."""
    from torch.utils import flop_counter

    found: dict[Any, Callable[..., Any]] = getattr(flop_counter, "flop_registry", {})
    return {packet: formula for packet, formula in found.items() if "attention" not in str(packet)}


def runs_again() -> bool:
    """Whether backward runs a forward now: its own ops run without gradients."""
    in_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)() != -1
    return bool(in_backward and torch.is_grad_enabled())


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """FLOPs of the scores, 2 B H S T D, and of what is made of the values, 2 B H S T E."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * query.shape[-1], 2 * pairs * value.shape[-1]


def grouped_flops(left: Tensor, right: Tensor) -> int:
    """FLOPs of a product of groups, each row or column being in one of them, or of a batch of products."""
    rows = left.numel() if not (left.dim() == 3 and right.dim() == 2) else left.numel() // left.shape[0]
    return 2 * rows * right.shape[-1]
