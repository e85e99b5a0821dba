"""The look at a GPU while a rung runs: everything may be refused, nothing is made up, nothing is slowed."""

import time
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, HUGE, FakeGpu, FakeNvml, NVMLError

from memplan.backends.nvml import open_device
from memplan.launch.watch import Watch, open_watch

OWN, OTHER, LATE = 4242, 7, 8


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def watch_of(nvml: FakeNvml, pids: tuple[int, ...] = (OWN,), now: list[float] | None = None) -> Watch:
    """A watch whose time goes on by a second at each look at the clock, over a worker with these processes."""
    times = now if now is not None else [0.0]

    def clock() -> float:
        times[0] += 1
        return times[0]

    device = open_device(nvml)
    assert device is not None
    watch = Watch(device, nvml, clock=clock)
    watch.begin(lambda pid: pid in pids)
    return watch


def go_through(watch: Watch, *phases: str, looks: int = 1) -> dict[str, Any]:
    """What the watch tells after `looks` looks in each phase."""
    for phase in phases:
        watch.hear({"event": "phase", "phase": phase})
        for _ in range(looks):
            watch.look()
    return watch.telemetry()


def test_bytes_are_those_of_each_window() -> None:
    gpu = FakeGpu(processes={OTHER: 3 * GIB})
    watch = watch_of(FakeNvml(gpu))
    gpu.processes |= {OWN: GIB}
    go_through(watch, "build")
    gpu.processes |= {OWN: 5 * GIB}
    go_through(watch, "first_step")
    gpu.processes |= {OWN: 2 * GIB, LATE: GIB}
    told = go_through(watch, "measured")
    assert told["windows"] == {
        "init": {"own_bytes": GIB, "others_bytes": 3 * GIB},
        "first_step": {"own_bytes": 5 * GIB, "others_bytes": 3 * GIB},
        "measured": {"own_bytes": 2 * GIB, "others_bytes": 4 * GIB},
    }
    assert told["timed"] == {}


def test_the_largest_of_several_looks_counts_and_children_count_with_the_worker() -> None:
    gpu = FakeGpu(processes={OWN: 5 * GIB, OWN + 1: GIB})
    watch = watch_of(FakeNvml(gpu), pids=(OWN, OWN + 1))
    go_through(watch, "warmup")
    gpu.processes = {OWN: GIB}
    watch.look()
    assert watch.telemetry()["windows"]["warmup"]["own_bytes"] == 6 * GIB


def test_f28_others_that_come_while_a_rung_runs_are_named() -> None:
    gpu = FakeGpu(processes={OWN: GIB})
    nvml = FakeNvml(gpu)
    nvml.programs = {LATE: "/home/somebody/bin/ollama serve", OTHER: "C:\\games\\doom.exe"}
    watch = watch_of(nvml)
    go_through(watch, "warmup")
    gpu.processes[LATE] = 2 * GIB
    gpu.drawing = {OTHER: GIB, OWN: GIB}
    go_through(watch, "measured")
    del gpu.processes[LATE]
    told = go_through(watch, "timed")
    assert told["windows"]["warmup"]["others_bytes"] == 0
    assert told["windows"]["measured"]["others_bytes"] == 3 * GIB
    doom = {"pid": OTHER, "name": "doom.exe", "bytes": GIB}
    assert told["timed"]["others"] == [doom]
    assert {"pid": LATE, "name": "ollama", "bytes": 2 * GIB} in told["others"] and doom in told["others"]


def test_f28_own_bytes_never_come_from_what_the_device_says_as_a_whole() -> None:
    gpu = FakeGpu(used=50 * GIB, processes={OWN: GIB})
    watch = watch_of(FakeNvml(gpu))
    gpu.used = 20 * GIB  # somebody left: a difference would be negative
    assert go_through(watch, "measured")["windows"]["measured"]["own_bytes"] == GIB


