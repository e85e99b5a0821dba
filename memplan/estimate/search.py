"""The largest batch and the longest sample that fit, by bisection over the estimate."""

import dataclasses
from collections.abc import Callable

from memplan.estimate.peak import peak_of
from memplan.record.fit import SEQ_STEP
from memplan.spec.run import RunSpec


def max_batch(run: RunSpec, gate_bytes: int) -> int:
    """The largest batch whose estimated peak is at or under `gate_bytes`, `run`'s chunks kept; 0 when none is.

    With C chunks the batch is a multiple of C.
    """
    chunks = run.step.chunks
    return chunks * largest(lambda micro_batch: fits(run, gate_bytes, batch=micro_batch * chunks))


def max_seq(run: RunSpec, gate_bytes: int) -> int:
    """The longest sample, a multiple of 64 tokens and no longer than the model takes, with which `run`'s batch stays at
    or under `gate_bytes`; 0 when none does."""
    most = run.model.decoder.max_positions // SEQ_STEP
    first = run.model.image_tokens(run.step.images) // SEQ_STEP + 1
    found = largest(
        lambda count: first + count - 1 <= most and fits(run, gate_bytes, seq=(first + count - 1) * SEQ_STEP)
    )
    return (first + found - 1) * SEQ_STEP if found else 0


def fits(run: RunSpec, gate_bytes: int, **changes: int) -> bool:
    """Whether `run` with another size stays at or under `gate_bytes`."""
    step = dataclasses.replace(run.step, **changes)
    return bool(peak_of(dataclasses.replace(run, step=step)) <= gate_bytes)


def largest(holds: Callable[[int], bool]) -> int:
    """The largest count from 1 up that `holds`, which holds for all smaller ones; 0 when none does.

    More samples or tokens never need less memory (tests/estimate/test_search.py), so that counting up by doubling and
    then bisecting finds it.
    """
    if not holds(1):
        return 0
    fitting, failing = 1, 2
    while holds(failing):
        fitting, failing = failing, 2 * failing
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if holds(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
