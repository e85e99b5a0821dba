"""Who writes in place what a recomputation reads, or would write again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memplan.record import Mutation
from memplan.step.mutation import Extent
from memplan.step.region import Region
from memplan.step.witness import Witness


class Net(nn.Module):
    """One buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(4))


def seen(function: Callable[[Tensor], Tensor], net: Net) -> Witness:
    """The witness of one call of `function`, forward and backward."""
    witness = Witness(net)
    region = Region("part", function)
    region.watch = witness
    with witness:
        region(torch.ones(4, requires_grad=True)).sum().backward()
    return witness


def mutation(witness: Witness) -> Mutation:
    (found,) = witness.mutations
    return found


def test_a_write_between_forward_and_recomputation_is_named_with_its_reader() -> None:
    net = Net()
    witness = Witness(net)
    region = Region("part", lambda x: (x * net.state).exp())
    region.watch = witness
    with witness:
        out = region(torch.ones(4, requires_grad=True))
        net.state.add_(1)
        out.sum().backward()
    found = mutation(witness)
    assert (found.tensor, found.inside) == ("state [4] float32", False)
    assert (found.reader, found.writer) == ("aten.mul.Tensor in part", "aten.add_.Tensor in the step")
    assert "keep the value from before the write" in str(found)
    assert witness.first is not None
    assert witness.first.op == "aten.mul.Tensor"


def test_a_write_behind_the_recomputation_is_harmless() -> None:
    net = Net()
    witness = Witness(net)
    region = Region("part", lambda x: (x * net.state).exp())
    region.watch = witness
    with witness:
        region(torch.ones(4, requires_grad=True)).sum().backward()
        net.state.add_(1)
    assert witness.mutations == ()


def test_a_write_inside_is_named_though_nobody_reads_it() -> None:
    net = Net()

    def count(x: Tensor) -> Tensor:
        net.state.add_(1)
        return x.exp()

    found = mutation(seen(count, net))
    assert (found.inside, found.reader, found.writer) == (True, "", "aten.add_.Tensor in part")
    assert "move the write out of the region" in str(found)


def test_what_a_region_makes_itself_it_may_write() -> None:
    def accumulate(x: Tensor) -> Tensor:
        total = torch.zeros(4)
        for _ in range(3):
            total = total.add(x).clone()
            total.view(2, 2)[0].mul_(2)
        return total.exp()

    assert seen(accumulate, Net()).mutations == ()


def test_a_write_without_a_schema_that_says_so_is_seen_by_the_version() -> None:
    net = Net()
    witness = Witness(net)
    region = Region("part", lambda x: (x * net.state).exp())
    region.watch = witness
    with witness:
        out = region(torch.ones(4, requires_grad=True))
        with torch._C._DisableTorchDispatch():  # as a kernel of another's that writes by itself
            net.state.add_(1)
        out.sum().backward()
    assert (mutation(witness).tensor, mutation(witness).writer) == ("state [4] float32", "an op that was not seen")


def test_only_the_part_of_a_tensor_that_was_read_matters() -> None:
    """Rows of a cache behind those that the region reads may be filled before it runs again."""
    for row, harmless in ((2, True), (1, False)):
        cache = torch.ones(2, 4, 3)
        net = Net()
        witness = Witness(net)
        region = Region("part", lambda x, cache=cache: (cache[:, :2] * x).exp())
        region.watch = witness
        with witness:
            out = region(torch.ones(3, requires_grad=True))
            cache[:, row].fill_(2)
            out.sum().backward()
        assert (witness.mutations == ()) == harmless
        assert (witness.first is None) == harmless


def test_extents_overlap_where_they_share_an_element() -> None:
    cache = torch.zeros(2, 4, 3)
    parts = {"left": cache[:, :2], "right": cache[:, 2:], "row": cache[1, 1], "all": cache, "none": cache[:, :0]}
    extents = {name: Extent.of(part) for name, part in parts.items()}
    pairs = [("left", "right"), ("left", "row"), ("right", "row"), ("all", "right"), ("none", "all")]
    assert [extents[one].overlaps(extents[other]) for one, other in pairs] == [False, True, False, True, False]
    assert Extent.of(cache.view(torch.int32)).overlaps(extents["right"])
    assert Extent.of(cache.view(torch.int16)).overlaps(extents["right"])  # another size of element: not told apart


def test_an_argument_written_in_place_is_named_when_torch_refuses_it() -> None:
    """torch finds this one itself, and says nothing of who wrote."""
    net = Net()
    witness = Witness(net)
    region = Region("part", lambda x: x.sin().exp())
    region.watch = witness
    with pytest.raises(RuntimeError, match="inplace"), witness:
        x = torch.ones(4, requires_grad=True) * 1
        out = region(x)
        x.detach().add_(1)
        out.sum().backward()
    assert mutation(witness).writer == "aten.add_.Tensor in the step"
    assert mutation(witness).reader == "aten.sin in part"
