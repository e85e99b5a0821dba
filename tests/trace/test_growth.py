"""A step of many blocks from the trace of a few: event for event the full trace, for every mode."""

import dataclasses

import pytest
from growth_checks import check_growth
from samples import asked

from memplan.backends.fewer import fewer_blocks
from memplan.backends.simulated import simulate, trace_steps
from memplan.spec import RunSpec
from memplan.spec.device import CPU, card
from memplan.trace.events import Trace
from memplan.trace.growth import Stack, grow, repetition

H100 = card("h100-80g")


def with_blocks(run: RunSpec, num_layers: int) -> RunSpec:
    decoder = dataclasses.replace(run.model.decoder, num_layers=num_layers)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, decoder=decoder))


CASES = [
    *(("tiny", "B4c1", {"optimizer": name}) for name in ("adamw", "adamw-foreach", "adamw-loop", "sgd")),
    ("tiny", "B4c2@full", {"loss": "chunked-ckpt:2", "precision": "bf16-mixed"}),
    ("tiny", "B4c2@every:2", {"loss": "chunked:2", "precision": "bf16-mixed"}),
    ("tiny-wide", "B2c1@every:3", {"attention": "eager"}),
    ("tiny-wide", "B4c2", {"precision": "bf16", "norm": "fused"}),
    ("tiny-gpt2", "B4c1@full", {}),
    ("tiny-molmo2", "B2c1", {"precision": "bf16-mixed"}),
]


@pytest.mark.parametrize("device", [pytest.param(CPU, marks=pytest.mark.slow), H100], ids=lambda device: device.name)
@pytest.mark.parametrize(("model", "rung", "changes"), CASES)
def test_a_grown_trace_is_the_full_one(model: str, rung: str, changes: dict[str, object], device: object) -> None:
    run = asked(model, rung, device=device, seq=32, **changes)  # type: ignore[arg-type]
    every = run.step.checkpointing.count or 1
    whole = with_blocks(run, 6 * every + 1 % every)
    check_growth(whole)


def test_simulation_says_the_same_with_and_without_growth() -> None:
    run = with_blocks(asked("tiny", "B4c2@full", device=H100, seq=32), 9)
    grown, full = simulate(run), simulate(run, grow_blocks=False)
    assert grown.grown and not full.grown
    assert dataclasses.replace(grown, grown=False) == full


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("aaaaaaa", (0, 1, 3)),
        ("aaaa", (0, 1, 0)),
        ("abababababab", (0, 2, 2)),
        ("abababababa", (0, 2, 1)),
        ("daaaaaa", (1, 1, 2)),
        ("aaaaaarfffr", (0, 1, 2)),
        ("llflflflflflf", (1, 2, 2)),
        ("abcdefgh", (0, 1, 0)),
        ("", (0, 1, 0)),
    ],
)
def test_the_longest_repetition_is_found(kinds: str, found: tuple[int, int, int]) -> None:
    assert repetition(kinds) == found


def with_pattern(run: RunSpec, **pattern: int) -> RunSpec:
    decoder = dataclasses.replace(run.model.decoder, **pattern)  # type: ignore[arg-type]
    return dataclasses.replace(run, model=dataclasses.replace(run.model, decoder=decoder))


def test_sliding_blocks_repeat_with_the_full_ones_between_them() -> None:
    check_growth(with_pattern(asked("tiny", "B2c1@full", seq=32), num_layers=16, window=8, full_every=3))


def test_a_towers_blocks_are_fewer_too() -> None:
    run = with_pattern(asked("tiny-molmo2", "B2c1@full"), num_layers=6)
    assert run.model.vision is not None
    tower = dataclasses.replace(run.model.vision, num_layers=11, layers_read=(6, 10))
    check_growth(dataclasses.replace(run, model=dataclasses.replace(run.model, vision=tower)), lists=2)


def test_the_first_blocks_are_not_cut_where_they_alone_are_checkpointed() -> None:
    run = with_blocks(asked("tiny", "B2c1@first:9", seq=32), 12)
    assert fewer_blocks(run).run is run
    check_growth(with_blocks(asked("tiny", "B2c1@first:2", seq=32), 12))


def few_blocks() -> tuple[Trace, Stack]:
    whole = with_blocks(asked("tiny", "B4c1", seq=32), 7)
    few = fewer_blocks(whole).named(())
    return trace_steps(few.run).trace, few.stacks[0]


def test_blocks_that_differ_are_not_grown() -> None:
    trace, stack = few_blocks()
    assert grow(trace, stack) is not None
    odd = next(alloc for alloc in trace.allocs if alloc.module == "decoder.blocks.2.mlp" and alloc.phase == "forward")
    odd.num_bytes += 1
    assert grow(trace, stack) is None


def test_a_tensor_freed_in_another_order_is_not_grown() -> None:
    trace, stack = few_blocks()
    frees = [
        at
        for at, event in enumerate(trace.events)
        if event < 0 and trace.places[at] == "decoder.blocks.2.mlp" and trace.allocs[~event].phase == "forward"
    ]
    first, last = frees[0], frees[-1]
    trace.events[first], trace.events[last] = trace.events[last], trace.events[first]
    assert grow(trace, stack) is None


def test_a_block_that_outlives_the_stack_is_not_grown() -> None:
    """A tensor of an inner block that is freed far from any block's story."""
    trace, stack = few_blocks()
    at = next(
        at
        for at, event in enumerate(trace.events)
        if event < 0 and trace.allocs[~event].module.startswith("decoder.blocks.1.")
    )
    event = trace.events.pop(at)
    trace.places.pop(at)
    trace.events.append(event)
    trace.places.append("decoder.norm")
    assert grow(trace, stack) is None


def test_a_clipped_step_is_traced_whole() -> None:
    """The stack of all tensors' norms grows with the number of blocks, and no block makes it."""
    run = with_blocks(asked("tiny", "B1c1", seq=16, clip=1.0), 7)
    assert fewer_blocks(run).run is run
    assert not simulate(run).grown


def test_too_few_blocks_are_traced_whole() -> None:
    run = asked("tiny", "B4c1")
    assert fewer_blocks(run).run is run
    assert not simulate(run).grown
