"""Selective checkpointing: within a block, keep the results of some ops and run the others again.

The standing policy keeps what is dear to compute: attention, collectives and every second matrix product; everything
else runs again. Products are counted separately in forward and in the recomputation, so that both decide alike
whatever number of them a block has.
"""

from collections.abc import Callable

from memplan.step.region import Contexts


def selective_contexts(ops: tuple[str, ...] = ()) -> Callable[[], Contexts]:
    """What makes the contexts of one call of a region: of the standing policy, or of one that keeps just `ops`."""
    raise NotImplementedError
