"""CUDA's logic against a stand-in for torch."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_cuda import FakeCuda, OutOfMemoryError, backend_of

from memplan.backends.base import Segment
from memplan.backends.cuda import HISTORY_ENTRIES, CudaBackend, allocator_conf, allocator_warning
from memplan.units import GIB


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    yield FakeCuda()


def test_each_segment_belongs_to_its_phase_and_the_window_is_their_largest(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    cuda.allocate(1000)
    with backend.window() as window:
        for _ in range(2):  # two chunks
            window.mark("forward")
            saved = cuda.allocate(3000)
            window.mark("backward")
            cuda.free(cuda.allocate(100))
            cuda.free(saved)
        window.mark("optimizer")
        cuda.free(cuda.allocate(512))
    reading = window.reading
    assert reading is not None
    assert reading.phase_peaks == {"forward": 1024 + 3072, "backward": 1024 + 3072 + 512, "optimizer": 1024 + 512 + 0}
    assert reading.phase_peaks["optimizer"] < reading.phase_peaks["backward"]
    assert reading.peak.allocated_bytes == 1024 + 3072 + 512
    assert reading.peak.requested_bytes == 1000 + 3000 + 100
    assert reading.peak.reserved_bytes == 6144
    assert reading.live_bytes == 1024


def test_f12_a_window_forgets_the_peaks_and_counters_before_it(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    cuda.counters["num_alloc_retries"] = 9
    cuda.free(cuda.allocate(100_000))
    with backend.window() as first:
        cuda.allocate(512)
        cuda.counters["num_alloc_retries"] += 1
    with backend.window() as second:
        cuda.allocate(512)
    assert first.reading is not None and second.reading is not None
    assert first.reading.peak.allocated_bytes == 512
    assert first.reading.peak.num_alloc_retries == 1
    assert second.reading.peak.num_alloc_retries == 0
    assert second.reading.peak.num_device_allocs == 0


def test_device_calls_in_a_window_are_counted(cuda: FakeCuda) -> None:
    with backend_of(cuda).window() as window:
        cuda.allocate(5000)
    assert window.reading is not None
    assert window.reading.peak.num_device_allocs == 3


def test_a_failed_window_still_reads_but_does_not_wait(cuda: FakeCuda) -> None:
    window = backend_of(cuda).window()
    with pytest.raises(OutOfMemoryError), window:
        window.mark("forward")
        cuda.allocate(5000)
        before = cuda.synchronized
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert cuda.synchronized == before
    assert window.reading is not None
    assert window.reading.phase_peaks == {"forward": 5120}


def test_times_come_from_events(cuda: FakeCuda) -> None:
    def work() -> str:
        cuda.now_ms += 12.5
        return "done"

    assert backend_of(cuda).clock(work) == ("done", 12_500_000)


def test_the_keys_are_those_of_torch() -> None:
    """The stand-in proves nothing about names; torch's own documentation of `memory_stats` does."""
    torch = pytest.importorskip("torch")
    from memplan.backends.cuda import COUNTER_KEYS, PEAK_KEYS, PRIVATE_POOLS

    text = torch.cuda.memory_stats.__doc__
    for key in PEAK_KEYS.values():
        assert key.split(".")[0] in text
    assert COUNTER_KEYS["num_alloc_retries"] in text
    assert COUNTER_KEYS["num_device_allocs"] in text
    assert COUNTER_KEYS["num_ooms"] in text
    if "private_pools" in text:  # torch 2.13 and later
        assert PRIVATE_POOLS.rstrip(".") in text


def test_the_protocol_is_kept(cuda: FakeCuda) -> None:
    from memplan.backends.base import Backend
    from memplan.backends.cpu import CpuBackend

    names = [name for name in vars(Backend) if not name.startswith("_")]
    for backend in (backend_of(cuda), CpuBackend()):
        assert all(hasattr(type(backend), name) for name in names)


