"""Windows for a loop of one's own: nothing lost by a reset, nothing counted twice, on a stand-in for CUDA and on the
CPU itself."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.backends import meters, peak_window
from memplan.backends.cuda import CudaBackend
from memplan.backends.meters import CudaMeter
from memplan.backends.peak_window import PeakWindow
from memplan.errors import MemplanError
from memplan.units import GIB, MIB

PEAKS = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes")


class FakeCuda:
    """`torch.cuda` with one device, whose blocks are multiples of 512 bytes and whose segments are of 4096."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(PEAKS, 0)
        self.peak = dict(self.now)
        self.counters = {"num_device_alloc": 0, "num_alloc_retries": 0, "num_ooms": 0}
        self.initialized = True
        self.broken = False
        self.num_resets = 0

    def take(self, num_bytes: int) -> None:
        rounded = -(-num_bytes // 512) * 512
        for name, amount in zip(PEAKS, (rounded, num_bytes, rounded, 0), strict=True):
            self.now[name] += amount
        if self.now["allocated_bytes"] > self.now["reserved_bytes"]:
            self.now["reserved_bytes"] = -(-self.now["allocated_bytes"] // 4096) * 4096
            self.counters["num_device_alloc"] += 1
        self.peak = {name: max(value, self.now[name]) for name, value in self.peak.items()}

    def drop(self, num_bytes: int) -> None:
        rounded = -(-num_bytes // 512) * 512
        for name, amount in zip(PEAKS, (rounded, num_bytes, rounded, 0), strict=True):
            self.now[name] -= amount

    def touch(self, num_bytes: int) -> None:
        self.take(num_bytes)
        self.drop(num_bytes)

    def init(self) -> None:
        self.initialized = True

    def synchronize(self, index: int) -> None:
        pass

    def is_initialized(self) -> bool:
        return self.initialized

    def memory_stats(self, index: int) -> dict[str, int]:
        assert self.initialized, "asking would initialise CUDA"
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        stats = {f"{name}.all.peak": value for name, value in self.peak.items()}
        return stats | {f"{name}.all.current": value for name, value in self.now.items()} | self.counters

    def reset_peak_memory_stats(self, index: int) -> None:
        assert self.initialized, "resetting would initialise CUDA"
        self.num_resets += 1
        self.peak = dict(self.now)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    meter = CudaMeter(SimpleNamespace(cuda=fake), 0)
    monkeypatch.setattr(peak_window, "meter_of", lambda device: meter)
    return fake


def test_a_window_says_what_was_the_most_inside_of_it(cuda: FakeCuda) -> None:
    cuda.touch(100_000)
    cuda.take(1000)
    with PeakWindow() as window:
        cuda.touch(5000)
        cuda.take(200)
    cuda.touch(50_000)
    assert window.allocated_bytes == window.active_bytes == 1024 + 5120
    assert window.requested_bytes == 6000
    assert window.reserved_bytes == 102_400
    assert window.live_bytes == 1024 + 512
    assert window.lifetime_allocated_bytes == 100_352  # of before the first reset


def test_retries_and_failures_are_those_of_the_window(cuda: FakeCuda) -> None:
    cuda.counters |= {"num_alloc_retries": 7, "num_ooms": 1}
    with PeakWindow() as first:
        cuda.counters["num_alloc_retries"] += 2
        cuda.take(5000)
    with PeakWindow() as second:
        cuda.counters["num_ooms"] += 1
    assert (first.num_alloc_retries, first.num_ooms, first.num_device_allocs) == (2, 0, 1)
    assert (second.num_alloc_retries, second.num_ooms, second.num_device_allocs) == (0, 1, 0)


def test_an_inner_window_does_not_lose_the_outer_ones_peak(cuda: FakeCuda) -> None:
    with PeakWindow() as outer:
        outer.mark("forward")
        cuda.touch(9000)
        with PeakWindow() as inner:
            inner.mark("inside")
            cuda.touch(2000)
        outer.mark("backward")
        cuda.touch(4000)
    assert inner.allocated_bytes == 2048
    assert inner.phase_peaks == {"inside": 2048}
    assert outer.allocated_bytes == 9216
    assert outer.phase_peaks == {"forward": 9216, "backward": 4096}


def test_windows_that_overlap_without_nesting_are_right_too(cuda: FakeCuda) -> None:
    first, second = PeakWindow().open(), PeakWindow()
    cuda.touch(3000)
    second.open()
    cuda.touch(1000)
    first.close()
    cuda.touch(8000)
    second.close()
    assert (first.allocated_bytes, second.allocated_bytes) == (3072, 8192)


def test_windows_of_measured_code_and_of_the_ladder_around_it_lose_nothing_to_one_another(cuda: FakeCuda) -> None:
    ladder = CudaBackend(SimpleNamespace(cuda=cuda))
    with ladder.window() as around:
        around.mark("forward")
        cuda.touch(9000)
        with PeakWindow() as inside:
            cuda.touch(2000)
            around.mark("backward")
            cuda.touch(1000)
        cuda.touch(500)
    assert around.reading is not None
    assert around.reading.phase_peaks == {"forward": 9216, "backward": 1024}
    assert around.reading.peak.allocated_bytes == 9216
    assert inside.allocated_bytes == 2048
    assert inside.lifetime_allocated_bytes == 9216
    with PeakWindow() as after:
        cuda.touch(3000)
    assert around.reading.peak.allocated_bytes == 9216
    assert after.allocated_bytes == 3072


def test_a_peak_before_a_reset_stays_in_the_lifetime_of_every_window(cuda: FakeCuda) -> None:
    before = PeakWindow()
    with before:
        cuda.touch(20_000)
    with PeakWindow() as after:
        cuda.touch(100)
    cuda.touch(30_000)
    assert after.allocated_bytes == 512
    assert before.lifetime_allocated_bytes == after.lifetime_allocated_bytes == 30_208


def test_each_step_is_a_record_and_the_window_is_all_of_them(cuda: FakeCuda) -> None:
    with PeakWindow(history=2) as window:
        records = []
        for size in (1000, 9000, 3000):
            window.mark("forward")
            cuda.touch(size)
            cuda.counters["num_alloc_retries"] += size == 3000
            records.append(window.step())
    assert [record.peak.allocated_bytes for record in records if record is not None] == [1024, 9216, 3072]
    assert [record.peak.num_alloc_retries for record in window.history] == [0, 1]  # the latest two are kept
    assert window.history[-1].phase_peaks == {"forward": 3072}
    assert window.allocated_bytes == 9216
    assert window.to_dict()["num_steps"] == 3


def test_a_record_may_be_of_several_steps(cuda: FakeCuda) -> None:
    with PeakWindow(every=2) as window:
        for size in (8000, 1000, 2000, 1500, 9999):
            cuda.touch(size)
            window.step()
    assert [record.peak.allocated_bytes for record in window.history] == [8192, 2048]
    assert window.history[0].peak.num_steps == 2


def test_an_open_window_can_be_read_and_goes_on(cuda: FakeCuda) -> None:
    with PeakWindow() as window:
        cuda.touch(2000)
        assert window.allocated_bytes == 2048
        cuda.touch(1000)
        assert window.allocated_bytes == 2048
        cuda.touch(3000)
    assert window.allocated_bytes == 3072


def test_cuda_that_nobody_has_initialised_is_left_alone(cuda: FakeCuda) -> None:
    cuda.initialized = False
    with PeakWindow() as window:
        window.mark("forward")
        assert window.allocated_bytes == 0
    assert window.num_alloc_retries is None
    assert cuda.num_resets == 0


def test_cuda_that_starts_inside_of_the_window_counts_from_its_start(cuda: FakeCuda) -> None:
    cuda.initialized = False
    with PeakWindow() as window:
        cuda.initialized = True
        cuda.touch(7000)
        cuda.counters["num_alloc_retries"] += 1
    assert window.allocated_bytes == 7168
    assert window.num_alloc_retries == 1


def test_the_numbers_up_to_an_error_are_kept(cuda: FakeCuda) -> None:
    window = PeakWindow()
    with pytest.raises(RuntimeError, match="out of memory"), window:
        window.mark("backward")
        cuda.touch(6000)
        cuda.counters["num_ooms"] += 1
        raise RuntimeError("CUDA out of memory")
    assert window.phase_peaks == {"backward": 6144}
    assert window.num_ooms == 1


def test_a_device_that_no_longer_answers_does_not_hide_the_error(cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="the user's own"), PeakWindow():
        cuda.broken = True
        raise RuntimeError("the user's own")
    cuda.broken = False
    with PeakWindow() as after:  # nobody is left on the meter
        cuda.touch(100)
    assert after.allocated_bytes == 512


def test_a_window_is_one_line_of_text(cuda: FakeCuda) -> None:
    with PeakWindow() as window:
        window.mark("forward")
        cuda.touch(GIB)
        window.mark("backward")
        cuda.touch(GIB + 512 * MIB)
        cuda.counters["num_alloc_retries"] += 3
    assert str(window) == "1.50 GiB allocated (in backward), 1.50 GiB reserved, 3 alloc retries"
    assert window.to_dict()["allocated_bytes"] == GIB + 512 * MIB
    assert window.to_dict()["device"] == "cuda:0"


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda window: window.allocated_bytes, "never opened"),
        (lambda window: window.mark("forward"), "not open"),
        (lambda window: window.step(), "not open"),
        (lambda window: window.open().open(), "open already"),
    ],
)
def test_misuse_says_what_to_type(cuda: FakeCuda, misuse: Any, says: str) -> None:
    with pytest.raises(MemplanError, match=says) as caught:
        misuse(PeakWindow())
    assert caught.value.hint


