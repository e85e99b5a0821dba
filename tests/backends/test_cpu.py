"""The CPU's live bytes: exact against tensors that can be counted, and whole over windows."""

import gc
import os

import pytest
import torch
from samples import run_of

from memplan.backends.cpu import QUIET, CpuBackend, Event, replay
from memplan.errors import MemplanError
from memplan.step.builder import build_step

KIB = 1 << 10


def test_replay_follows_the_running_sum() -> None:
    story = [
        Event(at_ns=1, delta_bytes=10),
        Event(at_ns=2, phase="forward"),
        Event(at_ns=3, delta_bytes=5),
        Event(at_ns=4, delta_bytes=-12),
        Event(at_ns=5, phase="backward"),
        Event(at_ns=6, delta_bytes=1),
        Event(at_ns=7, phase="forward"),
        Event(at_ns=8, delta_bytes=30),
    ]
    reading = replay(story, live_bytes=100)
    assert reading.peak.allocated_bytes == 134
    assert reading.phase_peaks == {"forward": 134, "backward": 104}
    assert reading.live_bytes == 134


def test_a_phase_begins_with_what_is_alive() -> None:
    reading = replay([Event(at_ns=1, phase="optimizer"), Event(at_ns=2, delta_bytes=-7)], live_bytes=7)
    assert reading.phase_peaks == {"optimizer": 7}
    assert reading.peak.allocated_bytes == 7


def test_a_window_begins_with_what_is_alive() -> None:
    assert replay([Event(at_ns=1, delta_bytes=-7)], live_bytes=7).peak.allocated_bytes == 7
    assert replay([], live_bytes=7).peak.allocated_bytes == 7


def test_more_freed_than_allocated_is_a_hole_in_the_story() -> None:
    with pytest.raises(MemplanError, match="hole"):
        replay([Event(at_ns=1, delta_bytes=-1)], live_bytes=0)


def test_windows_see_tensors_to_the_byte_and_go_on_from_one_another() -> None:
    backend = CpuBackend()
    with backend.window() as first:
        kept = torch.empty(256 * KIB, dtype=torch.uint8)
        torch.empty(64 * KIB, dtype=torch.uint8)
    with backend.window() as second:
        second.mark("forward")
        torch.empty(128 * KIB, dtype=torch.uint8)
        del kept
    assert first.reading is not None and second.reading is not None
    assert (first.reading.peak.allocated_bytes, first.reading.live_bytes) == (320 * KIB, 256 * KIB)
    assert (second.reading.peak.allocated_bytes, second.reading.live_bytes) == (384 * KIB, 0)
    assert second.reading.phase_peaks == {"forward": 384 * KIB}


def test_a_window_prints_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with CpuBackend().window():
        pass
    assert capfd.readouterr() == ("", "")
    assert os.environ["KINETO_LOG_LEVEL"] == QUIET


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_between_steps_every_live_byte_has_an_owner(precision: str) -> None:
    """After a step what is left is parameters, buffers, optimizer state and the batch: the sum has missed nothing."""
    gc.collect()  # a step of an earlier test, freed in a window of this one, would count as freed here
    run = run_of(chunks=2, ckpt="full", precision=precision)
    backend = CpuBackend()
    with backend.window():
        step = build_step(run, backend.device)
        gc.collect()
    with backend.window() as window:
        for _ in range(2):
            step(window.mark)
        gc.collect()
    tensors = [*step.model.parameters(), *step.model.buffers()]
    tensors += [value for state in step.optimizer.state.values() for value in state.values()]
    tensors += [step.batch.tokens, step.batch.labels]
    owned = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert window.reading is not None
    assert window.reading.live_bytes == sum(owned.values())
    assert set(window.reading.phase_peaks) == {"forward", "loss", "backward", "optimizer"}
    assert max(window.reading.phase_peaks.values()) == window.reading.peak.allocated_bytes


def test_a_failed_window_still_reads() -> None:
    backend = CpuBackend()
    window = backend.window()
    with pytest.raises(RuntimeError), window:
        window.mark("forward")
        kept = torch.empty(256 * KIB, dtype=torch.uint8)
        torch.empty(1 << 60)
    assert window.reading is not None
    assert window.reading.peak.allocated_bytes == kept.nbytes


def test_the_clock_returns_value_and_time() -> None:
    value, elapsed_ns = CpuBackend().clock(lambda: "done")
    assert value == "done"
    assert elapsed_ns > 0
