"""Fake tensors answered from memory: what torch's own give, event for event in a step and op by op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.hf_configs import small_run
from samples import asked
from torch import Tensor
from torch._subclasses import FakeTensorMode

from memplan.backends.simulated import trace_steps
from memplan.spec import RunSpec
from memplan.spec.device import card
from memplan.trace import tracing
from memplan.trace.quick_fake import QuickFakeMode

H100 = card("h100-80g")


@pytest.mark.parametrize(
    "run",
    [
        asked("tiny", "B4c2@selective", device=H100, seq=32, dropout=0.1, precision="bf16-mixed"),
        small_run("qwen3_moe", ckpt="full", precision="bf16-mixed"),
    ],
    ids=lambda run: run.model.name,
)
def test_a_step_is_the_one_of_torchs_own_fake_tensors(run: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = trace_steps(run).trace
    monkeypatch.setattr(tracing, "QuickFakeMode", FakeTensorMode)
    plain = trace_steps(run).trace
    assert quick.allocs == plain.allocs
    assert quick.events == plain.events


def facts(one: Any) -> Any:
    if isinstance(one, Tensor):
        return one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one.untyped_storage().nbytes()
    return [facts(part) for part in one] if isinstance(one, list | tuple) else one


OPS: dict[str, Callable[[Tensor], Any]] = {
    "new memory": lambda x: x @ x.t(),
    "a view": lambda x: x[1:, ::2].t(),
    "a view of all": lambda x: x.view(-1),
    "a reshape that copies": lambda x: x.t().reshape(-1),
    "an integer instead of a float": lambda x: (x.int() * 2, x.int() * 2.0),
    "a list of tensors": lambda x: torch.cat([x, x[:2]]),
    "several results": lambda x: x.split(2),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "a tensor out of nothing": lambda x: torch.arange(5, device=x.device),
    "a layout": lambda x: x.view(2, 2, 2, 3).contiguous(memory_format=torch.channels_last),
    "complex numbers": lambda x: torch.complex(x, x).conj().real,
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_it_gave(name: str) -> None:
    with QuickFakeMode():
        x = torch.empty(4, 6)
        first, second = OPS[name](x), OPS[name](x)
    with FakeTensorMode():
        plain = OPS[name](torch.empty(4, 6))
    assert facts(first) == facts(second) == facts(plain)


def test_views_share_their_memory_and_results_do_not() -> None:
    with QuickFakeMode():
        x, y = torch.empty(4, 6), torch.empty(4, 6)
        for tensor in (x, y):
            assert tensor.t().untyped_storage()._cdata == tensor.untyped_storage()._cdata
            assert (tensor + 1).untyped_storage()._cdata != tensor.untyped_storage()._cdata
            assert tensor.add_(1) is tensor
            assert torch.mul(tensor, 2, out=x) is x


def test_values_that_are_known_are_read() -> None:
    with QuickFakeMode():
        for value in (2.0, 3.0):
            assert torch.tensor(value).item() == value
