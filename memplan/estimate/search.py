"""The largest batch that fits, by bisection over the estimate."""

import dataclasses

from memplan.estimate.peak import peak_of
from memplan.spec.run import RunSpec


def max_batch(run: RunSpec, gate_bytes: int) -> int:
    """The largest batch whose estimated peak is at or under `gate_bytes`, `run`'s chunks kept; 0 when none is.

    With C chunks the batch is a multiple of C. More samples never need less memory (tests/estimate/test_search.py), so
    that the step counts up by doubling and then bisects.
    """
    chunks = run.step.chunks

    def fits(micro_batch: int) -> bool:
        step = dataclasses.replace(run.step, batch=micro_batch * chunks)
        return bool(peak_of(dataclasses.replace(run, step=step)) <= gate_bytes)

    if not fits(1):
        return 0
    fitting, failing = 1, 2
    while fits(failing):
        fitting, failing = failing, 2 * failing
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting * chunks
