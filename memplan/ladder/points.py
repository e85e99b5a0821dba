"""The points of a ladder as runs: what a rung leaves open is filled from the ladder, then from the model.

Letters: `B` batch, `S` sequence, `l` loss chunks.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memplan.backends.environment import gpu
from memplan.errors import MemplanError
from memplan.models.registry import model_spec
from memplan.spec import DeviceSpec, EntryRun, Ladder, ModelSpec, Rung, RunSpec, StepSpec
from memplan.spec.device import CPU, card
from memplan.spec.model import CLASSIFIERS
from memplan.spec.pairing import check_counts
from memplan.units import format_exact_bytes

DEFAULT_CARD = "h100-80g"
"""The card that is assumed where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One rung with everything decided."""

    rung: Rung
    """As typed, its checkpoint mode filled in."""
    model: str
    """The model as typed: its name, or where its configuration is; of a step of the user's own its entry."""
    run: RunSpec | EntryRun
    """The whole question."""
    command: str
    """What to type to climb this rung alone."""
    simulated: bool = False
    """Whether the device is imagined: the rung is traced, not run."""

    @property
    def same_but_batch(self) -> tuple[Any, ...]:
        """What two points share that differ in nothing but their batch: along it alone memory is known to grow."""
        step = self.run.step_dict() | {"batch": None}
        return self.model, tuple(sorted((name, str(value)) for name, value in step.items()))


def points(ladder: Ladder, device: DeviceSpec, *, simulated: bool = False) -> tuple[Point, ...]:
    """Every point of `ladder` on `device`, checked; MemplanError for the first that cannot be."""
    return tuple(_point(ladder, *choice, device, simulated=simulated) for choice in ladder.points())


def with_batch(ladder: Ladder, point: Point, batch: int) -> Point:
    """`point` with another batch."""
    rung = dataclasses.replace(point.rung, batch=batch)
    if isinstance(point.run, EntryRun):
        run: RunSpec | EntryRun = dataclasses.replace(point.run, batch=batch)
    else:
        run = dataclasses.replace(point.run, step=dataclasses.replace(point.run.step, batch=batch))
    command = command_of(ladder, point.model, rung, run, simulated=point.simulated)
    return dataclasses.replace(point, rung=rung, run=run, command=command)


def _point(
    ladder: Ladder,
    name: str,
    compiled: str,
    loss: str,
    precision: str | None,
    ckpt: str,
    rung: Rung,
    device: DeviceSpec,
    *,
    simulated: bool,
) -> Point:
    if ladder.entry is not None:
        name = ladder.entry
        run: RunSpec | EntryRun = EntryRun(
            entry=name, batch=rung.batch, chunks=rung.chunks, ckpt=ckpt, seq=rung.seq or ladder.seq, device=device
        )
    else:
        model = model_spec(name, ladder.impl)
        if ladder.freeze is not None:
            model = model.frozen_to(ladder.freeze)
        run = RunSpec(model=model, step=_step(ladder, model, loss, precision, ckpt, compiled, rung), device=device)
        check_counts(model, run.step)
    command = command_of(ladder, name, rung, run, simulated=simulated)
    return Point(rung=rung, model=name, run=run, command=command, simulated=simulated)


def assumed(ladder: Ladder, found: Sequence[Point]) -> list[str]:
    """Lines that say which device is climbed on, and what was filled in from each model because nobody asked for it."""
    lines: list[str] = []
    device = found[0].run.device.name
    where = f"simulated {device}: traced on fake tensors, nothing is measured" if found[0].simulated else device
    if ladder.entry is not None:
        return [f"on {where}"]
    for name in ladder.model:
        runs = [(point.rung, point.run) for point in found if point.model == name and isinstance(point.run, RunSpec)]
        filled: set[str] = set()
        for rung, run in runs:
            if rung.seq is None and ladder.seq is None:
                filled.add(f"seq {run.step.seq}")
            if ladder.images is None and run.step.images:
                filled.add(f"{run.step.images} images")
            if ladder.precision == (None,):
                filled.add(run.step.precision)
            if ladder.attention is None and run.step.attention != "sdpa":
                filled.add(f"{run.step.attention} attention")
        text = f"; assumed for {name}: {', '.join(sorted(filled))}" if filled else ""
        line = f"on {where}{text}"
        lines += [text for text in (line, *runs[0][1].model.notes) if text not in lines]
    return lines


