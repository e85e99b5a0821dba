"""The largest batch and the longest sample that fit, by bisection over the estimate."""

import dataclasses
from collections.abc import Callable
from typing import Any

from memplan.estimate.blocks import place
from memplan.estimate.reading import peak_bytes
from memplan.estimate.step import write_step
from memplan.estimate.tape import Tape
from memplan.record.fit import SEQ_STEP
from memplan.record.memory import Estimate
from memplan.spec.model import CLASSIFIERS
from memplan.spec.run import RunSpec


def max_batch(run: RunSpec, gate_bytes: int, answer: Estimate | None = None) -> int:
    """The largest batch whose estimated peak is at or under `gate_bytes`, `run`'s chunks kept; 0 when none is.

    With C chunks the batch is a multiple of C. `answer`: what is known of `run` itself.
    """
    chunks, near = run.step.chunks, run.step.micro_batch
    known: dict[float, int] = {}
    rise_bytes = 0
    if answer is not None:
        known[near] = answer.peak_allocated_bytes
        rise_bytes = answer.per_sample_bytes + answer.logits_per_sample_bytes
    return chunks * within(
        lambda micro_batch: with_size(run, batch=micro_batch * chunks),
        gate_bytes,
        known,
        most=None,
        near=near,
        rise_bytes=rise_bytes,
    )


def max_seq(run: RunSpec, gate_bytes: int, answer: Estimate | None = None) -> int | None:
    """The longest sample, a multiple of 64 tokens and no longer than the model takes, with which `run`'s batch stays at
    or under `gate_bytes`; 0 when none does, None where no length is the user's to choose. `answer`: what is known of
    `run` itself."""
    if run.model.family in CLASSIFIERS:
        return None
    step, rise_bytes = run.step, 0.0
    known: dict[float, int] = {}
    first = run.model.image_tokens(step.images) // SEQ_STEP + 1
    most = run.model.decoder.max_positions // SEQ_STEP - first + 1
    near: float = min(max(step.seq // SEQ_STEP - first + 1, 1), most)
    if answer is not None:
        own = step.seq / SEQ_STEP - first + 1
        if 1 <= own <= most:
            near, known[own] = own, answer.peak_allocated_bytes
        rise_bytes = (answer.per_token_bytes + answer.logits_per_sample_bytes / step.seq) * SEQ_STEP * step.micro_batch
    found = within(
        lambda count: with_size(run, seq=(first + count - 1) * SEQ_STEP),
        gate_bytes,
        known,
        most=most,
        near=near,
        rise_bytes=rise_bytes,
    )
    return (first + found - 1) * SEQ_STEP if found else 0


def with_size(run: RunSpec, **changes: Any) -> RunSpec:
    """`run` with another size."""
    return dataclasses.replace(run, step=dataclasses.replace(run.step, **changes))


def within(
    run_of: Callable[[int], RunSpec],
    gate_bytes: int,
    known: dict[float, int],
    *,
    most: int | None,
    near: float,
    rise_bytes: float,
) -> int:
    """The largest count whose run stays at or under `gate_bytes` with what the allocator leaves unsplit; 0 when none
    does. `known`: such peaks by their counts.

    Peaks without it come cheaper, and grow with the count: they lead to a count, which is then looked at.
    """
    peaks, room_bytes = dict(known), gate_bytes
    tapes: dict[int, Tape] = {}

    def peak(count: int) -> int:
        tapes[count] = write_step(run_of(count))
        return int(peak_bytes(tapes[count]))

    while True:
        found = largest(peak, room_bytes, most=most, near=near, known=peaks, rise_bytes=rise_bytes)
        if found in tapes:
            place(tapes[found])
            known[found] = int(peak_bytes(tapes.pop(found)))
        if not found or known[found] <= gate_bytes:
            return found
        room_bytes = gate_bytes - (known[found] - peaks[found])


def largest(
    peak: Callable[[int], int],
    gate_bytes: int,
    *,
    most: int | None = None,
    near: float = 1,
    known: dict[Any, int] | None = None,
    rise_bytes: float = 0,
) -> int:
    """The largest count from 1 to `most` whose peak is at or under `gate_bytes`, sought from `near` on; 0 when none is.
    `known`: peaks by their counts, to which those that were asked for are added. `near` may lie between two counts
    where its peak is known. `rise_bytes`: what one more count is thought to add.

    More samples or tokens never need less memory (tests/estimate/test_search.py), and every moment grows linearly or
    faster, so that the peak is convex: a line through two counts that fit leads to one that fits no more or nearly,
    and the line between one that fits and one that does not to one that fits.
    """
    peaks = {} if known is None else known

    def at(count: float) -> int:
        if count not in peaks:
            peaks[count] = peak(int(count))
        return peaks[count]

    if most is not None and most < 1:
        return 0
    if at(near) > gate_bytes:
        near = 1
    if at(near) > gate_bytes:
        return 0
    low: float = near
    high = int(near) + max(1, int((gate_bytes - at(near)) / rise_bytes) if rise_bytes else 1)
    if most is not None:
        high = max(min(high, most), int(near) + 1)
    while (most is None or high <= most) and at(high) <= gate_bytes:
        slope = (at(high) - at(low)) / (high - low)
        step = int((gate_bytes - at(high)) / slope) + 1 if slope else high
        low, high = high, high + max(1, min(step, 63 * high))
    if most is not None and high > most:
        if at(most) <= gate_bytes:
            return most
        high = most
    while high - int(low) > 1:
        rise = at(high) - at(low)
        middle = int(low + (gate_bytes - at(low)) / rise * (high - low)) if rise else int(low)
        middle = min(max(middle, int(low) + 1), high - 1)
        if at(middle) > gate_bytes:
            high = middle
        elif at(middle + 1) > gate_bytes:
            return middle
        else:
            low = middle + 1 if middle + 1 < high else middle
    return int(low)
