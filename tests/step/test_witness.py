"""The witness: every op of a region beside its recomputation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointError

from memplan.record import RecomputeDifference
from memplan.step.region import Region
from memplan.step.results import largest_difference, same_bits
from memplan.step.selective import selective_contexts
from memplan.step.witness import Witness

Function = Callable[..., Tensor]


class Net(nn.Module):
    """One parameter, one child."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.child = nn.Linear(4, 4)


def seen(function: Function, *args: Any, net: nn.Module | None = None, **region: Any) -> Witness:
    """The witness of one call of `function`, forward and backward."""
    witness = Witness(net or Net())
    watched = Region("part", function, **region)
    watched.watch = witness
    with witness:
        watched(*(args or (torch.linspace(-1, 1, 4).requires_grad_(),))).sum().backward()
    return witness


def first(witness: Witness) -> RecomputeDifference:
    assert witness.first is not None
    return witness.first


def test_what_is_made_again_alike_is_counted_and_nothing_differs() -> None:
    witness = seen(lambda x: (x.sin() * 2).exp())
    assert witness.first is None
    assert witness.mutations == ()
    assert witness.num_compared == 3


def test_a_recomputation_that_ends_early_is_alike() -> None:
    """torch stops when it has what backward reads: here the sine, behind which nothing is read."""
    witness = seen(lambda x: x.sin().exp().clone().clone())
    assert witness.first is None
    assert witness.num_compared == 2


@pytest.mark.parametrize("off", [2.0**-20, float("nan"), -1.0])
def test_the_first_value_that_differs_is_named_with_its_place(off: float) -> None:
    calls: list[int] = []

    def drift(x: Tensor) -> Tensor:
        calls.append(1)
        y = x.sin()
        y = y + (off if len(calls) > 1 else 0.0)
        return (y * 3).exp()

    found = first(seen(drift))
    assert (found.region, found.position, found.op, found.op_again) == ("part", 1, "aten.add.Tensor", "aten.add.Tensor")
    assert found.max_abs == pytest.approx(off, rel=0.1) if off > 0 else True
    assert found.shape == found.shape_again == (4,)


def test_another_op_a_further_op_another_shape_and_another_dtype_are_named() -> None:
    x = torch.linspace(-1, 1, 4).requires_grad_()
    calls: list[int] = []

    def two(one: Function, other: Function) -> Function:
        calls.clear()

        def call(x: Tensor) -> Tensor:
            calls.append(1)
            return (one if len(calls) == 1 else other)(x)

        return call

    found = first(seen(two(lambda x: x.sin().exp(), lambda x: x.cos().exp()), x))
    assert (found.position, found.op, found.op_again) == (0, "aten.sin", "aten.cos")
    found = first(seen(two(lambda x: x.sin().exp(), lambda x: x.clone().sin().exp()), x))
    assert (found.position, found.op, found.op_again) == (0, "aten.sin", "aten.clone")
    with pytest.raises(CheckpointError):
        seen(two(lambda x: x.exp(), lambda x: torch.cat((x, x)).exp()), x)


def test_the_difference_is_known_when_torch_stops() -> None:
    calls: list[int] = []

    def grow(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.cat([x] * len(calls)).exp()

    net = Net()
    witness = Witness(net)
    region = Region("part", grow)
    region.watch = witness
    with pytest.raises(CheckpointError), witness:
        region(torch.ones(4, requires_grad=True)).sum().backward()
    found = first(witness)
    assert (found.op, found.shape, found.shape_again, found.max_abs) == ("aten.cat", (4,), (8,), None)
    assert "makes [8] float32, where forward made [4] float32" in str(found)


def test_the_module_of_an_op_is_named() -> None:
    net = Net()
    weights = iter((net.child.weight.data, net.child.weight.data + 1))

    def moved(x: Tensor) -> Tensor:
        net.child.weight.data = next(weights)
        return net.child(x.sin()).exp()

    found = first(seen(moved, net=net))
    assert found.module == "child"
    assert str(found).startswith("part: op ")
    assert ", in child, aten.addmm [1, 4] is off by " in str(found)


def test_of_several_calls_the_first_in_forward_is_named() -> None:
    """Backward comes to the last one first."""
    net, runs = Net(), []
    witness = Witness(net)

    def drift(x: Tensor) -> Tensor:
        runs.append(1)
        return (x.sin() + (len(runs) > 2)).exp()

    regions = [Region(name, drift) for name in ("early", "late")]
    x = torch.ones(4, requires_grad=True)
    for region in regions:
        region.watch = witness
    with witness:
        regions[1](regions[0](x)).sum().backward()
    assert first(witness).region == "early"


def test_what_a_selective_policy_hands_out_is_compared_too() -> None:
    w = torch.eye(4).requires_grad_()
    contexts = selective_contexts(("mm",))
    witness = seen(lambda x: torch.tanh(x @ w).exp(), torch.ones(3, 4, requires_grad=True), contexts=contexts)
    assert witness.first is None
    assert witness.num_compared == 3


def test_casts_that_autocast_has_ready_in_forward_are_no_difference() -> None:
    """The weight is cast by the first of two regions; each recomputation casts it anew."""
    net = Net()
    witness = Witness(net)
    regions = [Region(name, lambda x: torch.tanh(net.child(x))) for name in ("one", "two")]
    for region in regions:
        region.watch = witness
    with witness:
        with torch.autocast("cpu", torch.bfloat16):
            out = regions[1](regions[0](torch.ones(2, 4, requires_grad=True)))
        out.float().sum().backward()
    assert witness.first is None
    assert witness.num_compared > 2


def test_fake_tensors_are_compared_by_op_shape_and_dtype() -> None:
    calls: list[int] = []

    def other_op(x: Tensor) -> Tensor:
        calls.append(1)
        return (x.sin() if len(calls) == 1 else x.cos()).exp()

    with FakeTensorMode():
        found = first(seen(other_op, torch.ones(4, requires_grad=True), net=nn.Linear(2, 2)))
    assert (found.op, found.op_again, found.max_abs) == ("aten.sin", "aten.cos", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_bits_are_compared_whatever_the_dtype(dtype: torch.dtype) -> None:
    one = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    other = one.clone()
    assert same_bits(one, other)
    assert same_bits(one.t(), other.t().contiguous())
    other[0, 0] = 1
    assert not same_bits(one, other)
    assert largest_difference(one, other) == 1


def test_a_nan_is_itself_and_minus_zero_is_not_zero() -> None:
    nan, zero = torch.tensor(float("nan")), torch.tensor(0.0)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
