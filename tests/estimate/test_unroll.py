"""Requests block by block: those of a ledger of few blocks are those of one of which every block is run."""

from typing import Any

import pytest
from samples import asked

from memplan.backends.simulated import simulate
from memplan.estimate import estimate, stack
from memplan.estimate.step import write_step
from memplan.estimate.tape import Tape
from memplan.estimate.unroll import Requests, in_one, unrolled
from memplan.spec import RunSpec
from memplan.spec.device import card
from memplan.units import MIB

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("B4c1", {}),
    "masters and lists": ("B4c1@selective", {"precision": "bf16-masters", "optimizer": "adamw-foreach"}),
    "chunks": ("B4c2@full", {"precision": "bf16", "loss": "chunked-ckpt:4"}),
    "many chunks": ("B6c6@full", {"precision": "bf16"}),
    "units of two": ("B4c1@every:2", {"precision": "bf16"}),
    "adapters": ("B4c1", {"lora": "16"}),
    "updates in backward": ("B4c1", {"precision": "bf16", "update": "backward"}),
    "masters in backward": ("B4c1", {"precision": "bf16-masters", "update": "backward"}),
    "pieces": ("B4c1", {"precision": "bf16", "parallel": "fsdp2", "world": 4}),
    "buckets": ("B4c1", {"precision": "bf16", "parallel": "ddp", "world": 4}),
    "the host": ("B4c1@offload", {"precision": "bf16"}),
}


def run_of(name: str) -> RunSpec:
    rung, step = CASES[name]
    return asked("smollm2-135m", rung, device=card("h100-80g"), seq=1024, **step)


def large(tape: Tape) -> list[bool]:
    """What takes more than 1 MiB."""
    return [alloc.num_bytes > MIB * alloc.copies for alloc in tape.allocs]


def told(asked: Requests) -> list[tuple[int, ...]]:
    """Bytes of each request of the step, and between two of them what ended, in any order."""
    story: list[tuple[int, ...]] = []
    ended: list[int] = []
    for event in asked.events[asked.start :]:
        if event < 0:
            ended.append(-asked.sizes[~event])
            continue
        story += [tuple(sorted(ended)), (asked.sizes[event],)]
        ended = []
    return [*story, tuple(sorted(ended))]


@pytest.mark.parametrize("name", CASES)
def test_few_blocks_ask_as_all_of_them_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(name)
    few = write_step(run)
    monkeypatch.setattr(stack, "FEWEST", 10**6)
    every = write_step(run)
    assert len(few.rows) and not every.rows and len(few.events) < len(every.events)
    assert told(unrolled(few, large(few))) == told(unrolled(every, large(every)))
    assert told(in_one(few, large(few))) != told(in_one(every, large(every)))
    if run.step.chunks <= 2:
        assert told(unrolled(few, large(few))) == told(in_one(every, large(every)))
    made = [
        sorted(asked.sizes[request] for _, request in asked.late)
        for asked in (unrolled(few, large(few)), in_one(every, large(every)))
    ]
    assert made[0] == made[1]


def test_what_a_unit_hands_on_ends_in_the_next_ones_turn() -> None:
    """Three units of one tensor each, which the one behind it lets go; the last of them ends outside."""
    tape = Tape("cuda")
    tape.mark("forward")
    first = tape.allocate("x", (2 << 20,), "uint8")
    tape.rows.append(row := stack.Row(copies=3, start=len(tape.events)))
    second = tape.allocate("x", (2 << 20,), "uint8")
    del first
    row.end = len(tape.events)
    del second
    assert unrolled(tape, large(tape)).events == [0, 1, ~0, 2, ~1, 3, ~2, ~3]
    assert in_one(tape, large(tape)).events == [0, 1, ~0, ~1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_reserved_is_what_the_trace_reserves(name: str) -> None:
    run = run_of(name)
    answer, steady = estimate(run), simulate(run).steps.steady
    assert answer.reserved.likely_bytes == pytest.approx(steady.peak_reserved_bytes, rel=1e-2)  # small ones are summed
    assert answer.peak_allocated_bytes == pytest.approx(steady.peak_allocated_bytes, rel=1e-3)
