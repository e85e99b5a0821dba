"""A GPU between two rungs: others on it, memory that does not come back, a device that computes no more."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml

from memplan.backends.nvml import Device, GpuProcess, open_device
from memplan.launch.process import Outcome
from memplan.launch.settle import foreign, health_check, settled, unclaimed_bytes

DEAD = 2**22 + 1
"""A number above the largest that Linux gives a process."""
MIB = 1 << 20


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def device_of(nvml: FakeNvml) -> Device:
    device = open_device(nvml)
    assert device is not None
    return device


class Time:
    """A clock that goes on only by sleeping, and what happens meanwhile."""

    def __init__(self, *events: Any) -> None:
        self.now = 0.0
        self.events = list(events)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.events:
            self.events.pop(0)()


def waits(device: Device, before_bytes: int, time: Time, timeout_s: float = 10) -> bool:
    return settled(device, before_bytes, timeout_s, sleep=time.sleep, clock=time.clock)


def test_f07_a_device_that_computes_no_more_is_found_out() -> None:
    jobs = []

    def run(job: dict[str, Any], *, timeout_s: float, log: Path) -> Outcome:
        jobs.append(job)
        assert timeout_s > 0 and log == Path(os.devnull)
        sick = len(jobs) == 1
        return Outcome(status="error" if sick else "ok", error="an illegal memory access" if sick else None, events=())

    assert health_check({"run": {"of": "a rung"}}, run) == "error: an illegal memory access"
    assert health_check({"run": {"of": "a rung"}}, run) is None
    assert jobs == [{"run": {"of": "a rung"}, "kind": "health"}] * 2


@pytest.mark.parametrize("deed", ["abort", "kill", "vanish", "hang"])
def test_f07_a_check_that_dies_or_hangs_is_no_good_sign(
    launch: Any, deed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplan.launch.settle.HEALTH_S", 0.3)
    monkeypatch.setattr("memplan.launch.tree.GRACE_S", 0.1)
    assert health_check({}, lambda job, **options: launch(deed, **options)) is not None


def test_f07_a_check_that_ends_well_is_one(launch: Any) -> None:
    assert health_check({}, lambda job, **options: launch("finish", **options)) is None


def test_f27_memory_that_comes_back_late_is_waited_for() -> None:
    gpu = FakeGpu(used=21 * GIB)
    time = Time(lambda: None, lambda: setattr(gpu, "used", GIB + 10 * MIB))
    assert waits(device_of(FakeNvml(gpu)), GIB, time)
    assert 0 < time.now < 1


def test_f27_memory_that_does_not_come_back_is_said_so_in_time() -> None:
    time = Time()
    assert not waits(device_of(FakeNvml(FakeGpu(used=21 * GIB))), GIB, time, timeout_s=10)
    assert 10 <= time.now < 11


def test_f27_a_little_more_than_before_is_the_drivers_own() -> None:
    device = device_of(FakeNvml(FakeGpu(used=GIB + 64 * MIB)))
    assert waits(device, GIB, Time())
    assert not waits(device, GIB - 1, Time())


def test_f27_what_a_dead_process_is_still_listed_with_is_dirty() -> None:
    gpu = FakeGpu(used=9 * GIB, processes={DEAD: 9 * GIB})
    assert not waits(device_of(FakeNvml(gpu)), 0, Time())


def test_f27_what_a_living_neighbour_takes_meanwhile_is_its_own() -> None:
    """Only with --allow-shared there is one; it must not end the climb."""
    gpu = FakeGpu(used=3 * GIB, processes={os.getpid(): 2 * GIB})
    device = device_of(FakeNvml(gpu))
    before = unclaimed_bytes(device)
    assert before == GIB
    gpu.used, gpu.processes = 8 * GIB, {os.getpid(): 7 * GIB}
    assert waits(device, before, Time())


def test_f27_where_nothing_can_be_read_nothing_speaks_against_the_device() -> None:
    device = device_of(FakeNvml(FakeGpu()).refuse("nvmlDeviceGetMemoryInfo"))
    assert unclaimed_bytes(device) is None
    assert waits(device, 0, Time())


def test_f28_who_else_is_there_is_named_the_largest_first() -> None:
    nvml = FakeNvml(FakeGpu(processes={5: GIB, 6: 3 * GIB}, drawing={7: None}))
    nvml.programs = {5: "/usr/bin/python3", 6: "/usr/local/bin/ollama"}
    found = foreign(device_of(nvml))
    assert [str(process) for process in found] == [
        "ollama (pid 6, 3.00 GiB)",
        "python3 (pid 5, 1.00 GiB)",
        "unknown (pid 7)",
    ]


def test_f28_an_idle_device_has_nobody() -> None:
    assert foreign(device_of(FakeNvml(FakeGpu(used=100 * MIB)))) == ()


def test_f31_much_in_use_with_nobody_listed_is_somebody() -> None:
    """A container that does not see the host's processes: the memory tells that there are some."""
    assert foreign(device_of(FakeNvml(FakeGpu(used=20 * GIB)))) == (GpuProcess(pid=None, bytes=20 * GIB),)
    refused = FakeNvml(FakeGpu(used=20 * GIB)).refuse("nvmlDeviceGetComputeRunningProcesses")
    assert [str(process) for process in foreign(device_of(refused))] == ["unknown (20.00 GiB)"]


def test_f30_what_an_old_driver_keeps_for_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's first version counts it as used: 912 MiB on an idle A100."""
    nvml = FakeNvml(FakeGpu(used=8 * MIB, reserved=904 * MIB))
    assert device_of(nvml).used_bytes() == 8 * MIB
    monkeypatch.delattr(FakeNvml, "nvmlMemory_v2")
    device = device_of(nvml)
    assert device.used_bytes() == 912 * MIB
    assert device.counts_reserve()
    assert foreign(device) == ()
