"""Blocks and segments of the ledger's requests: by hand, and as the trace has them."""

import dataclasses

import pytest
from family_runs import config_run
from models.hf_configs import SMALL

from memplan.backends.simulated import simulate
from memplan.estimate import estimate
from memplan.estimate.blocks import place
from memplan.estimate.reading import peak_bytes
from memplan.estimate.search import max_batch
from memplan.estimate.step import write_step
from memplan.estimate.tape import Tape
from memplan.models.registry import model_spec
from memplan.spec import RunSpec, StepSpec
from memplan.spec.device import card
from memplan.units import MIB


def request(tape: Tape, mib: float, *, copies: int = 1) -> object:
    """A tensor of so many MiB."""
    return tape.allocate("x", (int(mib * MIB),), "uint8", copies=copies)


def test_a_freed_block_is_given_whole_to_what_leaves_a_mib_of_it_or_less() -> None:
    tape = Tape("cuda")
    tape.mark("forward")
    first, between = request(tape, 5), request(tape, 1.5)
    del first
    second = request(tape, 4)
    del second
    third = request(tape, 3)
    tape.mark("end")
    assert place(tape) == 20 * MIB  # one segment of the large pool
    assert [alloc.num_bytes / MIB for alloc in tape.allocs] == [5, 1.5, 5, 3]  # 3 leaves 2, which are split off
    assert peak_bytes(tape) == 6.5 * MIB
    del between, third


def test_copies_are_blocks_of_their_own() -> None:
    tape = Tape("cuda")
    tape.mark("forward")
    held = request(tape, 3 * 13, copies=13)
    tape.mark("end")
    tape.allocs[0].num_bytes = 13 * 3 * MIB
    assert place(tape) == 3 * 20 * MIB  # six of 3 MiB in each, the last of which keeps what is left of it: 2 MiB
    assert tape.allocs[0].num_bytes == 13 * 3 * MIB
    del held


def test_the_cpu_gives_what_is_asked_for() -> None:
    tape = Tape("cpu")
    tape.mark("forward")
    held = request(tape, 5)
    del held
    again = request(tape, 4.5)
    tape.mark("end")
    assert place(tape) == peak_bytes(tape) == 5 * MIB
    del again


CASES = [
    ("mixtral", 4, 128, {"precision": "bf16-mixed"}),
    ("mixtral", 16, 256, {"precision": "bf16-mixed"}),
    ("gpt_oss", 16, 256, {"precision": "bf16-mixed", "attention": "eager"}),
    ("gpt_oss", 4, 128, {"ckpt": "every:2", "attention": "eager"}),
    ("llama", 4, 256, {"precision": "bf16-masters"}),
    ("llama", 4, 256, {"update": "backward"}),
    ("llama", 4, 256, {"chunks": 4, "ckpt": "full"}),
]


@pytest.mark.parametrize(
    ("family", "batch", "seq", "step"),
    [*CASES[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_few_blocks_are_placed_as_the_trace_places_them(
    family: str, batch: int, seq: int, step: dict[str, object]
) -> None:
    run = config_run(SMALL[family], batch=batch, seq=seq, **step)
    tape = write_step(run)
    place(tape)
    steady = simulate(run).steps.steady
    assert peak_bytes(tape) == steady.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "step"),
    [("qwen3-0.6b", {}), ("qwen3-0.6b", {"ckpt": "full"}), ("bert-base", {"workload": "lm", "seq": 512}), ("gpt2", {})],
)
def test_a_deep_stack_is_placed_nearly_as_the_trace_places_it(model: str, step: dict[str, object]) -> None:
    values = {"batch": 4, "seq": 512, "precision": "bf16-mixed", "attention": model_spec(model).usual_attention} | step
    run = RunSpec(model=model_spec(model), step=StepSpec(**values), device=card("h100-80g"))
    tape = write_step(run)
    reserved_bytes, steady = place(tape), simulate(run).steps.steady
    assert abs(peak_bytes(tape) / steady.peak_allocated_bytes - 1) < 0.002
    assert abs(reserved_bytes / steady.peak_reserved_bytes - 1) < 0.01


@pytest.mark.parametrize("gate", [30, 60])
def test_the_largest_batch_fits_with_its_blocks_placed(gate: int) -> None:
    run = RunSpec(model=model_spec("gpt2"), step=StepSpec(batch=2, seq=512, precision="bf16"), device=card("a100-80g"))
    found = max_batch(run, gate << 30, estimate(run))
    peaks = []
    for batch in (found, found + 4):
        tape = write_step(dataclasses.replace(run, step=dataclasses.replace(run.step, batch=batch)))
        place(tape)
        peaks.append(peak_bytes(tape))
    assert peaks[0] <= gate << 30 < peaks[1]