def test_a_window_may_be_used_again(cuda: FakeCuda) -> None:
    window = PeakWindow()
    for size in (5000, 1000):
        with window:
            cuda.touch(size)
            window.step()
    assert window.allocated_bytes == 1024
    assert len(window.history) == 1


@pytest.mark.parametrize(("device", "says"), [("tpu", "knows no device"), ("cuda:x", "knows no device")])
def test_an_unknown_device_is_refused(device: str, says: str) -> None:
    with pytest.raises(MemplanError, match=says):
        PeakWindow(device).open()


def test_without_a_gpu_the_way_to_the_cpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MemplanError, match="no CUDA device") as caught:
        PeakWindow().open()
    assert 'device="cpu"' in caught.value.hint


def test_an_allocator_that_counts_nothing_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(MemplanError, match="switches off"):
        PeakWindow("cuda").open()


@pytest.fixture
def fresh_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torch")
    monkeypatch.setattr(meters, "_METERS", {})
    yield


def test_the_cpus_allocator_is_heard_to_the_byte(fresh_cpu: None) -> None:
    import torch

    with PeakWindow("cpu") as window:
        kept = torch.empty(MIB, dtype=torch.uint8)
        window.mark("forward")
        torch.empty(3 * MIB, dtype=torch.uint8)
        with PeakWindow(device=torch.device("cpu")) as inner:
            inner.mark("inside")
            torch.empty(5 * MIB, dtype=torch.uint8)
        window.mark("backward")
        torch.empty(2 * MIB, dtype=torch.uint8)
    assert window.allocated_bytes == inner.allocated_bytes == 6 * MIB
    assert window.phase_peaks == {"forward": 6 * MIB, "backward": 3 * MIB}
    assert window.live_bytes == kept.nbytes
    assert window.reserved_bytes is None
    assert window.lifetime_allocated_bytes == 6 * MIB
    assert str(window) == "6.00 MiB allocated (in forward)"


