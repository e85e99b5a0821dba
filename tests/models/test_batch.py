"""A step's synthetic batch."""

import pytest
from samples import run_of

from memplan.models.batch import synthetic_batch


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_and_labels_lie_apart_as_a_data_loader_hands_them_over(batch: int) -> None:
    made = synthetic_batch(run_of(batch=batch, chunks=1, seq=8), "cpu", 0)
    assert made.labels[0, 0] == made.tokens[0, 1]
    sizes = [tensor.untyped_storage().nbytes() for tensor in (made.tokens, made.labels)]
    assert sizes == [batch * 8 * 8] * 2
    assert made.tokens.untyped_storage().data_ptr() != made.labels.untyped_storage().data_ptr()
