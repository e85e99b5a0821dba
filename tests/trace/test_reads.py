"""Values that Python reads in a trace: nothing went wrong, everything else is one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memplan

ALARMS: dict[str, Callable[[Tensor], Tensor]] = {
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "or": lambda x: x.isnan() | x.isinf(),
    "any": lambda x: x.expand(3).isnan().any(),
    "sum": lambda x: x.expand(3).isinf().sum(),
}


@pytest.mark.parametrize("alarm", ALARMS)
def test_nothing_is_nan_or_infinite(alarm: str) -> None:
    with memplan.tracing() as t:
        assert not ALARMS[alarm](torch.randn(()))
    assert [sync.assumed for sync in t.trace.syncs] in (["0"], ["False"])


@pytest.mark.parametrize("ask", [torch.isfinite, lambda x: x > 3, lambda x: (x > 3).any(), lambda x: x.item()])
def test_everything_else_is_one(ask: Callable[[Tensor], Tensor | float]) -> None:
    with memplan.tracing():
        assert ask(torch.randn(()))


def test_norms_that_must_be_finite_are() -> None:
    with memplan.tracing():
        model = nn.Linear(8, 8)
        model(torch.randn(4, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_a_scaled_step_is_taken() -> None:
    """`GradScaler` leaves a step out where it found infinite gradients; the optimizer's state would be missing."""
    with memplan.tracing() as t:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.randn(4, 64)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    moments = [alive for alive in t.alive_at_peak() if alive.category == "optimizer"]
    assert sum(alive.total_bytes for alive in moments) == 2 * 4 * (64 * 64 + 64)
