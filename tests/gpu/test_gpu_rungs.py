"""Rungs in processes of their own on a real card: numbers of one that ends well, of one that runs out, and NVML's."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def outcome_of(**more: Any) -> Any:
    """What a worker says about a small rung on this card."""
    from gpu_cards import card_here

    from memplan.launch.process import run_worker
    from memplan.launch.watch import open_watch
    from memplan.models.registry import model_spec
    from memplan.spec import RunSpec, StepSpec

    step = {"batch": 4, "seq": 512, "ckpt": "none", "precision": "bf16"} | more.pop("step", {})
    run = RunSpec(model=model_spec("tiny-wide"), step=StepSpec(**step), device=card_here())
    job = {"kind": "measure", "run": run.to_dict(), "warmup": 2, "steps": 3, "min_time_s": 0.0, "seed": 0} | more
    with tempfile.TemporaryDirectory() as folder:
        return run_worker(job, timeout_s=120, log=Path(folder) / "log", watch=open_watch())


def test_a_rung_tells_windows_times_training_and_attention() -> None:
    from memplan.ladder.windows import fold

    outcome = outcome_of()
    assert outcome.status == "ok", outcome.error
    row = fold(outcome.events)
    windows = row["windows"]
    assert {"init", "first_step", "measured"} <= set(windows)
    peak = windows["measured"]
    assert 0 < peak.requested_bytes <= peak.allocated_bytes <= peak.active_bytes <= peak.reserved_bytes
    assert peak.num_alloc_retries == 0
    assert peak.num_device_allocs == 0
    assert set(row["phase_peaks"]) >= {"forward", "loss", "backward", "optimizer"}
    assert max(row["phase_peaks"].values()) <= row["peak_allocated_bytes"]
    assert len(row["step_ns"]) >= 3
    assert row["loss"][-1] < row["loss"][0]
    assert row["grad_norm"] > 0
    assert sum(row["attention"].values()) > 0
    assert row["hardware_flops"] >= row["model_flops"] > 0


def test_a_rung_over_its_cap_is_out_of_memory_with_numbers() -> None:
    cap_bytes = 512 * MIB
    outcome = outcome_of(cap_bytes=cap_bytes, step={"batch": 64, "seq": 2048})
    assert outcome.status == "oom", (outcome.status, outcome.error)
    failure = outcome.failure
    assert failure is not None
    assert failure["requested_bytes"] > 0
    assert 0 < failure["allocated_bytes"] <= failure["reserved_bytes"] <= cap_bytes
    assert failure["allocated_bytes"] + failure["requested_bytes"] > cap_bytes * 0.5
    assert failure["phase"] or failure["window"] == "build"
    assert failure["cap_bytes"] == cap_bytes


def test_nvml_sees_the_rungs_own_process() -> None:
    """In a container NVML may list another process number; then it says so and claims nothing."""
    outcome = outcome_of(min_time_s=2.0)
    assert outcome.status == "ok", outcome.error
    told = outcome.telemetry
    own = [window["own_bytes"] for window in told["windows"].values() if window["own_bytes"]]
    missing = told["timed"].get("missing", {})
    assert own or "own_bytes" in missing, told
    if own:
        assert max(own) > 100 * MIB  # a context alone takes that
    assert told["timed"]["power_w"] is not None or "power_w" in missing


def test_a_rung_leaves_no_memory_behind_on_the_card() -> None:
    from memplan.backends.nvml import open_device
    from memplan.launch.settle import settled, unclaimed_bytes

    device = open_device()
    assert device is not None
    before_bytes = unclaimed_bytes(device)
    assert outcome_of().status == "ok"
    assert before_bytes is None or settled(device, before_bytes)
