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

from memplan.models.batch import IGNORED
from memplan.step import chunked_loss
from memplan.step.builder import build_step, no_mark
from memplan.step.chunked_loss import summed_loss

SAMPLES, SEQ, HIDDEN, VOCAB = 3, 7, 16, 512
ROWS = SAMPLES * SEQ
KINDS = ["full", "chunked", "chunked-ckpt"]
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


def loss_and_grads(kind: str, chunks: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    hidden, weight, labels = inputs()
    loss = summed_loss(hidden, weight, labels, kind=kind, chunks=chunks)
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
    loss = summed_loss(hidden, weight, torch.full_like(labels, IGNORED), kind=kind, chunks=2)
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_fp32_from_bf16_states(kind: str) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    loss = summed_loss(hidden, weight, labels, kind=kind, chunks=4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_a_loss_that_leaves_out_its_last_chunk_is_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The equality above can fail."""
    original = torch.Tensor.chunk
    monkeypatch.setattr(torch.Tensor, "chunk", lambda self, num: original(self, num)[:-1])
    loss, _, _ = loss_and_grads("chunked", 2)
    monkeypatch.undo()
    assert loss < loss_and_grads("full", 1)[0] - 1


# What is kept, in units of 4 * V * R bytes: one fp32 matrix of logits


def kept(kind: str, dtype: torch.dtype, chunks: int = 3) -> tuple[int, int]:
    """Matrices of logits that stay for backward, and the bytes besides."""
    hidden, weight, labels = inputs(dtype)
    with Saved((hidden, weight, labels)) as saved:
        loss = summed_loss(hidden, weight, labels, kind=kind, chunks=chunks)
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
        summed_loss(hidden * 2, weight, labels, kind="chunked-ckpt", chunks=3)
    assert saved.num_bytes() == 4 * ROWS * HIDDEN


def test_chunked_logits_are_made_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = chunked_loss.rows_loss

    def spied(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        sizes.append(rows.size(0))
        return original(rows, weight, labels)

    monkeypatch.setattr(chunked_loss, "rows_loss", spied)
    for kind, times in (("chunked", 1), ("chunked-ckpt", 2)):
        sizes.clear()
        loss_and_grads(kind, 4)
        assert sizes[:4] == [6, 6, 6, 3]
        assert sorted(sizes) == sorted([6, 6, 6, 3] * times)


def test_without_gradients_nothing_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **options: object) -> Tensor:
        raise AssertionError("checkpoint was entered")

    monkeypatch.setattr(chunked_loss, "checkpoint", never)
    hidden, weight, labels = inputs()
    with torch.no_grad():
        losses = [summed_loss(hidden, weight, labels, kind=kind, chunks=3) for kind in KINDS]
    assert all(torch.isclose(one, other, rtol=TOLERANCE) for one, other in pairwise(losses))
    with pytest.raises(AssertionError, match="entered"):
        summed_loss(hidden, weight, labels, kind="chunked-ckpt", chunks=3)


@pytest.mark.parametrize(("loss", "expected"), [("full", 1), ("chunked:3", 1), ("chunked-ckpt:3", 0)])
def test_the_whole_step_keeps_as_many_logits_as_its_loss(loss: str, expected: int) -> None:
    """tiny-wide: the widest row of a block, F = 768, is less than a fifth of V = 4096, so that a part's logits, a third
    of them all, are the only tensors of a quarter or more."""
    step = build_step(run_of("tiny-wide", batch=2, seq=64, loss=loss), torch.device("cpu"))
    logits_bytes = 4 * 4096 * 2 * 64
    with Saved(step.model.parameters()) as saved:
        graph = step.chunk_loss(step.batch, no_mark)
    assert graph.requires_grad
    assert saved.num_bytes(at_least=logits_bytes // 4) == expected * logits_bytes
