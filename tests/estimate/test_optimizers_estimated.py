"""Optimizers over the ledger: what they keep, by hand, and whole steps, phase by phase, equal to the trace."""

import itertools
from typing import Any

import pytest
from samples import run_of
from update_runs import on_card, peaks_by_ledger, peaks_by_trace

from memplan.errors import MemplanError
from memplan.estimate.step import build, new_tape, write_step
from memplan.spec import RunSpec
from memplan.spec.step import OPTIMIZERS

MATRICES = 737_280
"""Elements of `tiny`'s 28 matrices in four blocks: 128 * (128 + 64 + 64 + 128 + 3 * 352) in each."""
TABLE = 131_072
"""Of its embedding, 1024 * 128, which is its head too."""
VECTORS = 1_152
"""Of its nine norms."""
TENSORS = 38
P = MATRICES + TABLE + VECTORS
BLOCKS_OF_256 = (MATRICES + TABLE) // 256
KEPT = {
    "adamw": 8 * P + 4 * TENSORS,
    "adamw-foreach": 8 * P + 4 * TENSORS,
    "adamw-loop": 8 * P + 4 * TENSORS,
    # codes of two moments with a scale for 256 of them, two tables; both moments whole of what is small
    "adamw-8bit": 2 * (MATRICES + TABLE + 4 * BLOCKS_OF_256) + 2 * 1024 + 8 * VECTORS,
    "adamw-8bit-paged": 2 * (MATRICES + 4 * BLOCKS_OF_256) + 2 * 1024 + 8 * VECTORS,
    # a table for every moment of each of the 29 matrices, counters, and the learning rate
    "adamw-8bit-torchao": 2 * (MATRICES + TABLE + 4 * BLOCKS_OF_256 + 29 * 1024) + 8 * VECTORS + 4 * TENSORS + 4,
    "adamw-4bit-torchao": 2 * ((MATRICES + TABLE) // 2 + 8 * BLOCKS_OF_256 + 29 * 64) + 8 * VECTORS + 4 * TENSORS + 4,
    "sgd": 0,
    "sgd-momentum": 4 * P,
    # rows and columns of each matrix: 2,336 in a block
    "adafactor": 4 * (4 * 2336 + 1024 + 128 + VECTORS) + 4 * TENSORS,
    "muon": 4 * MATRICES + 8 * (TABLE + VECTORS) + 4 * 10,
}
"""Bytes of fp32 states on the CPU, where nothing is rounded."""


def kept(run: RunSpec) -> int:
    """What the optimizer of `run` keeps between two steps."""
    tape = write_step(run)
    return sum(alloc.num_bytes for alloc in tape.allocs if alloc.category == "optimizer" and not alloc.died)


def test_every_optimizer_has_its_states_by_hand() -> None:
    assert set(KEPT) == set(OPTIMIZERS)
    assert {name: kept(run_of(optimizer=name)) for name in OPTIMIZERS} == KEPT


def test_fp32_copies_are_the_optimizers_and_the_states_theirs() -> None:
    assert kept(run_of(precision="bf16-masters")) == 12 * P + 4 * TENSORS
    assert kept(run_of(precision="bf16")) == 4 * P + 4 * TENSORS
    assert kept(run_of(precision="bf16-masters", optimizer="muon")) == 4 * P + KEPT["muon"]


def test_paged_states_are_in_unified_memory_and_counted_apart() -> None:
    assert write_step(run_of(optimizer="adamw-8bit-paged")).managed_bytes == 2 * TABLE
    assert write_step(run_of(optimizer="adamw-8bit")).managed_bytes == 0


def test_adapters_alone_have_states() -> None:
    run = run_of(lora="8:q+v")
    assert kept(run) == 8 * 4 * 8 * (128 + 128 + 128 + 64) + 4 * 16


def test_a_name_that_no_linear_has_is_refused_with_those_near_it() -> None:
    run = run_of(lora="8:q+gates")
    with pytest.raises(MemplanError, match=r"No linear of the blocks is called 'gates'\. Did you mean gate\?"):
        build(new_tape(run), run)


def test_a_base_in_4_bits_is_an_eighth_of_fp32_with_its_scales() -> None:
    """A byte for two elements, an 8-bit scale for 64, an fp32 one for 256 of those; two tables and a mean each."""
    tape = write_step(run_of(lora="8@nf4"))
    base = sum(
        alloc.num_bytes
        for parameter in tape.parameters
        if parameter.component == "blocks" and not parameter.requires_grad and len(parameter.shape) == 2
        for alloc in (tape.allocs[storage.index] for storage in (parameter.storage, *parameter.state))
    )
    nested = 4 * sum(-(-n // (64 * 256)) for n in (16384, 8192, 8192, 16384, 45056, 45056, 45056))
    assert base == MATRICES // 2 + MATRICES // 64 + 4 * nested + 28 * 4 * (16 + 256 + 1)
    adapters = 4 * 8 * (256 + 192 + 192 + 256 + 3 * 480)
    assert sum(p.numel * p.copies for p in tape.parameters) == P + adapters


STEPS: dict[str, dict[str, Any]] = {
    "adafactor, clipped": {"optimizer": "adafactor", "clip": 1.0, "chunks": 2},
    "muon over fp32 copies": {"optimizer": "muon", "precision": "bf16-masters"},
    "loop in backward": {"optimizer": "adamw-loop", "update": "backward", "precision": "bf16-masters"},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_trace_in_every_phase(name: str) -> None:
    run = on_card(**STEPS[name])
    assert peaks_by_ledger(run) == peaks_by_trace(run)


@pytest.mark.slow
def test_adapters_beside_a_router_equal_the_trace() -> None:
    run = run_of("tiny-moe", lora="8", update="backward")
    assert peaks_by_ledger(run) == peaks_by_trace(run)


MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "in backward": {"update": "backward"},
    "adapters": {"lora": "8"},
    "clipped": {"clip": 1.0, "chunks": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision", "more"),
    list(
        itertools.product(
            [name for name in OPTIMIZERS if "bit" not in name],
            ["fp32", "bf16", "bf16-masters"],
            MORE,
        )
    ),
)
def test_every_optimizer_equals_the_trace_on_either_device(optimizer: str, precision: str, more: str) -> None:
    levers = {"optimizer": optimizer, "precision": precision} | MORE[more]
    for run in (run_of(**levers), on_card(**levers)):
        assert peaks_by_ledger(run) == peaks_by_trace(run)
