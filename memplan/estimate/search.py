"""The largest batch and the longest sample that fit, by bisection over the estimate."""

import dataclasses
import math
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

CLEAR = 200
"""Of a card, the share by which a peak stays below it, not split as much as is known of another size, that need not be
looked at."""
Place = Callable[[Tape], int]
"""How blocks are told of a ledger: `blocks.place`, or `blocks.place_few`, with which a size may be one too large or too
small where it meets the limit within 0.2 %."""


def max_batch(
    run: RunSpec,
    gate_bytes: int,
    answer: Estimate | None = None,
    told: dict[RunSpec, int] | None = None,
    *,
    placing: Place = place,
) -> int:
    """The largest batch whose estimated peak is at or under `gate_bytes`, `run`'s chunks kept; 0 when none is.

    With C chunks the batch is a multiple of C. `answer`: what is known of `run` itself; `told` takes the peak of the
    largest.
    """
    chunks = run.step.chunks
    return chunks * within(
        lambda micro_batch: with_size(run, batch=micro_batch * chunks),
        gate_bytes,
        answer,
        told,
        placing=placing,
        near=run.step.micro_batch,
        rise_bytes=0 if answer is None else answer.per_sample_bytes + answer.logits_per_sample_bytes,
    )


def max_seq(
    run: RunSpec,
    gate_bytes: int,
    answer: Estimate | None = None,
    told: dict[RunSpec, int] | None = None,
    *,
    placing: Place = place,
) -> int | None:
    """The longest sample, a multiple of 64 tokens and no longer than the model takes, with which `run`'s batch stays at
    or under `gate_bytes`; 0 when none does, None where no length is the user's to choose. `answer`: what is known of
    `run` itself; `told` takes the peak of the longest."""
    if run.model.family in CLASSIFIERS:
        return None
    step = run.step
    first = run.model.image_tokens(step.images) // SEQ_STEP + 1
    most = run.model.decoder.max_positions // SEQ_STEP - first + 1
    near = step.seq / SEQ_STEP - first + 1
    if answer is None or not 1 <= near <= most:
        near, answer = min(max(int(near), 1), most), None
    token_bytes = 0.0 if answer is None else answer.per_token_bytes + answer.logits_per_sample_bytes / step.seq
    found = within(
        lambda count: with_size(run, seq=(first + count - 1) * SEQ_STEP),
        gate_bytes,
        answer,
        told,
        placing=placing,
        most=most,
        near=near,
        rise_bytes=token_bytes * SEQ_STEP * step.micro_batch,
    )
    return (first + found - 1) * SEQ_STEP if found else 0


def with_size(run: RunSpec, **changes: Any) -> RunSpec:
    """`run` with another size."""
    return dataclasses.replace(run, step=dataclasses.replace(run.step, **changes))


def within(
    run_of: Callable[[int], RunSpec],
    gate_bytes: int,
    answer: Estimate | None,
    told: dict[RunSpec, int] | None = None,
    *,
    placing: Place,
    near: float,
    rise_bytes: float = 0,
    most: int | None = None,
) -> int:
    """The largest count whose run stays at or under `gate_bytes` with what the allocator does not split; 0 when none
    does. `answer` is that of the count `near`, `rise_bytes` what one more is thought to add.

    Peaks without what is not split come cheaper, and grow with the count: they lead to a count that is then looked at.
    The next one is taken to have as much that is not split.
    """
    tapes: dict[int, Tape] = {}
    peaks: dict[float, int] = {}
    placed: dict[float, int] = {}
    room_bytes = gate_bytes
    if answer is not None:
        peaks[near] = placed[near] = answer.peak_allocated_bytes
        room_bytes -= answer.unsplit_bytes
    clear_bytes = room_bytes if placing is place or answer is None else room_bytes - gate_bytes // CLEAR

    def peak(count: int) -> int:
        tapes[count] = write_step(run_of(count))
        return int(peak_bytes(tapes[count]))

    def fits(count: int) -> bool:
        if count not in placed and clear_bytes < room_bytes and peaks[count] <= clear_bytes:
            placed[count] = peaks[count] + gate_bytes - room_bytes
        elif count not in placed:
            placing(tapes[count])
            placed[count] = int(peak_bytes(tapes[count]))
        return placed[count] <= gate_bytes

    def sought(room_bytes: int, rise_bytes: float = 0) -> int:
        return largest(peak, room_bytes, most=most, near=near, known=peaks, rise_bytes=rise_bytes)

    found = sought(room_bytes, rise_bytes)
    while found and not fits(found):
        found = sought(gate_bytes - (placed[found] - peaks[found]))
    while found and (further := sought(gate_bytes - (placed[found] - peaks[found]))) > found and fits(further):
        found = further
    if found and told is not None:
        told[run_of(found)] = placed[found]
    return found


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
    if at(near) > gate_bytes and at(1) > gate_bytes:
        return 0
    low: float = max(count for count, num_bytes in peaks.items() if num_bytes <= gate_bytes)
    if most is not None and low >= most:
        return most
    high: float = min((count for count, num_bytes in peaks.items() if num_bytes > gate_bytes), default=0)
    slope = rise_bytes
    while not high:
        step = int((gate_bytes - at(low)) / slope) + (not rise_bytes) if slope else int(low)
        further = int(low) + min(max(step, 1), 63 * int(low) + 1)
        further = further if most is None else min(further, most)
        if at(further) > gate_bytes:
            high = further
        elif further == most:
            return most
        else:
            slope, rise_bytes = (at(further) - at(low)) / (further - low), 0
            low = further
    share = 0.0
    while math.ceil(high) - int(low) > 1:
        width, rise = high - low, at(high) - at(low)
        middle = int(low + width * (share or ((gate_bytes - at(low)) / rise if rise else 0)))
        middle = min(max(middle, int(low) + 1), math.ceil(high) - 1)
        if at(middle) > gate_bytes:
            high = middle
        elif middle + 1 >= high or at(middle + 1) > gate_bytes:
            return middle
        else:
            low = middle + 1
        share = 0.5 if 2 * (high - low) > width else 0.0  # where a line leads nowhere, halves do
    return int(low)
