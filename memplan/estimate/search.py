"""The largest batch and the longest sample that fit, by bisection over the estimate."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from memplan.estimate.peak import peak_of
from memplan.record.fit import SEQ_STEP
from memplan.spec.model import CLASSIFIERS
from memplan.spec.run import RunSpec


def max_batch(run: RunSpec, gate_bytes: int, *, peak_bytes: int | None = None) -> int:
    """The largest batch whose estimated peak is at or under `gate_bytes`, `run`'s chunks kept; 0 when none is.

    With C chunks the batch is a multiple of C. `peak_bytes`: the peak of `run` itself, where it is known.
    """
    chunks = run.step.chunks
    near = run.step.batch // chunks
    known = {} if peak_bytes is None else {near: peak_bytes}
    return chunks * largest(
        lambda micro_batch: peak_with(run, batch=micro_batch * chunks), gate_bytes, near=near, known=known
    )


def max_seq(run: RunSpec, gate_bytes: int, *, peak_bytes: int | None = None) -> int | None:
    """The longest sample, a multiple of 64 tokens and no longer than the model takes, with which `run`'s batch stays at
    or under `gate_bytes`; 0 when none does, None where no length is the user's to choose. `peak_bytes`: the peak of
    `run` itself, where it is known."""
    if run.model.family in CLASSIFIERS:
        return None
    first = run.model.image_tokens(run.step.images) // SEQ_STEP + 1
    most = run.model.decoder.max_positions // SEQ_STEP - first + 1
    near = min(max(run.step.seq // SEQ_STEP - first + 1, 1), most)
    known = {near: peak_bytes} if peak_bytes is not None and run.step.seq == (first + near - 1) * SEQ_STEP else {}
    found = largest(
        lambda count: peak_with(run, seq=(first + count - 1) * SEQ_STEP), gate_bytes, most=most, near=near, known=known
    )
    return (first + found - 1) * SEQ_STEP if found else 0


def peak_with(run: RunSpec, **changes: Any) -> int:
    """The peak of `run` with another size."""
    return int(peak_of(dataclasses.replace(run, step=dataclasses.replace(run.step, **changes))))


def largest(
    peak: Callable[[int], int],
    gate_bytes: int,
    *,
    most: int | None = None,
    near: int = 1,
    known: Mapping[int, int] | None = None,
) -> int:
    """The largest count from 1 to `most` whose peak is at or under `gate_bytes`, sought from `near` on; 0 when none is.
    `known`: peaks by their counts.

    More samples or tokens never need less memory (tests/estimate/test_search.py), and every moment grows linearly or
    faster, so that the peak is convex: a line through two counts that fit leads to one that fits no more or nearly,
    and the line between one that fits and one that does not to one that fits.
    """
    peaks = dict(known or {})

    def at(count: int) -> int:
        if count not in peaks:
            peaks[count] = peak(count)
        return peaks[count]

    if most is not None and most < 1:
        return 0
    if at(near) > gate_bytes:
        near = 1
    if at(near) > gate_bytes:
        return 0
    low, high = near, near + 1
    while (most is None or high <= most) and at(high) <= gate_bytes:
        slope = (at(high) - at(low)) / (high - low)
        step = int((gate_bytes - at(high)) / slope) + 1 if slope else high
        low, high = high, high + max(1, min(step, 63 * high))
    if most is not None and high > most:
        if at(most) <= gate_bytes:
            return most
        high = most
    while high - low > 1:
        rise = at(high) - at(low)
        middle = low + int((gate_bytes - at(low)) / rise * (high - low)) if rise else low
        middle = min(max(middle, low + 1), high - 1)
        if at(middle) > gate_bytes:
            high = middle
        elif at(middle + 1) > gate_bytes:
            return middle
        else:
            low = middle + 1 if middle + 1 < high else middle
    return low