def test_f29_the_gpu_is_the_one_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeGpu(uuid="GPU-11111111-aaaa", processes={OWN: GIB})
    second = FakeGpu(uuid="GPU-22222222-bbbb", processes={OWN: 9 * GIB})
    for visible in ("1", "1,0", "GPU-22222222-bbbb", "GPU-2222", "GPU-22222222-bbbb,GPU-11111111-aaaa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        told = go_through(watch_of(FakeNvml(first, second)), "measured")
        assert told["windows"]["measured"]["own_bytes"] == 9 * GIB, visible
    for visible in ("", "-1", "GPU-3333"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert open_watch(FakeNvml(first, second)) is None, visible


def test_f29_the_worker_knows_better_which_gpu_it_has() -> None:
    """CUDA counts the fastest GPU first, NVML the first on the bus."""
    slow = FakeGpu(uuid="GPU-11111111-aaaa", processes={OTHER: GIB})
    fast = FakeGpu(uuid="GPU-22222222-bbbb", processes={OWN: 9 * GIB})
    nvml = FakeNvml(slow, fast)
    watch = watch_of(nvml)
    go_through(watch, "build")
    watch.hear({"event": "environment", "gpu_uuid": "22222222-bbbb"})  # torch leaves the prefix out
    told = go_through(watch, "timed")
    assert told["windows"] == {"timed": {"own_bytes": 9 * GIB, "others_bytes": 0}}
    assert told["others"] == [], "what was seen on the other GPU is no neighbour"
    watch.hear({"event": "environment", "gpu_uuid": "11111111-aaaa-no-such-gpu"})
    assert watch.telemetry()["windows"]["timed"]["own_bytes"] == 9 * GIB
    watch.close()
    assert nvml.opened == 0


READS = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlSystemGetProcessName",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceGetUUID",
)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("error", [NVMLError("Not Supported"), AssertionError(), AttributeError("no such function")])
def test_f30_each_field_may_be_refused_alone(name: str, error: Exception) -> None:
    nvml = FakeNvml(FakeGpu(processes={OWN: GIB})).refuse(name, error=error)
    told = go_through(watch_of(nvml), "measured", "timed")
    lost = {
        "nvmlDeviceGetComputeRunningProcesses": "own_bytes",
        "nvmlDeviceGetClockInfo": "sm_clock_mhz",
        "nvmlDeviceGetPowerUsage": "power_w",
        "nvmlDeviceGetTemperature": "temperature_c",
    }.get(name)
    if lost == "own_bytes":
        assert told["windows"]["measured"] == {"own_bytes": None, "others_bytes": None}
    elif lost is not None:
        assert told["timed"][lost] is None
        assert told["windows"]["measured"]["own_bytes"] == GIB
    else:
        assert told["timed"]["missing"] == {}
    if lost is not None:
        assert told["timed"]["missing"][lost].startswith(type(error).__name__)


def test_f30_everything_may_be_refused_together() -> None:
    told = go_through(watch_of(FakeNvml(FakeGpu()).refuse(*READS)), "measured", "timed")
    assert told["windows"]["measured"] == {"own_bytes": None, "others_bytes": None}
    assert set(told["timed"]["missing"]) == {
        *("own_bytes", "others_bytes", "sm_clock_mhz", "power_w", "power_limit_w", "temperature_c", "throttled")
    }


def test_f30_no_bytes_for_a_process_is_unknown_and_not_zero() -> None:
    """WDDM, WSL and MIG list processes without their bytes."""
    told = go_through(watch_of(FakeNvml(FakeGpu(processes={OWN: None, OTHER: None}))), "timed")
    assert told["windows"]["timed"] == {"own_bytes": None, "others_bytes": None}
    assert "per process" in told["timed"]["missing"]["own_bytes"]
    assert told["timed"]["others"] == [{"pid": OTHER, "name": "unknown", "bytes": None}]


def test_f30_numbers_that_cannot_be_are_dropped() -> None:
    gpu = FakeGpu(processes={OWN: 1 << 64}, clock=HUGE, power=HUGE, temperature=HUGE)
    told = go_through(watch_of(FakeNvml(gpu)), "timed")
    assert told["windows"]["timed"]["own_bytes"] is None
    assert [told["timed"][name] for name in ("sm_clock_mhz", "power_w", "temperature_c")] == [None, None, None]


def test_f30_a_slice_says_its_own_bytes_and_the_clocks_of_its_board(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeGpu(mig=1, clock=1410, processes={OTHER: 9 * GIB})
    board.slices = [FakeGpu(uuid=f"MIG-{name}", board=board, clock=0, mig=None) for name in ("first", "second")]
    board.slices[0].processes, board.slices[1].processes = {OWN: GIB}, {OWN: 2 * GIB}
    told = go_through(watch_of(FakeNvml(board)), "timed")
    assert told["windows"]["timed"] == {"own_bytes": GIB, "others_bytes": 0}
    assert told["timed"]["sm_clock_mhz"]["max"] == 1410
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-second")
    told = go_through(watch_of(FakeNvml(board)), "timed")
    assert told["windows"]["timed"]["own_bytes"] == 2 * GIB
    assert told["timed"]["sm_clock_mhz"]["max"] == 1410


def test_f31_a_rung_that_is_not_listed_is_unknown_and_not_idle() -> None:
    """In a container NVML lists the host's numbers: the rung is there under one that is not its own."""
    gpu = FakeGpu(processes={OTHER: GIB})
    watch = watch_of(FakeNvml(gpu), pids=(OWN,))
    gpu.processes[99_001] = 20 * GIB  # the rung, as the host counts
    told = go_through(watch, "timed")
    assert told["windows"]["timed"] == {"own_bytes": None, "others_bytes": None}
    assert "container" in told["timed"]["missing"]["own_bytes"]
    assert told["others"] == [], "the rung is not taken for its own neighbour"


def test_f31_an_empty_list_is_unknown_too() -> None:
    told = go_through(watch_of(FakeNvml(FakeGpu(used=20 * GIB))), "timed")
    assert told["windows"]["timed"]["own_bytes"] is None


def test_f31_who_was_there_before_is_known_to_be_somebody_else() -> None:
    told = go_through(watch_of(FakeNvml(FakeGpu(processes={OTHER: GIB})), pids=()), "build")
    assert told["windows"]["init"] == {"own_bytes": None, "others_bytes": GIB}


def test_f34_clocks_power_heat_and_what_slows_are_those_of_the_timed_steps() -> None:
    gpu = FakeGpu(processes={OWN: GIB}, clock=300, temperature=90, reasons=0x40)
    now = [0.0]
    watch = watch_of(FakeNvml(gpu), now=now)
    go_through(watch, "measured")
    watch.hear({"event": "phase", "phase": "timed"})
    for clock, power, heat, reasons in ((1980, 600_000, 60, 0), (1700, 700_000, 71, 0x4), (1750, 690_000, 70, 0x5)):
        gpu.clock, gpu.power, gpu.temperature, gpu.reasons = clock, power, heat, reasons
        watch.look()
        now[0] += 60
    gpu.clock, gpu.reasons = 200, 0x80
    timed = go_through(watch, "look")["timed"]
    assert timed["sm_clock_mhz"] == {"min": 1700, "median": 1750, "max": 1980}
    assert timed["power_w"] == {"min": 600.0, "median": 690.0, "max": 700.0}
    assert (timed["power_limit_w"], timed["temperature_c"]) == (700.0, 71)
    assert timed["throttled"] == ["power cap"], "idling is no throttling, and what came later is not of these steps"
    assert timed["missing"] == {}


def test_f34_timed_steps_that_nobody_saw_say_so() -> None:
    watch = watch_of(FakeNvml(FakeGpu()))
    watch.hear({"event": "phase", "phase": "timed"})
    watch.hear({"event": "phase", "phase": "look"})
    timed = watch.telemetry()["timed"]
    assert timed["sm_clock_mhz"] is None
    assert "too soon" in timed["missing"]["sm_clock_mhz"]


def test_an_old_package_still_says_why_the_clock_is_low() -> None:
    nvml = FakeNvml(FakeGpu(reasons=0x40)).refuse("nvmlDeviceGetCurrentClocksEventReasons", error=AttributeError("no"))
    assert go_through(watch_of(nvml), "timed")["timed"]["throttled"] == ["heat (hardware)"]


def test_each_worker_is_watched_afresh() -> None:
    gpu = FakeGpu(processes={OWN: 9 * GIB})
    watch = watch_of(FakeNvml(gpu))
    go_through(watch, "measured", "timed")
    watch.begin(lambda pid: False)
    assert watch.telemetry() == {"windows": {}, "timed": {}, "others": []}


def test_a_slow_nvml_is_asked_less_often() -> None:
    now = [0.0]
    nvml = FakeNvml(FakeGpu(processes={OWN: GIB}))
    watch = watch_of(nvml, now=now)  # each look at the clock takes a second, so a look takes one
    watch.hear({"event": "phase", "phase": "warmup"})
    watch.look()
    calls = nvml.num_calls
    for _ in range(40):
        watch.look()
    assert nvml.num_calls == calls
    now[0] += 60
    watch.look()
    assert nvml.num_calls > calls


def test_a_look_costs_less_than_five_milliseconds() -> None:
    device = open_device(FakeNvml(FakeGpu(processes=dict.fromkeys(range(300_000, 300_050), GIB))))
    assert device is not None
    watch = Watch(device)
    watch.hear({"event": "phase", "phase": "timed"})
    costs = []
    for _ in range(5):
        began = time.perf_counter()
        watch.hear({"event": "phase", "phase": "timed"})
        watch.look()
        costs.append(time.perf_counter() - began)
    assert min(costs) < 0.005


def test_a_real_worker_is_watched_by_its_own_number(launch: Any) -> None:
    class Listing(dict[int, int]):
        """All processes there are, which NVML would never list."""

        def items(self) -> Any:
            return [(int(path.name), GIB) for path in Path("/proc").glob("[0-9]*")]

    nvml = FakeNvml(FakeGpu(processes=Listing()))
    watch = open_watch(nvml)
    assert watch is not None
    outcome = launch("take its time", watch=watch)
    watch.close()
    assert outcome.status == "ok"
    for name in ("first_step", "timed"):
        assert outcome.telemetry["windows"][name]["own_bytes"] == GIB, "the worker and nobody else"
        assert outcome.telemetry["windows"][name]["others_bytes"] > GIB
    assert outcome.telemetry["timed"]["sm_clock_mhz"]["median"] == 1980


def test_without_a_gpu_there_is_no_watch() -> None:
    assert open_watch(FakeNvml()) is None
    assert open_watch(FakeNvml(FakeGpu()).refuse("nvmlInit")) is None