def test_blocks_from_before_may_go_inside_of_a_window_on_the_cpu(fresh_cpu: None) -> None:
    import torch

    with PeakWindow("cpu"):
        held = torch.empty(4 * MIB, dtype=torch.uint8)
    meters._METERS.clear()  # as if nobody had counted it
    with PeakWindow("cpu") as window:
        del held
        torch.empty(MIB, dtype=torch.uint8)
    assert window.allocated_bytes == 4 * MIB
    assert window.live_bytes == 0


def test_the_library_is_there_by_its_names_and_loads_torch_only_when_used() -> None:
    code = (
        "import sys, memplan; window = memplan.PeakWindow; assert 'torch' not in sys.modules;"
        "print(window.__name__, 'PeakWindow' in memplan.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PeakWindow", "True"]


def test_beside_another_profiler_the_cpu_window_says_so(fresh_cpu: None) -> None:
    from torch.profiler import profile

    with profile(), pytest.raises(MemplanError, match="Another profiler") as caught:
        PeakWindow("cpu").open()
    assert caught.value.hint
    with PeakWindow("cpu") as window:
        pass
    assert window.allocated_bytes == 0


PLAIN_LOOP = """
import memplan, torch

model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters())
with memplan.PeakWindow(device="cpu") as window:  # on a GPU: memplan.PeakWindow()
    for _ in range(3):
        window.mark("forward")
        loss = model(torch.randn(64, 512)).square().mean()
        window.mark("backward")
        loss.backward()
        window.mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        del loss
        window.step()

print(window)  # 5.01 MiB allocated (in optimizer)
print(window.phase_peaks, window.history[0].peak.allocated_bytes)
"""


def test_the_plain_loop_of_the_page_runs(fresh_cpu: None, capfd: pytest.CaptureFixture[str]) -> None:
    exec(PLAIN_LOOP, {})
    told = capfd.readouterr()
    assert told.out.startswith("5.01 MiB allocated (in optimizer)\n{'forward': ")
    # where another test in this process has used the profiler before, its lines can no longer be quieted
    assert [line for line in told.err.splitlines() if not line.startswith("USDT:")] == []
