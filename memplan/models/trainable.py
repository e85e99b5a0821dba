"""What a training step asks of a model."""

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from memplan.models.batch import Batch
from memplan.models.cache import KVCache
from memplan.models.decoder import Decoder
from memplan.models.head import Head


class Trainable(nn.Module):
    """A module that a step can train."""

    block_paths: tuple[str, ...] = ()
    """Paths of the lists of blocks that checkpointing treats; empty where its structure tells."""
    shares_kv: bool = False
    """Whether blocks leave keys and values to later blocks."""
    inner: str = ""
    """Name of the child that is somebody else's module: the paths that its owner knows start below it."""
    note: str = ""
    """Which of several codes the module chose by itself, in words."""
    vocab: int | None = None
    """Tokens that the module knows, where its spec does not say."""

    on_cache: Callable[[KVCache], None] | None = None
    """Who hears of the cache of a prefix and its suffix when both are encoded; nobody unless `verify` does."""

    @property
    @abstractmethod
    def head(self) -> Head:
        """What makes logits of the hidden states."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Final normed hidden states [B, T, H] of the T tokens that may carry a loss."""

    def read_cache(self, decoder: Decoder, cache: KVCache, suffix: Tensor) -> Tensor:
        """Hidden states [B, T, H] of the tokens `suffix` [B, T] behind those of a live cache, through whose keys and
        values their gradients reach the prefix."""
        hidden = decoder.trunk(decoder.embed(suffix, cache.num_tokens), cache=cache)
        if self.on_cache is not None:
            self.on_cache(cache)
        return hidden
