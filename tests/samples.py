"""Small runs and rows that many tests need."""

import gc
import itertools
from collections.abc import Iterator
from typing import Any

from memplan.estimate.sweep import replaced, sweep_sizes
from memplan.models.registry import model_spec
from memplan.record import RungResult, WindowPeak
from memplan.spec import DeviceSpec, Rung, RunSpec, StepSpec
from memplan.spec.device import CPU
from memplan.units import MIB


def run_of(model: str = "tiny", **step: Any) -> RunSpec:
    """A small run on the CPU."""
    spec = model_spec(model)
    usual = {"workload": spec.usual_workload(step.get("images", 0)), "attention": spec.usual_attention}
    values = {"batch": 4, "seq": 64, "precision": "fp32"} | usual | step
    return RunSpec(model=spec, step=StepSpec(**values), device=CPU)


def row_of(**values: Any) -> RungResult:
    """A row that went well."""
    known: dict[str, Any] = {
        "rung": "B4c2@none",
        "run_id": "a" * 12,
        "status": "ok",
        "source": "measured",
        "model": "tiny",
        "step": {"batch": 4, "seq": 64, "loss": "full", "precision": "fp32", "optimizer": "adamw"},
        "peak_allocated_bytes": 100 * MIB,
        "estimated_bytes": 99 * MIB,
        "windows": {"first_step": WindowPeak(allocated_bytes=80 * MIB)},
        "phase_peaks": {"init": 10 * MIB, "forward": 60 * MIB, "backward": 100 * MIB},
        "step_ns": (3 * 10**9, 1 * 10**9),
        "loss": (2.5, 2.25),
        "environment": {"torch": "2.13.0", "cpu": "Abacus", "commit": "abc1234", "device": "cpu"},
    }
    return RungResult(**known | values)


def asked(model: str, rung: str, *, device: DeviceSpec = CPU, **step: Any) -> RunSpec:
    """A run as a person asks for it: a rung, the model's usual shape, and what is changed."""
    spec, point = model_spec(model), Rung.parse(rung)
    values = {"seq": point.seq or spec.seq, "images": spec.images, "precision": spec.precision}
    values |= {"batch": point.batch, "chunks": point.chunks, "ckpt": point.ckpt or "none"}
    values |= step
    values.setdefault("workload", "vlm" if values["images"] else "lm")
    return RunSpec(model=spec, step=StepSpec(**values), device=device)


def measured_peak(run: RunSpec) -> int:
    """Largest live bytes of the second step of `run` on this machine's CPU, as the allocator reports them."""
    import torch

    from memplan.backends.cpu import CpuBackend
    from memplan.step.builder import build_step

    gc.collect()  # the step before, whose checkpointed blocks refer to themselves
    backend = CpuBackend()
    with backend.window():
        step = build_step(run, torch.device("cpu"))
        step()
        gc.collect()
    with backend.window() as window:
        step(window.mark)
    assert window.reading is not None
    return window.reading.peak.allocated_bytes


def swept(run: RunSpec, axes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`run` with each combination of the values of `axes`, batches that divide into their chunks, and its peak."""
    names = ("batch", "chunks", "seq")
    others = {name: values for name, values in axes.items() if name not in names}
    sizes = itertools.product(*(axes.get(name, [getattr(run.step, name)]) for name in names))
    points = [(batch, chunks, seq) for batch, chunks, seq in sizes if not batch % chunks]
    for chosen in itertools.product(*others.values()):
        levers = dict(zip(others, chosen, strict=True))
        for point, peak in sweep_sizes(replaced(run, levers), points).items():
            yield dict(zip(names, point, strict=True)) | levers | {"peak_allocated_bytes": peak}
