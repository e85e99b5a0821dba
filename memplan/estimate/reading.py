"""What a finished ledger says: peaks by phase, what is alive then, and of which kind."""

from collections.abc import Iterator
from typing import Any

from memplan.estimate.tape import Tape
from memplan.record.memory import PHASES, MemoryBreakdown, PhasePeak


def settle(tape: Tape, vocab: int) -> None:
    """Gives each allocation its category: what forward makes and a later phase ends is an activation, what is as wide
    as the vocabulary and belongs to the loss or its backward is logits, everything else that is not claimed a
    temporary."""
    for alloc in tape.allocs:
        if alloc.category:
            continue
        if len(alloc.shape) > 1 and alloc.phase in ("loss", "backward", "recompute") and alloc.shape[-1] == vocab:
            alloc.category = "logits"
        elif alloc.phase in ("forward", "loss", "recompute") and alloc.died not in ("forward", "loss", alloc.phase):
            alloc.category = "activations"
        else:
            alloc.category = "temps"


def totals(tape: Tape) -> Iterator[tuple[int, str, Any]]:
    """(event, phase, bytes alive behind it), the beginning of each phase included."""
    marks = iter([*tape.marks, (len(tape.events) + 1, "")])
    at, upcoming = next(marks)
    phase, alive, allocs = "init", 0, tape.allocs
    for number, event in enumerate(tape.events):
        while at <= number:
            phase = upcoming
            yield number - 1, phase, alive
            at, upcoming = next(marks)
        alive = alive + allocs[event].num_bytes if event >= 0 else alive - allocs[~event].num_bytes
        if event >= 0:
            yield number, phase, alive


def largest(tape: Tape) -> dict[str, tuple[int, int]]:
    """For each phase of the step the event behind which most is alive, and how much that is."""
    found: dict[str, tuple[int, int]] = {}
    for number, phase, alive in totals(tape):
        if phase not in found or alive > found[phase][1]:
            found[phase] = (number, alive)
    return {phase: found[phase] for phase in PHASES if phase in found and phase != "init"}


def peak_bytes(tape: Tape) -> Any:
    """The largest total of the step; an array of them where sizes are arrays."""
    peak: Any = 0
    for _, phase, alive in totals(tape):
        if phase in ("init", "end"):
            continue
        if isinstance(alive, int):
            if alive > peak:
                peak = alive
        else:
            import numpy as np

            peak = np.maximum(peak, alive)
    return peak


def alive_at(tape: Tape, event: int) -> set[int]:
    """Indices of the allocations that are alive behind `event`."""
    alive: set[int] = set()
    for number in tape.events[: event + 1]:
        if number >= 0:
            alive.add(number)
        else:
            alive.discard(~number)
    return alive


def breakdown(tape: Tape, event: int) -> MemoryBreakdown:
    """Bytes alive behind `event`, by category."""
    sums: dict[str, int] = {}
    for index in alive_at(tape, event):
        alloc = tape.allocs[index]
        sums[alloc.category] = sums.get(alloc.category, 0) + alloc.num_bytes
    return MemoryBreakdown(**sums)


def phase_peaks(tape: Tape) -> tuple[PhasePeak, ...]:
    """The largest moment of each phase, in the order of a step."""
    return tuple(
        PhasePeak(phase=phase, moment=moment(tape, event), breakdown=breakdown(tape, event))
        for phase, (event, _) in largest(tape).items()
    )


def moment(tape: Tape, event: int) -> str:
    """What happens at `event`, in words: the op and its module."""
    if event < 0 or tape.events[event] < 0:
        return "its beginning"
    alloc = tape.allocs[tape.events[event]]
    op = alloc.op.removeprefix("_")
    return f"{op} of {alloc.part}" if alloc.part else op
