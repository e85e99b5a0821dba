"""What an op made, and whether two such tensors are one to the last bit."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

UNWRITTEN = ("aten.empty", "aten.new_empty")
"""Ops that hand out memory as it is."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element has."""


@dataclass(slots=True)
class Result:
    """One tensor that an op made."""

    shape: tuple[int, ...]
    """Sizes."""
    dtype: str
    """Without `torch.`."""
    values: Tensor | None
    """None where the tensor has no values of its own, or none that mean anything."""


def op_name(func: Any) -> str:
    """Name of an op with its namespace: `aten.mm`, `aten.add.Tensor`."""
    return str(func).removesuffix(".default")


def results(func: Any, out: Any, *, copies: bool = True) -> list[Result]:
    """The tensors in `out`, which the op `func` made, with copies of their values or the values themselves."""
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    name = op_name(func)
    kept = []
    for index, tensor in enumerate(made):
        values = None
        # behind an attention kernel's output stand seeds and paddings that nobody wrote
        told = not name.startswith(UNWRITTEN) and not ("attention" in name and index > 0)
        if told and not makes_view(func) and has_values(tensor):
            values = tensor.detach().clone() if copies else tensor.detach()
        kept.append(Result(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), values))
    return kept


def makes_view(func: Any) -> bool:
    """Whether `func` only looks at its input in another way."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def has_values(tensor: Tensor) -> bool:
    """Whether there are numbers behind `tensor`."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta and tensor.layout == torch.strided


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits; of NaN too."""
    return torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    """`tensor` as integers, one-dimensional."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; NaN where one of them is."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return float((one.double() - other.double()).abs().max())
