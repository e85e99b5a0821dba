"""The fingerprint: what is known is there, what is not is left out, nothing crashes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.backends import environment
from memplan.backends.doctor import checks


def nvml_of(**changes: Any) -> SimpleNamespace:
    """NVML with one GPU."""
    known = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle {uuid}",
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 << 30),
        "nvmlSystemGetDriverVersion": lambda: "570.1",
    }
    return SimpleNamespace(**known | changes)


def refuse(*arguments: Any) -> Any:
    raise RuntimeError("NVML: no permission")


def test_the_fingerprint_has_no_holes() -> None:
    facts = environment.fingerprint()
    assert None not in facts.values()
    assert {"system", "python", "memplan"} <= facts.keys()


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = environment.gpu(nvml_of())
    assert found == {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 80 << 30, "driver": "570.1"}


@pytest.mark.parametrize(
    "changes", [{"nvmlInit": refuse}, {"nvmlDeviceGetCount": lambda: 0}, {"nvmlDeviceGetName": refuse}]
)
def test_no_usable_gpu_is_none(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.gpu(nvml_of(**changes)) is None


def test_a_hidden_gpu_is_none_and_a_named_one_is_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert environment.gpu(nvml_of()) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234,GPU-5678")
    asked: list[str] = []
    environment.gpu(nvml_of(nvmlDeviceGetHandleByUUID=asked.append))
    assert asked == ["GPU-1234"]


def test_a_field_that_may_not_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.gpu(nvml_of(nvmlDeviceGetMemoryInfo=refuse)) == {
        "gpu": "NVIDIA H100 80GB HBM3",
        "driver": "570.1",
    }


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says what is available")
def test_available_memory_is_below_the_total() -> None:
    available, total = environment.available_ram_bytes(), environment.total_ram_bytes()
    assert available is not None and total is not None
    assert 0 < available <= total


def test_the_doctor_names_what_is_missing_and_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.backends.doctor.installed_version", lambda package: None)
    monkeypatch.setattr("memplan.backends.doctor.gpu", lambda: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    found = {check.name: check for check in checks()}
    assert found["torch"].status == "missing"
    assert "pip install torch" in found["torch"].advice
    assert found["transformers"].status == "note"
    assert found["PYTORCH_ALLOC_CONF"].found.startswith("expandable")
    assert "max_split_size_mb" in found["allocator"].advice


def test_the_doctor_works_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from memplan.backends.doctor import checks; print(checks())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "does not load" in done.stdout
