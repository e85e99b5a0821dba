"""What a training step asks of a model."""

from abc import abstractmethod

from torch import Tensor, nn

from memplan.models.batch import Batch
from memplan.models.head import Head


class Trainable(nn.Module):
    """A module that a step can train."""

    block_paths: tuple[str, ...] = ()
    """Paths of the lists of blocks that checkpointing treats; empty where its structure tells."""
    shares_kv: bool = False
    """Whether blocks leave keys and values to later blocks."""

    @property
    @abstractmethod
    def head(self) -> Head:
        """What makes logits of the hidden states."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Final normed hidden states [B, T, H] of the T tokens that may carry a loss."""