def find_device(name: str, card_name: str | None = None) -> tuple[DeviceSpec, bool]:
    """The device that `auto`, `cuda`, `cpu` or `simulated` means on this machine, and whether it is imagined.

    `auto` is CUDA where there is a GPU, and else the simulated card `card_name`. MemplanError for `cuda` without a GPU,
    and for a card's name beside a device that is there.
    """
    if name in ("cpu", "cuda") and card_name is not None:
        raise MemplanError(
            f"--gpu {card_name} imagines a card, but --device {name} runs on what is here.", "Type --device simulated."
        )
    if name == "cpu":
        return CPU, False
    facts = None if name == "simulated" or card_name is not None else gpu()
    if facts is not None:
        slug = "-".join(str(facts["gpu"]).lower().split())
        capacity = facts.get("gpu_memory_bytes")
        return DeviceSpec(name=slug, rules="cuda", capacity_bytes=capacity, source="NVML on this machine"), False
    if name == "cuda":
        raise MemplanError(
            "No NVIDIA GPU was found on this machine.",
            "Type --device simulated to trace the step, or --device cpu to climb on the processor.",
        )
    return card(card_name or DEFAULT_CARD), True


def _step(
    ladder: Ladder, model: ModelSpec, loss: str, precision: str | None, ckpt: str, compiled: str, rung: Rung
) -> StepSpec:
    if rung.loss_chunks is not None:
        kind = loss.partition(":")[0]
        loss = f"{'chunked' if kind == 'full' else kind}:{rung.loss_chunks}"
    if not (rung.seq or ladder.seq or model.seq):
        if model.impl == "user":
            from memplan.models.user_factory import load_entry

            load_entry(model.name)  # says whether there is one at all
        raise MemplanError(f"{model.name} has no usual length of a sequence.", "Type --seq 128.")
    if model.family in CLASSIFIERS and (rung.seq or ladder.seq or model.seq) != model.seq:
        raise MemplanError(f"{model.name} reads images of {model.seq} patches, and no tokens.", "Leave --seq out.")
    images = model.images if ladder.images is None else ladder.images
    if ladder.workload == "lm" and ladder.images is None:
        images = 0
    return StepSpec(
        batch=rung.batch,
        chunks=rung.chunks,
        seq=next(seq for seq in (rung.seq, ladder.seq, model.seq) if seq is not None),
        images=images,
        workload=ladder.workload or model.usual_workload(images),
        suffix=ladder.suffix,
        ckpt=ckpt,
        loss=loss,
        optimizer=ladder.optimizer,
        update=ladder.update,
        rows=ladder.rows,
        precision=precision or model.precision,
        attention=ladder.attention or model.usual_attention,
        norm=ladder.norm,
        clip=ladder.clip,
        blocks=ladder.blocks,
        dropout=ladder.dropout,
        lora=ladder.lora,
        parallel=ladder.parallel,
        world=ladder.world,
        compile=compiled,
    )


def command_of(ladder: Ladder, model: str, rung: Rung, run: RunSpec | EntryRun, *, simulated: bool) -> str:
    """What to type to climb this rung alone: everything that was decided is said."""
    options = {"entry": model, "seq": run.seq} if isinstance(run, EntryRun) else _step_options(ladder, model, run)
    options |= {
        "device": "simulated" if simulated else run.device.rules,
        "gpu": run.device.name if simulated else None,
        "gate": None if ladder.gate_bytes is None else format_exact_bytes(ladder.gate_bytes),
        "gate-on": ladder.gate_on,
        "warmup": ladder.warmup,
        "steps": ladder.steps,
        "min-time": ladder.min_time_s or None,
        "timeout": ladder.timeout_s,
        "repeat": None if ladder.repeat == 1 else ladder.repeat,
    }
    words = ["memplan", "ladder", str(rung)]
    for option, value in options.items():
        if value is not None:
            words += [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]
    switches = {"no-parity": not ladder.parity, "trace": ladder.trace, "allow-shared": ladder.allow_shared}
    return shlex.join([*words, *(f"--{name}" for name, on in switches.items() if on)])


def _step_options(ladder: Ladder, name: str, run: RunSpec) -> dict[str, Any]:
    step = run.step
    return {
        "model": name,
        "impl": ladder.impl,
        "seq": step.seq,
        "images": step.images if run.model.images else step.images or None,
        "loss": step.loss,
        "precision": step.precision,
        "optimizer": step.optimizer,
        "update": None if step.update == "step" else step.update,
        "rows": None if step.rows == "full" else step.rows,
        "attention": step.attention,
        "norm": step.norm,
        "clip": step.clip,
        "workload": None if step.workload in ("lm", "vlm", "classify") else step.workload,
        "suffix": step.suffix or None,
        "blocks": step.blocks or None,
        "dropout": step.dropout or None,
        "lora": step.lora or None,
        "parallel": None if step.parallel == "single" else step.parallel,
        "world": None if step.world == 1 else step.world,
        "freeze": ladder.freeze,
        "compile": None if step.compile == "off" else step.compile,
    }
