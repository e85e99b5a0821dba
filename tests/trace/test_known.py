"""Values beside fake tensors: sizes of what a mask picks, what is read, and what is not known any more."""

from collections.abc import Iterator

import pytest
import torch

from memplan.errors import MemplanError
from memplan.spec.device import CPU
from memplan.trace.known import KnownValues
from memplan.trace.tracing import Tracing


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    tracing = Tracing(CPU, frames=False)
    with tracing, KnownValues(tracing.recorder):
        yield tracing


def test_a_known_mask_picks_as_many_rows_as_it_marks(tracing: Tracing) -> None:
    ids = torch.randint(10, (4, 16), generator=torch.Generator().manual_seed(0))
    marked = ids == 3
    real = torch.randint(10, (4, 16), generator=torch.Generator().manual_seed(0))
    del tracing.trace.events[:]
    hidden = torch.randn(4, 16, 8)
    assert hidden[marked].shape == (int(marked.sum()), 8)
    numbers = [alloc for alloc in tracing.trace.allocs if alloc.op == "aten.nonzero.default"]
    assert [alloc.num_bytes for alloc in numbers] == [8 * 2 * int(marked.sum())]
    assert real.shape == ids.shape


def test_gradients_go_back_through_the_mask(tracing: Tracing) -> None:
    hidden = torch.randn(3, 5, 8, requires_grad=True)
    marked = torch.arange(15).view(3, 5) % 4 == 1
    (hidden[marked] * 2).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape
    numbers = [alloc.num_bytes for alloc in tracing.trace.allocs if alloc.op == "aten.nonzero.default"]
    assert numbers == [8 * 2 * 4] * 2  # in forward and in backward


def test_selected_values_have_the_size_of_their_mask(tracing: Tracing) -> None:
    mask = torch.tensor([[True], [False], [True]])
    assert torch.randn(3, 7).masked_select(mask).shape == (14,)


def test_grids_are_read(tracing: Tracing) -> None:
    grids = torch.tensor([3, 3, 0, 0]).repeat(4, 1)
    sizes = (grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]).tolist()
    assert sizes == [9, 9, 9, 9]
    assert [part.shape for part in torch.randn(36, 5).split(sizes)] == [(9, 5)] * 4
    assert len(tracing.trace.syncs) == 4


def test_written_values_are_followed(tracing: Tracing) -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    ids[:, :4] = 7
    ids.view(-1)[0] = 1
    assert int((ids == 7).sum()) == 7


def test_what_something_unknown_was_written_to_is_not_known(tracing: Tracing) -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    view = ids[0]
    ids.copy_(torch.randn(2, 6).argmax(dim=1, keepdim=True))
    with pytest.raises(MemplanError, match="depends on the values"):
        torch.randn(6)[view == 0]
