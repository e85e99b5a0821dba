"""The fingerprint: what is known is there, what is not is left out, nothing crashes."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml

from memplan.backends import doctor, environment
from memplan.backends.doctor import checks
from memplan.backends.nvml import open_device
from memplan.record import Check
from memplan.record.fingerprint import spill_possible


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def examined(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None = None) -> dict[str, Check]:
    """What the doctor says of a machine with this NVML, or with none."""
    monkeypatch.setattr(doctor, "open_device", lambda: open_device(nvml) if nvml is not None else None)
    monkeypatch.setattr(doctor, "gpu", lambda: environment.gpu(nvml) if nvml is not None else None)
    monkeypatch.setattr(environment, "open_device", lambda given=None: open_device(nvml) if nvml is not None else None)
    return {check.name: check for check in checks()}


def test_the_fingerprint_has_no_holes() -> None:
    facts = environment.fingerprint()
    assert None not in facts.values()
    assert {"system", "python", "memplan"} <= facts.keys()


def test_a_gpu_is_described() -> None:
    nvml = FakeNvml(FakeGpu())
    assert environment.gpu(nvml) == {
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpu_memory_bytes": 80 * GIB,
        "gpu_uuid": "GPU-11111111-aaaa",
        "driver": "570.1",
        "cuda_driver": "12.8",
        "power_limit_w": 700.0,
        "mig": "off",
    }
    assert nvml.opened == 0


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_no_usable_gpu_is_none(refused: str) -> None:
    nvml = FakeNvml(FakeGpu()).refuse(refused)
    assert environment.gpu(nvml) is None
    assert nvml.opened == 0
    assert environment.gpu(FakeNvml()) is None


def test_a_hidden_gpu_is_none_and_a_named_one_is_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(FakeGpu(), FakeGpu(uuid="GPU-5678", name="NVIDIA A100"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert environment.gpu(nvml) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5678,GPU-1234")
    described = environment.gpu(nvml)
    assert described is not None and described["gpu"] == "NVIDIA A100"


@pytest.mark.parametrize(
    ("function", "lost"),
    [
        ("nvmlDeviceGetMemoryInfo", "gpu_memory_bytes"),
        ("nvmlDeviceGetUUID", "gpu_uuid"),
        ("nvmlSystemGetDriverVersion", "driver"),
        ("nvmlDeviceGetMigMode", "mig"),
    ],
)
def test_f30_a_field_that_may_not_be_read_is_left_out(function: str, lost: str) -> None:
    whole, described = environment.gpu(FakeNvml(FakeGpu())), environment.gpu(FakeNvml(FakeGpu()).refuse(function))
    assert whole is not None and described is not None
    assert whole.keys() - described.keys() == {lost}


def test_f11_memory_that_spills_to_the_host_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = environment.gpu(FakeNvml(FakeGpu(driver_model=0)))
    assert windows is not None and windows["driver_model"] == "WDDM" and spill_possible(windows)
    for model in (1, None):  # TCC, Linux
        other = environment.gpu(FakeNvml(FakeGpu(driver_model=model)))
        assert other is not None and not spill_possible(other)
    assert not spill_possible(environment.fingerprint())
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    assert environment.fingerprint()["driver_model"] == "WSL"
    assert spill_possible(environment.fingerprint())


def test_f11_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "spill" not in examined(monkeypatch, FakeNvml(FakeGpu()))
    found = examined(monkeypatch, FakeNvml(FakeGpu(driver_model=0)))["spill"]
    assert "WDDM" in found.found and "sysmem fallback" in found.advice


def test_f11_bytes_that_no_machine_has_are_left_out() -> None:
    """WSL has reported 17179869184 GiB in use."""
    device = open_device(FakeNvml(FakeGpu(used=17179869184 * GIB)))
    assert device is not None
    assert device.used_bytes() is None
    assert "bytes" in device.missing["used_bytes"]


def test_all_settings_of_torch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NEWS", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("SECRET", "not ours")
    found = environment.settings()
    assert found["PYTORCH_NEWS"] == "value of PYTORCH_NEWS"
    assert {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"} <= found.keys()
    assert "SECRET" not in found


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("proc/1/cgroup", "4:memory:/kubepods/burstable/pod7\n", "kubepods"),
        ("proc/1/cgroup", "0::/init.scope\n", None),
    ],
)
def test_a_container_shows(
    file: str, text: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("container", raising=False)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert environment.container(tmp_path) == kind


def test_a_machine_is_told_from_others_without_its_name(tmp_path: Path) -> None:
    for name in ("one", "two", "empty"):
        (tmp_path / name).write_text(f"{name}\n" if name != "empty" else "\n")
    one, two = environment.machine_id(tmp_path / "one"), environment.machine_id(tmp_path / "two")
    assert one is not None and len(one) == 12 and "one" not in one
    assert one == environment.machine_id(tmp_path / "one") != two
    assert environment.machine_id(tmp_path / "empty") is environment.machine_id(tmp_path / "none") is None
    assert platform.node() not in str(environment.fingerprint().values())


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says what is available")
def test_available_memory_is_below_the_total() -> None:
    available, total = environment.available_ram_bytes(), environment.total_ram_bytes()
    assert available is not None and total is not None
    assert 0 < available <= total


def test_a_control_group_bounds_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.cgroups, "room_bytes", lambda: 12_345)
    assert environment.available_ram_bytes() == 12_345


def test_the_doctor_names_what_is_missing_and_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.backends.doctor.installed_version", lambda package: None)
    found = examined(monkeypatch)
    assert found["torch"].status == "missing"
    assert "pip install torch" in found["torch"].advice
    assert found["transformers"].status == "note"


@pytest.mark.parametrize(
    ("new", "old", "advice"),
    [
        ("expandable_segments:True,max_split_size_mb:128", None, "max_split_size_mb"),
        (None, "max_split_size_mb:128, expandable_segments: True", "max_split_size_mb"),
        ("expandable_segments:True", "max_split_size_mb:128", "unset one"),
        ("expandable_segments:True", "expandable_segments:True", None),
        ("expandable_segments:False,max_split_size_mb:128", None, None),
    ],
)
def test_f20_allocator_settings_that_do_not_go_together_are_named(
    new: str | None, old: str | None, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PYTORCH_ALLOC_CONF", new), ("PYTORCH_CUDA_ALLOC_CONF", old)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    said = [check.advice for check in doctor._settings() if check.name == "allocator"]
    assert bool(said) == (advice is not None)
    assert advice is None or advice in said[0]


def test_f28_the_doctor_names_who_uses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(FakeGpu(processes={7: 3 * GIB}))
    nvml.programs = {7: "/usr/bin/ollama"}
    found = examined(monkeypatch, nvml)
    assert found["others"].found == "ollama (pid 7, 3.00 GiB)"
    assert "--allow-shared" in found["others"].advice
    assert "GPU-11111111-aaaa" in found["driver"].found
    assert examined(monkeypatch, FakeNvml(FakeGpu()))["others"].status == "ok"
    refused = FakeNvml(FakeGpu()).refuse("nvmlDeviceGetComputeRunningProcesses")
    assert examined(monkeypatch, refused)["others"].status == "note"


def test_the_doctor_says_that_a_gpu_is_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeGpu(mig=1)
    board.slices = [FakeGpu(uuid="MIG-first", board=board, mig=None)]
    found = examined(monkeypatch, FakeNvml(board))
    assert "slices" in found["MIG"].found
    assert "MIG-first" in found["driver"].found
    assert "MIG" not in examined(monkeypatch, FakeNvml(FakeGpu()))


def test_the_doctor_works_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from memplan.backends.doctor import checks; print(checks())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "does not load" in done.stdout
