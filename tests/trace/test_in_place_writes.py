"""Gradients of picked rows are written into zeros, as autograd does where nobody looks on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memplan.trace.tracing import tracing

PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[torch.arange(8)],
    "index_select": lambda x: x.index_select(0, torch.arange(8)),
    "gather": lambda x: x.gather(1, torch.zeros(8, 64, dtype=torch.int64)),
    "topk": lambda x: x.topk(64, dim=-1)[0],
}


@pytest.mark.parametrize("name", PICKS)
def test_the_gradient_of_picked_rows_takes_their_memory_once(name: str) -> None:
    with tracing(gpu=None, frames=False) as traced:
        x = torch.zeros(8, 64, requires_grad=True)
        picked = PICKS[name](x)
        grad = torch.ones_like(picked)
        traced.reset_peak()
        before = traced.peak_allocated_bytes
        picked.backward(grad)
        assert traced.peak_allocated_bytes - before == x.numel() * 4


def test_rows_written_by_a_forward_take_memory_of_their_own() -> None:
    with tracing(gpu=None, frames=False) as traced:
        zeros = torch.ones(8, 64).new_zeros(8, 64)
        traced.reset_peak()
        before = traced.peak_allocated_bytes
        zeros.index_add(0, torch.arange(8), torch.ones(8, 64))
        assert traced.peak_allocated_bytes - before >= zeros.numel() * 4
