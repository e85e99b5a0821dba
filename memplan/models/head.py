"""The output head: from normed hidden states to logits.

Letters: `H` hidden, `V` vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How rows of a model's output become logits."""

    weight: Tensor | None
    """The head's matrix [V, H]; None where the model returns logits by itself."""
    bias: Tensor | None = None
    """The head's bias [V]."""
    softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap), as in Gemma 2 and 4; None leaves them."""

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [..., V] of `rows` [..., H]."""
        out = rows if self.weight is None else F.linear(rows, self.weight, self.bias)
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap
