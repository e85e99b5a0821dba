"""What surrounds the blocks: the batch, rotary tables, masks, and the embedding's whole tables.

Letters: `B` batch, `S` sequence, `H` hidden, `D` head size, `V` vocabulary.
"""

from memplan.estimate import states
from memplan.estimate.parts import Widths
from memplan.spec.run import RunSpec


def batch_bytes(run: RunSpec) -> int:
    """Bytes of the batch, alive for the whole step: tokens and labels, int64 [B, S] each."""
    return 2 * states.rounded(8 * run.step.batch * run.step.seq, run.device.rules)


def surroundings_bytes(run: RunSpec) -> int:
    """Bytes alive through one chunk's forward and backward beside the blocks: rotary tables, masks.

    Formula: cosines and sines [S, D] in the residual's dtype; an fp32 mask [B, 1, S, S] where it is dense, or one
    [1, 1, S, S] for eager attention.
    """
    spec, widths = run.model.decoder, Widths.of(run)
    total = 0
    if spec.positions == "rope":
        table = 4 if spec.rope_fp32 else widths.residual
        total += 2 * states.rounded(run.step.seq * spec.head_dim * table, run.device.rules)
    if spec.mask == "dense" or run.step.attention == "eager":
        rows = run.step.micro_batch if spec.mask == "dense" else 1
        total += 4 * rows * run.step.seq**2
    return total


def table_bytes(run: RunSpec) -> int:
    """Bytes of the concatenated embedding table of a model with extra rows; 0 for the others."""
    spec = run.model.decoder
    return (spec.vocab + spec.extra_vocab) * spec.hidden * states.param_width(run) if spec.extra_vocab else 0


def embedding_grad_bytes(run: RunSpec) -> int:
    """Bytes of the embedding's gradient as backward makes it: dense over the whole table, extra rows included.

    Source: aten embedding_dense_backward, torch 2.13: zeros of the table's size. None when no row trains.
    """
    spec = run.model.decoder
    groups = [group for group in states.param_groups(run.model) if group.name in ("embedding", "extra")]
    if not any(group.trainable for group in groups):
        return 0
    return (spec.vocab + spec.extra_vocab) * spec.hidden * states.param_width(run)
