"""`estimate --sweep`: one rung with every combination of values of some levers. What no step can be is left out, and
counted with its reason."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.api import limit_of, one_run
from memplan.errors import MemplanError
from memplan.estimate.bands import fits
from memplan.estimate.sweep import Point, replaced, sweep_sizes
from memplan.spec import DeviceSpec, Ladder, RunSpec
from memplan.spec.device import card
from memplan.spec.model import CLASSIFIERS

SIZES = ("batch", "chunks", "seq")
"""Levers whose values are told together."""
SEVERAL = ("model", "ckpt", "loss", "precision")
"""Levers of which a ladder takes several."""
INDIVISIBLE = MemplanError("No batch of the sweep divides into its chunks.", "Sweep batch=8:64:8 with chunks=1,2,4.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep found."""

    run: RunSpec
    """The run of its first row."""
    rows: list[dict[str, Any]]
    """Model, device, sizes and swept levers of each configuration, its peak, what that is held against, whether it
    fits, and whether the peak holds what the allocator leaves unsplit: a traced one does, the CPU's leaves nothing."""
    left_out: Counter[str]
    """How many configurations no step can be, by the reason."""
    traced: bool
    """Whether peaks are the trace's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Configurations that differ in their sizes alone."""

    levers: dict[str, Any]
    """What else was swept, by name."""
    question: Ladder
    """Asks for them."""
    run: RunSpec
    """One of them, of the smallest batch."""
    points: list[Point]
    """The sizes that their steps may have."""


def sweep(question: Ladder, device: DeviceSpec, axes: Mapping[str, Sequence[Any]]) -> Swept:
    """Peaks of the one rung of `question` with every combination of `axes`. MemplanError where no step can be any of
    them."""
    refused: list[tuple[MemplanError, int]] = []
    parts = list(parts_of(question, device, axes, refused))
    rows = []
    for part, peaks in zip(parts, told(parts), strict=True):
        for point, found in peaks.items():
            if isinstance(found, MemplanError):
                refused.append((found, 1))
                continue
            peak_bytes, fits_in = found
            limits = {"gate_bytes": part.question.gate_bytes, "limit_bytes": limit_of(part.question, part.run.device)}
            named = {"model": part.run.model.name, "device": part.run.device.name} | dict(
                zip(SIZES, point, strict=True)
            )
            levers = {name: value for name, value in part.levers.items() if name != "gpu"}  # it is the device
            unsplit = is_traced(part) or part.run.device.rules == "cpu"
            told_of = {"peak_allocated_bytes": peak_bytes, "fits": fits_in, **limits, "unsplit": unsplit}
            rows.append(named | levers | told_of)
    if not rows:
        raise next((error for error, _ in refused if error is not INDIVISIBLE), INDIVISIBLE)
    left_out: Counter[str] = Counter()
    for error, count in refused:
        left_out[reason(error)] += count
    return Swept(run=parts[0].run, rows=rows, left_out=left_out, traced=all(is_traced(part) for part in parts))


def reason(error: MemplanError) -> str:
    """Why a configuration is left out."""
    return "the batch does not divide into its chunks" if error is INDIVISIBLE else error.message.rstrip(".;")


def parts_of(
    question: Ladder, device: DeviceSpec, axes: Mapping[str, Sequence[Any]], refused: list[tuple[MemplanError, int]]
) -> Iterator[Part]:
    """The configurations that a step can be, in the order of `axes`; the others are added to `refused`, with how many
    they are."""
    rung = question.rungs[0]
    others = {name: values for name, values in axes.items() if name not in SIZES}
    batches, chunks = axes.get("batch", (rung.batch,)), axes.get("chunks", (rung.chunks,))
    lengths = axes.get("seq", (rung.seq,))
    for chosen in itertools.product(*others.values()):
        levers = dict(zip(others, chosen, strict=True))
        asked, on = with_levers(question, levers), on_card(device, levers.get("gpu"))
        run: RunSpec | None = None
        seqs: dict[tuple[int, int | None], int] = {}
        for parts, seq in itertools.product(chunks, lengths):
            num_whole = sum(not batch % parts for batch in batches)
            refused.append((INDIVISIBLE, len(batches) - num_whole))
            try:
                if run is None or run.model.family in CLASSIFIERS:
                    smallest = dataclasses.replace(rung, batch=parts, chunks=parts, seq=seq)
                    found = one_run(dataclasses.replace(asked, rungs=(smallest,)), on, verb="estimate")
                else:
                    found = replaced(run, {"batch": parts, "chunks": parts, "seq": seq or run.step.seq})
            except MemplanError as error:
                refused.append((error, num_whole))
                continue
            run, seqs[parts, seq] = run or found, found.step.seq
        points = [
            (batch, parts, seqs[parts, seq])
            for batch, parts, seq in itertools.product(batches, chunks, lengths)
            if (parts, seq) in seqs and not batch % parts
        ]
        if run is not None and points:
            yield Part(levers=levers, question=asked, run=run, points=points)


def with_levers(question: Ladder, levers: Mapping[str, Any]) -> Ladder:
    """`question` with other values of its levers."""
    values: dict[str, Any] = {
        name: (value,) if name in SEVERAL else value for name, value in levers.items() if name != "gpu"
    }
    return dataclasses.replace(question, **values)


def on_card(device: DeviceSpec, name: str | None) -> DeviceSpec:
    """The card `name`, or `device` where none is swept."""
    if name is None:
        return device
    if device.rules == "cpu":
        raise MemplanError(f"--device cpu and --sweep gpu={name} ask for two devices.", "Leave one out.")
    return card(name)


def told(parts: Sequence[Part]) -> Iterator[dict[Point, tuple[int, bool | None] | MemplanError]]:
    """Peak of each point of each part and whether it fits, or why there is none; by formula, and of a module of the
    user's by trace."""
    if own := [part for part in parts if is_traced(part)]:
        from memplan.api_module import check_sweep

        check_sweep([part.run for part in own], sum(len(part.points) for part in own))
    for part in parts:
        yield traced_points(part) if is_traced(part) else formula_points(part)


def is_traced(part: Part) -> bool:
    """Whether no formula knows the model of `part`."""
    return part.run.model.impl == "user"


def formula_points(part: Part) -> dict[Point, tuple[int, bool | None] | MemplanError]:
    """What the formulas say of the points of `part`."""
    gate_bytes, limit_bytes = part.question.gate_bytes, limit_of(part.question, part.run.device)

    def held(peak_bytes: int) -> bool | None:
        if limit_bytes is None:
            return None
        unplaced = part.run.device.rules == "cuda"
        return fits(peak_bytes, limit_bytes, gate=gate_bytes is not None, asked=unplaced)

    found = sweep_sizes(part.run, part.points)
    return {
        point: peak if isinstance(peak, MemplanError) else (peak, held(peak))
        for point, peak in ((point, found[point]) for point in part.points)
    }


def traced_points(part: Part) -> dict[Point, tuple[int, bool | None] | MemplanError]:
    """What traces say of the points of `part`."""
    from memplan.api_module import Room

    room, found = Room(part.run, part.question.gate_bytes), {}
    for point in part.points:
        found[point] = room.peak_with(**dict(zip(SIZES, point, strict=True)))
    return found
