"""Chunks of the loss change its memory, never its value or gradients.

Letters: `R` rows, `H` hidden, `V` vocabulary.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from samples import run_of
from saved import Saved
from torch import Tensor

from memplan.models.batch import IGNORED, Batch
from memplan.models.head import Head
from memplan.step import fused_loss, losses
from memplan.step.builder import build_step, no_mark
from memplan.step.fused_loss import part_rows
from memplan.step.losses import KL_WEIGHT, rows_loss, summed_loss
from memplan.step.region import Region

SAMPLES, SEQ, HIDDEN, VOCAB = 3, 7, 16, 512
ROWS = SAMPLES * SEQ
KINDS = ["full", "valid-rows", "chunked", "chunked-ckpt", "fused"]
TOLERANCE = 1e-5
"""Largest difference over the largest value: fp32 sums of 21 rows in another order."""


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels, a third of which are ignored, the last rows altogether."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(SAMPLES, SEQ, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).mul(0.1).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (SAMPLES, SEQ), generator=generator)
    labels[0, ::3] = IGNORED
    labels[2, 2:] = IGNORED
    return hidden, weight, labels


def loss_of(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, kind: str, chunks: int, teacher: Tensor | None = None,
    softcap: float | None = None, region: Region | None = None,
) -> Tensor:  # fmt: skip
    batch = Batch(tokens=labels, labels=labels, teacher=teacher)
    head = Head(weight=weight, softcap=softcap)
    return summed_loss(hidden, head, batch, kind=kind, chunks=chunks, region=region or Region("loss", losses.rows_loss))


def loss_and_grads(kind: str, chunks: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    hidden, weight, labels = inputs()
    loss = loss_of(hidden, weight, labels, kind=kind, chunks=chunks)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 21, 30])
def test_every_kind_gives_torchs_loss_and_gradients(kind: str, chunks: int) -> None:
    """21 rows in 4 parts are 6, 6, 6, 3; in 5 parts the last has one row, an ignored one; 30 is more than there are."""
    hidden, weight, labels = inputs()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    expected = expected.detach()
    assert hidden.grad is not None
    assert hidden.grad[0, 0].abs().max() == 0, "an ignored row gives no gradient"
    for found, reference in zip(loss_and_grads(kind, chunks), (expected, hidden.grad, weight.grad), strict=True):
        assert found is not None
        assert reference is not None
        torch.testing.assert_close(found, reference, rtol=0, atol=TOLERANCE * float(reference.abs().max()))


def test_recomputed_chunks_are_bitwise_the_chunks() -> None:
    for found, reference in zip(loss_and_grads("chunked-ckpt", 4), loss_and_grads("chunked", 4), strict=True):
        assert torch.equal(found, reference)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_only_ignored_rows_give_zero_not_nan(kind: str) -> None:
    hidden, weight, labels = inputs()
    loss = loss_of(hidden, weight, torch.full_like(labels, IGNORED), kind=kind, chunks=2)
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_fp32_from_bf16_states(kind: str) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    loss = loss_of(hidden, weight, labels, kind=kind, chunks=4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_a_loss_that_leaves_out_its_last_chunk_is_another_loss() -> None:
    """The equality above can fail."""
    hidden, weight, labels = inputs()
    labels[1:] = IGNORED
    assert loss_of(hidden, weight, labels, kind="chunked", chunks=2) < loss_and_grads("full", 1)[0] - 1


# A teacher, a soft cap


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, teacher: Tensor, softcap: float | None) -> Tensor:
    """Cross-entropy and divergence in fp64, written out."""

    def log_probs(states: Tensor) -> Tensor:
        logits = states.double().flatten(0, 1) @ weight.double().T
        return torch.log_softmax(logits if softcap is None else torch.tanh(logits / softcap) * softcap, dim=-1)

    student, towards = log_probs(hidden), log_probs(teacher).detach()
    valid = labels.flatten() != IGNORED
    entropy = -student[valid].gather(1, labels.flatten()[valid][:, None]).sum()
    return entropy + KL_WEIGHT * (towards.exp() * (towards - student))[valid].sum()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_distillation_is_the_same_loss_in_every_kind(kind: str, softcap: float | None) -> None:
    """One head for both: its gradient comes from the student's side alone."""
    hidden, weight, labels = inputs()
    teacher = torch.randn(SAMPLES, SEQ, HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad(reference(hidden, weight, labels, teacher, softcap), (hidden, weight))
    loss = loss_of(hidden, weight, labels, kind=kind, chunks=4, teacher=teacher, softcap=softcap)
    torch.testing.assert_close(loss.double(), reference(hidden, weight, labels, teacher, softcap), rtol=1e-5, atol=0)
    for found, grad in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(found, grad, rtol=0, atol=TOLERANCE * float(grad.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_head_gets_no_gradient(kind: str) -> None:
    hidden, weight, labels = inputs()
    loss_of(hidden, weight.detach(), labels, kind=kind, chunks=4).backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, loss_and_grads("full", 1)[1])
    assert weight.grad is None


@pytest.mark.parametrize("loss", ["valid-rows", "chunked:3", "chunked-ckpt:3", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("workload", ["lm", "distill"])
def test_whole_steps_agree(workload: str, precision: str, loss: str) -> None:
    full, variant = (
        build_step(run_of("tiny", workload=workload, precision=precision, chunks=2, loss=kind), torch.device("cpu"))
        for kind in ("full", loss)
    )
    bound = 1e-5 if precision == "fp32" else 2e-2
    assert variant.accumulate().item() == pytest.approx(full.accumulate().item(), rel=bound)
    for (name, one), other in zip(full.model.named_parameters(), variant.model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        bound = 2e-5 if precision == "fp32" else 0.1
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=bound * float(one.grad.abs().max()), msg=name)


# What is kept, in units of 4 * V * R bytes: one fp32 matrix of logits


def kept(kind: str, dtype: torch.dtype, chunks: int = 3) -> tuple[int, int]:
    """Matrices of logits that stay for backward, and the bytes besides."""
    hidden, weight, labels = inputs(dtype)
    with Saved((hidden, weight, labels)) as saved:
        loss = loss_of(hidden, weight, labels, kind=kind, chunks=chunks)
    assert loss.requires_grad
    unit = 4 * VOCAB * ROWS
    return divmod(saved.num_bytes(), unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_keep_as_much_as_the_whole_and_recomputed_chunks_keep_no_logits(dtype: torch.dtype) -> None:
    """The log-probabilities of every row, fp32, whatever dtype the logits had; beside them one number a chunk, the
    weight of its rows."""
    assert kept("full", dtype) == (1, 4)
    assert kept("chunked", dtype) == (1, 3 * 4)
    assert kept("chunked-ckpt", dtype) == (0, 0)


def test_recomputed_chunks_keep_their_rows() -> None:
    """Rows that nothing else holds, to see them counted: R * H fp32."""
    hidden, weight, labels = inputs()
    with Saved((weight, labels)) as saved:
        loss_of(hidden * 2, weight, labels, kind="chunked-ckpt", chunks=3)
    assert saved.num_bytes() == 4 * ROWS * HIDDEN


def test_chunked_logits_are_made_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def spied(rows: Tensor, head: Head, labels: Tensor, teacher: Tensor | None = None) -> Tensor:
        sizes.append(rows.size(0))
        return rows_loss(rows, head, labels, teacher)

    monkeypatch.setattr(losses, "rows_loss", spied)
    for kind, times in (("chunked", 1), ("chunked-ckpt", 2)):
        sizes.clear()
        loss_and_grads(kind, 4)
        assert sizes[:4] == [6, 6, 6, 3]
        assert sorted(sizes) == sorted([6, 6, 6, 3] * times)


def test_without_gradients_nothing_is_recomputed() -> None:
    region = Region("loss", rows_loss)
    hidden, weight, labels = inputs()
    with torch.no_grad():
        found = [loss_of(hidden, weight, labels, kind=kind, chunks=3, region=region) for kind in KINDS]
    assert all(torch.isclose(one, other, rtol=TOLERANCE) for one, other in pairwise(found))
    assert (region.num_calls, region.num_checkpointed) == (3, 0)
    loss_of(hidden, weight, labels, kind="chunked-ckpt", chunks=3, region=region).backward()
    assert (region.num_calls, region.num_checkpointed) == (9, 3)


@pytest.mark.parametrize(
    ("loss", "expected"), [("full", 1), ("valid-rows", 1), ("chunked:3", 1), ("chunked-ckpt:3", 0)]
)
def test_the_whole_step_keeps_as_many_logits_as_its_loss(loss: str, expected: int) -> None:
    """tiny-wide: the widest row of a block, F = 768, is less than a fifth of V = 4096, so that a part's logits, a third
    of them all, are the only tensors of a quarter or more."""
    step = build_step(run_of("tiny-wide", batch=2, seq=64, loss=loss), torch.device("cpu"))
    logits_bytes = 4 * 4096 * 2 * 64
    with Saved(step.model.parameters()) as saved:
        graph = step.chunk_loss(step.batch, no_mark)
    assert graph.requires_grad
    assert saved.num_bytes(at_least=logits_bytes // 4) == expected * logits_bytes


def test_the_fused_loss_keeps_gradients_and_no_logits() -> None:
    """The matrix's gradient V * H and the rows' R * H, fp32, made in forward."""
    hidden, weight, labels = inputs()
    with Saved((hidden, weight, labels)) as saved:
        loss_of(hidden, weight, labels, kind="fused", chunks=1)
    assert saved.num_bytes() == 4 * (VOCAB * HIDDEN + ROWS * HIDDEN)


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "size"),
    [(21, 16, 512, 1), (8192, 4096, 128_256, 256), (4096, 4096, 4096, 4096), (1000, 64, 200, 256)],
)
def test_a_part_of_the_fused_loss_is_as_liger_cuts_it(rows: int, hidden: int, vocab: int, size: int) -> None:
    """The power of two from R / ceil(V / H) up: 8192 / 32 = 256; 1000 / 4 = 250 makes 256."""
    assert part_rows(rows, hidden, vocab) == size


def test_whose_fused_code_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's before cut-cross-entropy's, on CUDA alone and without a teacher; the step's note names it."""
    installed: set[str] = set()
    monkeypatch.setattr(fused_loss, "find_spec", lambda name: object() if name in installed else None)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert fused_loss.fused_implementation(cuda, distill=False) == "memplan"
    installed.add("cut_cross_entropy")
    assert fused_loss.fused_implementation(cuda, distill=False) == "cut-cross-entropy"
    installed.add("liger_kernel")
    assert fused_loss.fused_implementation(cuda, distill=False) == "liger-kernel"
    assert fused_loss.fused_implementation(cuda, distill=True) == "memplan"
    assert fused_loss.fused_implementation(cpu, distill=False) == "memplan"
    assert build_step(run_of("tiny", loss="fused"), cpu).note == "the fused loss is memplan's code"
    assert build_step(run_of("tiny"), cpu).note == ""
