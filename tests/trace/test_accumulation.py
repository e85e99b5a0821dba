"""Gradients that meet at a node: added in place where torch, left alone, adds in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memplan.trace.recorder import Recorder


def tied() -> Tensor:
    """Three products with one matrix: their gradients are views of what the products make."""
    x, weight = torch.randn(10, 100), torch.randn(100, 100, requires_grad=True)
    return sum((F.linear(x, weight).sum() for _ in range(3)), torch.zeros(()))


def block() -> Tensor:
    """Residuals, a norm read three times, a tied embedding read in two parts."""
    norm, embedding = torch.nn.LayerNorm(64), torch.nn.Embedding(50, 64)
    q, k, v, out = (torch.nn.Linear(64, 64) for _ in range(4))
    tokens = torch.arange(8)
    h = embedding(tokens)
    y = norm(h)
    h = h + out(torch.softmax(q(y) @ k(y).T, -1) @ v(y))
    h = h + F.silu(q(h)) * k(h)
    logits = F.linear(h, embedding.weight)
    return F.cross_entropy(logits[:4], tokens[:4]) + F.cross_entropy(logits[4:], tokens[4:])


def views() -> Tensor:
    """A tensor read through views, expanded, and by itself twice."""
    y = torch.randn(8, 30, requires_grad=True) * 2
    first, second, third = y.chunk(3, 1)
    return (first * second).sum() + (third * third).sum() + (y + y).sum() + y.expand(4, 8, 30).sum() + y.T.pow(2).sum()


class Doubled(torch.autograd.Function):
    """A backward in Python that adds by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1 + grad * 1


def python_backward() -> Tensor:
    """Sums of a Python backward beside those of the engine."""
    y = torch.randn(8, 30, requires_grad=True) * 2
    return (Doubled.apply(y) + Doubled.apply(y) * y).sum()


def sums_of_torch(loss: Tensor) -> tuple[int, int]:
    """Sums that allocated and sums in place of a backward that nobody but torch's profiler watches."""
    with torch.profiler.profile() as profile:
        loss.backward()
    names = [event.name for event in profile.events()]
    return names.count("aten::add"), names.count("aten::add_")


@pytest.mark.parametrize("make", [tied, block, views, python_backward])
def test_as_many_sums_allocate_as_without_a_recorder(make: Callable[[], Tensor]) -> None:
    allocating, in_place = sums_of_torch(make())
    loss = make()
    with Recorder(guess_phases=True) as recorder:
        loss.backward()
    sums = [alloc for alloc in recorder.trace.allocs if alloc.op == "aten.add.Tensor"]
    assert len(sums) == allocating
    assert in_place > 0
