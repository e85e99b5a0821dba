"""Counters of a real card: windows against torch's own numbers, retries and failures under a cap, codes of errors."""

import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_a_window_says_what_torchs_own_counters_say() -> None:
    import torch

    import memplan

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="cuda") for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(mark: Callable[[str], None]) -> None:
        mark("forward")
        loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    train(lambda phase: None)
    with memplan.PeakWindow() as window:
        train(window.mark)
    torch.cuda.reset_peak_memory_stats()
    train(lambda phase: None)
    assert window.allocated_bytes == torch.cuda.max_memory_allocated()
    assert window.reserved_bytes == torch.cuda.max_memory_reserved()
    assert window.live_bytes == torch.cuda.memory_allocated()
    assert max(window.phase_peaks.values()) == window.allocated_bytes
    assert set(window.phase_peaks) == {"forward", "backward", "optimizer"}


def test_an_inner_window_and_a_peak_before_the_first_reset_lose_nothing() -> None:
    import torch

    import memplan

    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    with memplan.PeakWindow() as outer:
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        with memplan.PeakWindow() as inner:
            torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    start_bytes = inner.live_bytes
    assert inner.allocated_bytes - start_bytes == 8 * MIB
    assert outer.allocated_bytes - start_bytes == 32 * MIB
    assert outer.lifetime_allocated_bytes - start_bytes >= 64 * MIB


def test_retries_and_failures_are_counted_under_a_cap() -> None:
    import torch

    import memplan

    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 512 * MIB) / total_bytes)
    try:
        kept = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
        del kept  # 384 MiB wait in pieces that 448 MiB do not fit into
        with memplan.PeakWindow() as window:
            torch.empty(448 * MIB, dtype=torch.uint8, device="cuda")
        assert window.num_alloc_retries == 1
        assert window.num_ooms == 0
        with memplan.PeakWindow() as failing:
            try:
                torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                text = str(error)
        assert failing.num_ooms == 1
        assert window.num_ooms == 0
        assert "Tried to allocate 600.00 MiB" in text
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_step_of_a_window_costs_little() -> None:
    import time

    import torch

    import memplan

    torch.ones(1, device="cuda")
    with memplan.PeakWindow() as window:
        window.step()
        began = time.perf_counter()
        for _ in range(100):
            window.step()
        assert (time.perf_counter() - began) / 100 < 0.005


def test_an_error_of_the_runtime_carries_its_code() -> None:
    """An assert on the device, in a process of its own, since it leaves the context useless."""
    code = (
        "import torch\n"
        "rows = torch.zeros(4, 4, device='cuda')\n"
        "try:\n"
        "    rows[torch.tensor([9], device='cuda')].sum().item()\n"
        "except Exception as error:\n"
        "    from memplan.backends.failure import code_of, is_poisoning, status_of\n"
        "    names = [kind.__name__ for kind in type(error).__mro__]\n"
        "    print(names[0], code_of(error), is_poisoning(error), status_of(error, on_cuda=True, room=None))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["AcceleratorError", "710", "True", "error"], done.stdout + done.stderr[-2000:]
