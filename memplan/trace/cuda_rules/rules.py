"""All of CUDA's rules at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from memplan.trace.cuda_rules.attention import AttentionLog, cuda_sdpa
from memplan.trace.cuda_rules.autocast import cuda_autocast
from memplan.trace.cuda_rules.generation import Generation
from memplan.trace.cuda_rules.ops import cuda_ops


@contextmanager
def cuda_rules(generation: Generation) -> Iterator[AttentionLog]:
    """Gives fake CPU tensors the ops that CUDA runs on `generation` while it is open; yields attention's choices."""
    with cuda_ops(), cuda_autocast(), cuda_sdpa(generation) as log:
        yield log
