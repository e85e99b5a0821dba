"""The points of a ladder as runs: what a rung leaves open is filled from the ladder, then from the model.

Letters: `B` batch, `S` sequence, `l` loss chunks.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.backends.environment import gpu
from memplan.errors import MemplanError
from memplan.models.registry import model_spec
from memplan.spec import DeviceSpec, Ladder, ModelSpec, Rung, RunSpec, StepSpec
from memplan.spec.device import CPU
from memplan.units import format_exact_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One rung with everything decided."""

    rung: Rung
    """As typed, its checkpoint mode filled in."""
    run: RunSpec
    """The whole question."""
    command: str
    """What to type to climb this rung alone."""


def points(ladder: Ladder, device: DeviceSpec) -> tuple[Point, ...]:
    """Every point of `ladder` on `device`, checked; MemplanError for the first that cannot be."""
    found = []
    for name, loss, precision, ckpt, rung in ladder.points():
        model = model_spec(name)
        run = RunSpec(model=model, step=_step(ladder, model, loss, precision, ckpt, rung), device=device)
        found.append(Point(rung=rung, run=run, command=_command(ladder, rung, run)))
    return tuple(found)


def assumed(ladder: Ladder, found: Sequence[Point]) -> list[str]:
    """Lines that say which device is climbed on, and what was filled in from each model because nobody asked for it."""
    lines = []
    for name in ladder.model:
        runs = [(point.rung, point.run) for point in found if point.run.model.name == name]
        filled: set[str] = set()
        for rung, run in runs:
            if rung.seq is None and ladder.seq is None:
                filled.add(f"seq {run.step.seq}")
            if ladder.images is None and run.step.images:
                filled.add(f"{run.step.images} images")
            if ladder.precision == (None,):
                filled.add(run.step.precision)
        text = f"; assumed for {name}: {', '.join(sorted(filled))}" if filled else ""
        line = f"on {runs[0][1].device.name}{text}"
        if line not in lines:
            lines.append(line)
    return lines


def find_device(name: str) -> DeviceSpec:
    """The device that `auto`, `cuda` or `cpu` means on this machine; MemplanError when it has no GPU to offer."""
    if name == "cpu":
        return CPU
    facts = gpu()
    if facts is None:
        raise MemplanError("No NVIDIA GPU was found on this machine.", "Type --device cpu to climb on its processor.")
    slug = "-".join(str(facts["gpu"]).lower().split())
    return DeviceSpec(
        name=slug, rules="cuda", capacity_bytes=facts.get("gpu_memory_bytes"), source="NVML on this machine"
    )


def _step(ladder: Ladder, model: ModelSpec, loss: str, precision: str | None, ckpt: str, rung: Rung) -> StepSpec:
    if rung.loss_chunks is not None:
        kind = loss.partition(":")[0]
        loss = f"{'chunked' if kind == 'full' else kind}:{rung.loss_chunks}"
    return StepSpec(
        batch=rung.batch,
        chunks=rung.chunks,
        seq=rung.seq or ladder.seq or model.seq,
        images=model.images if ladder.images is None else ladder.images,
        ckpt=ckpt,
        loss=loss,
        optimizer=ladder.optimizer,
        precision=precision or model.precision,
        attention=ladder.attention,
        norm=ladder.norm,
        clip=ladder.clip,
    )


def _command(ladder: Ladder, rung: Rung, run: RunSpec) -> str:
    step = run.step
    options: dict[str, object] = {
        "model": run.model.name,
        "seq": step.seq,
        "images": step.images or None,
        "loss": step.loss,
        "precision": step.precision,
        "optimizer": step.optimizer,
        "attention": step.attention,
        "norm": step.norm,
        "clip": step.clip,
        "device": run.device.rules,
        "gate": None if ladder.gate_bytes is None else format_exact_bytes(ladder.gate_bytes),
        "gate-on": ladder.gate_on,
        "warmup": ladder.warmup,
        "steps": ladder.steps,
        "timeout": ladder.timeout_s,
    }
    words = ["memplan", "ladder", str(rung)]
    for option, value in options.items():
        if value is not None:
            words += [f"--{option}", str(value)]
    return shlex.join(words)
