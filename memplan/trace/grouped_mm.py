"""Grouped matrix products of any dtype under fake tensors.

torch's own fake kernel knows bf16 only, where both real ones multiply group by group what the fast kernel does not
take. The shapes and the padding of rows to 16 bytes are theirs.
Source: aten/src/ATen/native/GroupedMMUtils.h `create_grouped_gemm_output_tensor`, `_grouped_mm_fallback`, torch 2.13.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

ALIGNMENT_BYTES = 16
"""Rows of a result begin at multiples of this."""


@contextmanager
def grouped_products() -> Iterator[None]:
    """Gives `_grouped_mm` on fake tensors every dtype while it is open."""
    FakeTensorMode.cache_clear()
    with patch.dict(fake_impls.op_implementations_dict, {torch.ops.aten._grouped_mm.default: _grouped_mm}), aligned():
        yield
    FakeTensorMode.cache_clear()


def aligned() -> AbstractContextManager[Any]:
    """A place in which fake tensors begin at address 0, before torch 2.11, whose kernels on the CPU need addresses that
    transformers therefore asks for (`_can_use_grouped_mm`, transformers/integrations/moe.py, 5.24)."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11):
        return nullcontext()
    return patch.object(FakeTensor, "data_ptr", lambda _: 0)


def _grouped_mm(
    mode: FakeTensorMode,
    func: Any,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result's memory: [M, N] where one side is in groups, [groups, M, N] where both or neither are."""
    rows, columns = left.size(-2), right.size(-1)
    dtype = out_dtype or left.dtype
    padded = -(-columns * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // dtype.itemsize
    groups = left.size(0) if left.dim() == 3 else None if offs is None else offs.size(0)
    with mode:
        if left.dim() + right.dim() == 5:
            return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device=left.device)
        assert groups is not None
        shape, strides = (groups, rows, columns), (rows * padded, padded, 1)
        return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)
