"""The largest batch: exactly the last one that fits, and more never needs less."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import asked

from memplan.estimate import estimate
from memplan.estimate.peak import peak_of
from memplan.estimate.search import largest, max_batch
from memplan.spec import RunSpec
from memplan.units import GIB, MIB


def with_step(run: RunSpec, **changes: object) -> RunSpec:
    return dataclasses.replace(run, step=dataclasses.replace(run.step, **changes))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("gate_bytes", [30 * MIB, 75 * MIB, 300 * MIB])
def test_the_largest_batch_fits_and_the_next_does_not(gate_bytes: int, chunks: int) -> None:
    run = asked("tiny", f"B{chunks}c{chunks}")
    largest = max_batch(run, gate_bytes)
    assert largest > 0 and largest % chunks == 0
    assert estimate(with_step(run, batch=largest)).peak_allocated_bytes <= gate_bytes
    assert estimate(with_step(run, batch=largest + chunks)).peak_allocated_bytes > gate_bytes


def test_nothing_fits_under_less_than_the_static_memory() -> None:
    run = asked("tiny", "B1c1")
    assert max_batch(run, estimate(run).static.total_bytes - 1) == 0


SHAPES = st.fixed_dictionaries(
    {
        "seq": st.integers(16, 256),
        "ckpt": st.sampled_from(["none", "full", "every:2", "every:3"]),
        "loss": st.sampled_from(["full", "chunked:3", "chunked-ckpt:5"]),
        "precision": st.sampled_from(["fp32", "bf16", "bf16-mixed"]),
        "optimizer": st.sampled_from(["adamw", "adamw-foreach", "adamw-loop", "sgd"]),
        "attention": st.sampled_from(["sdpa", "eager"]),
        "norm": st.sampled_from(["eager", "fused"]),
    }
)


@settings(max_examples=25)
@given(
    name=st.sampled_from(["tiny", "tiny-wide", "tiny-gpt2", "smollm2-135m", "molmo2-4b"]),
    batch=st.integers(1, 40),
    chunks=st.integers(1, 4),
    shape=SHAPES,
)
def test_more_samples_never_need_less_and_parts_add_up(
    name: str, batch: int, chunks: int, shape: dict[str, object]
) -> None:
    run = with_step(asked(name, "B1c1", images=0), batch=batch * chunks, chunks=chunks, **shape)
    answer = estimate(run)
    assert peak_of(with_step(run, batch=(batch + 1) * chunks)) >= peak_of(run)  # but for what is not split off
    for phase in answer.phases:
        parts = phase.breakdown.to_dict()
        assert all(value >= 0 for value in parts.values()), (phase, parts)
        assert sum(parts.values()) == phase.breakdown.total_bytes >= answer.static.total_bytes
    assert answer.peak_allocated_bytes == max(phase.breakdown.total_bytes for phase in answer.phases)


def test_checkpointing_and_loss_chunks_lower_the_peak_of_a_long_step() -> None:
    run = with_step(asked("smollm2-135m", "B8c1"), seq=1024)
    peaks = [
        estimate(with_step(run, ckpt=ckpt, loss=loss)).peak_allocated_bytes
        for ckpt, loss in (("none", "full"), ("every:2", "full"), ("full", "full"), ("full", "chunked:8"))
    ]
    peaks.append(estimate(with_step(run, ckpt="full", loss="chunked-ckpt:8")).peak_allocated_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 5
    assert peaks[0] > 2 * peaks[-1] > GIB


@settings(max_examples=300)
@given(
    start=st.integers(1, 1000),
    line=st.sampled_from([0, 1, 7, 300]),
    square=st.sampled_from([0, 1, 40]),
    gate_bytes=st.integers(0, 100_000),
    most=st.integers(1, 2000),
    near=st.floats(1, 50),
    rise_bytes=st.sampled_from([0, 1, 7, 300]),
    known=st.booleans(),
)
def test_the_largest_count_of_any_curve_is_found(
    start: int, line: int, square: int, gate_bytes: int, most: int, near: float, rise_bytes: int, known: bool
) -> None:
    asked_for: list[int] = []

    def peak(count: float) -> int:
        asked_for.append(int(count))
        return int(start + line * count + square * count * count)

    near = min(near, most)
    memo = {near: peak(near)} if known else {}
    found = largest(peak, gate_bytes, most=most, near=near if known else int(near), known=memo, rise_bytes=rise_bytes)
    assert found == max((count for count in range(1, most + 1) if peak(count) <= gate_bytes), default=0)
    assert len(asked_for) - most < 40
    assert all(1 <= count <= most for count in asked_for)
