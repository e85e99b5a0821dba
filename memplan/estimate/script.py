"""A step that a Python file writes over the ledger: any model or loss, in the words of this package."""

from collections.abc import Callable
from typing import Any

from memplan.estimate.blocks import Placing
from memplan.estimate.setup import Setup
from memplan.estimate.step import tape_of
from memplan.estimate.tape import Tape
from memplan.estimate.unroll import in_one
from memplan.spec.device import DeviceSpec

Script = Callable[..., Callable[[], object]]
"""(ledger, **arguments) -> the step, which is called once or twice."""


def peak_of_script(
    build: Script, arguments: dict[str, Any], device: DeviceSpec, *, steady: bool, above_start: bool = False
) -> int:
    """Allocated bytes at the peak of the step that `build` writes: of everything from the beginning through its first
    call, or of a second call where it is to be `steady`. With `above_start` less what was alive before; who leaves that
    out has run other things before, and the free blocks that those left are not known: none is larger than asked."""
    tape = tape_of(device)
    tape.setup = Setup(dtype="bfloat16", frozen=(), rank=0, adapted=(), lora_base="", computed="bfloat16", dropout=0.0)
    step = build(tape, **arguments)
    start = 0
    for _ in range(2 if steady else 1):
        if steady:
            start = len(tape.events)
        step()
    if tape.rules == "cuda" and not above_start:
        placing = Placing(in_one(tape, [True] * len(tape.allocs)))
        placing.follow(placing.asked.events)
        placing.tell(tape)
    return peak_since(tape, start, above_start=above_start)


def peak_since(tape: Tape, start: int, *, above_start: bool) -> int:
    """The most that is alive from event `start` on."""
    alive, before, peak = 0, 0, 0
    for number, event in enumerate(tape.events):
        if number == start:
            before = peak = alive
        alive += tape.allocs[event].num_bytes if event >= 0 else -tape.allocs[~event].num_bytes
        peak = max(peak, alive)
    return peak - before * above_start
