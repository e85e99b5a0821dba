"""What surrounds the blocks: the batch, rotary tables, masks, and the embedding's whole tables.

Letters: `B` batch, `S` sequence, `H` hidden, `D` head size, `V` vocabulary.
"""

from memplan.estimate import states
from memplan.estimate.parts import Widths
from memplan.record.memory import MemoryBreakdown
from memplan.spec.run import RunSpec


def static_memory(run: RunSpec) -> MemoryBreakdown:
    """Bytes alive between two steps, gradients released: parameters, buffers, optimizer state and the batch."""
    return MemoryBreakdown(
        params=states.param_bytes(run),
        buffers=states.buffer_bytes(run),
        optimizer=states.optimizer_bytes(run),
        other=batch_bytes(run),
    )


def batch_bytes(run: RunSpec) -> int:
    """Bytes of the batch, alive for the whole step.

    Formula, a sample: tokens and labels, 8*S each; with images the fp32 patches 4 * crops * patches * patch_dim, the
    pooled patches' indices 8*T*p, the image tokens' places 8*T and their mask S.
    """
    step, vision, connector = run.step, run.model.vision, run.model.connector
    sizes = [8 * step.seq, 8 * step.seq]
    if vision is not None and connector is not None and step.images:
        tokens = run.model.image_tokens(step.images)
        pixels = 4 * step.images * vision.num_patches * vision.patch_dim
        sizes += [pixels, 8 * tokens * connector.pool, 8 * tokens, step.seq]
    return sum(states.rounded(step.batch * size, run.device.rules) for size in sizes)


def tables_bytes(run: RunSpec) -> int:
    """Bytes that every block shares and that stay to the end of backward.

    Formula: cosines and sines [S, D] in the residual's dtype (fp32 where rotation is) or the learned positions' indices
    8*S, and the fp32 mask where SDPA in
    fp32 keeps it as it is or checkpointing keeps it as an input.
    """
    spec = run.model.decoder
    total = mask_bytes(run) if mask_stays(run) else 0
    if spec.positions == "rope":
        table = 4 if spec.rope_fp32 else Widths.of(run).residual
        return total + 2 * states.rounded(run.step.seq * spec.head_dim * table, run.device.rules)
    return total + states.rounded(8 * run.step.seq, run.device.rules)


def passing_bytes(run: RunSpec) -> int:
    """Bytes of the mask where it is dropped when the decoder's forward ends."""
    return 0 if mask_stays(run) else mask_bytes(run)


def mask_stays(run: RunSpec) -> bool:
    """Whether anything keeps the fp32 mask for backward."""
    return (run.step.precision == "fp32" and run.step.attention == "sdpa") or run.step.ckpt != "none"


def mask_bytes(run: RunSpec) -> int:
    """Bytes of the additive fp32 mask: [B, 1, S, S] where it is dense, [1, 1, S, S] for causal eager attention."""
    if run.model.decoder.mask == "dense":
        return 4 * run.step.micro_batch * run.step.seq**2
    return 4 * run.step.seq**2 if run.step.attention == "eager" else 0


def table_bytes(run: RunSpec) -> int:
    """Bytes of the concatenated embedding table of a model with extra rows; 0 for the others."""
    spec = run.model.decoder
    return (spec.vocab + spec.extra_vocab) * spec.hidden * states.param_width(run) if spec.extra_vocab else 0


def embedding_grad_bytes(run: RunSpec, pending: int) -> int:
    """Bytes of the embedding's gradients at their largest moment.

    Formula: zeros of the whole table, extra rows included, beside a tied head's `pending` gradient; and their sum,
    where that gradient is a transposed view, which is not added to in place (one product in fp32 or bf16; several
    products or autocast's cast make a tensor of their own).
    Source: aten embedding_dense_backward; InputBuffer::accumulate, torch/csrc/autograd/input_buffer.cpp, torch 2.13.
    """
    spec = run.model.decoder
    groups = [group for group in states.param_groups(run.model) if group.name in ("embedding", "extra")]
    if not any(group.trainable for group in groups):
        return pending
    dense = (spec.vocab + spec.extra_vocab) * spec.hidden * states.param_width(run)
    view = run.step.loss_kind == "full" and run.step.precision != "bf16-mixed"
    return pending + dense + (pending if view else 0)