def test_segments_tell_what_was_alive_at_each_mark(cuda: FakeCuda) -> None:
    cuda.allocate(512)
    with backend_of(cuda).window() as window:
        window.mark("forward")
        cuda.allocate(1024)
        window.mark("")
        cuda.free(1024)
    assert window.reading is not None
    assert window.reading.segments == (
        Segment(phase="", start_bytes=512, peak_bytes=512),
        Segment(phase="forward", start_bytes=512, peak_bytes=1536),
        Segment(phase="", start_bytes=1536, peak_bytes=1536),
    )
    assert window.reading.phase_peaks == {"forward": 1536}


def test_used_bytes_add_what_lies_outside_the_allocator_to_its_largest(cuda: FakeCuda) -> None:
    cuda.outside_bytes = 700
    with backend_of(cuda).window() as window:
        cuda.free(cuda.allocate(5000))
        cuda.current["reserved_bytes"] -= 4096  # given back to the driver before the end
    assert window.reading is not None
    assert window.reading.peak.used_bytes == 6144 + 700


def test_f21_what_private_pools_hold_is_told(cuda: FakeCuda) -> None:
    """Memory of CUDA graphs and of captures that failed stays until the process ends, which is after one rung."""
    cuda.pools = {"0_1": 3 << 20, "0_2": 1 << 20}
    with backend_of(cuda).window() as window:
        pass
    assert window.reading is not None
    assert window.reading.peak.private_pool_bytes == 4 << 20
    cuda.pools = {}
    with backend_of(cuda).window() as older:
        pass
    assert older.reading is not None
    assert older.reading.peak.private_pool_bytes is None


@pytest.mark.parametrize(
    ("environment", "conf", "warns"),
    [
        ({}, "", False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True", False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128", False),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "x:1"},
            "max_split_size_mb:128, expandable_segments:True",
            True,
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"},
            "max_split_size_mb:128,expandable_segments:False",
            False,
        ),
    ],
)
def test_f20_settings_that_do_not_go_together_are_named(environment: dict[str, str], conf: str, warns: bool) -> None:
    assert allocator_conf(environment) == conf
    assert (allocator_warning(conf) is not None) is warns


def test_f44_the_cap_is_a_share_of_the_card_and_never_more_than_it(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    backend.cap(71 * GIB)
    assert cuda.cap_bytes == pytest.approx(71 * GIB, abs=1)
    assert backend.describe()["cap_bytes"] == 71 * GIB
    backend.cap(500 * GIB)
    assert cuda.calls[-1] == ("cap", 1.0)


def test_the_observer_tells_the_exact_request(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    backend.listen(history=False)
    backend.cap(1 << 20)
    with pytest.raises(OutOfMemoryError):
        cuda.allocate(5_000_000)
    refusal = backend.refusal()
    assert refusal is not None
    assert (refusal.requested_bytes, refusal.free_bytes) == (5_000_192, 80 * GIB)


def test_f47_the_history_is_recorded_when_asked_for_and_has_an_end(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    assert backend.listen(history=False) == ""
    assert cuda.calls == []
    assert backend.listen(history=True) == ""
    ((_, options),) = cuda.calls
    assert (options["stacks"], options["max_entries"]) == ("python", HISTORY_ENTRIES)


def test_a_torch_without_its_private_parts_is_lived_with(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    del backend._torch._C, cuda.memory._record_memory_history, cuda.memory._dump_snapshot
    assert "no snapshot" in backend.listen(history=True)
    assert not backend.dump("x.pickle")
    assert backend.workspace_bytes() == 0


def test_workspaces_are_what_torch_gives_back(cuda: FakeCuda) -> None:
    backend = backend_of(cuda)
    cuda.allocate(8 << 20)
    backend._torch._C._cuda_clearCublasWorkspaces = lambda: cuda.free(8 << 20)
    assert backend.workspace_bytes() == 8 << 20


def test_a_context_that_answers_nothing_has_no_room_to_tell(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    backend: CudaBackend = backend_of(cuda)
    room = backend.room()
    assert room is not None and not room.nearly_full
    monkeypatch.setattr(cuda, "mem_get_info", broken)
    assert backend.room() is None
