"""Keys and values of the tokens so far, connected with the nodes that made them; as `memplan.models.cache`."""

from memplan.estimate.tape import Tensor
from memplan.estimate.views import cat

Past = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""One layer's keys and values [B, K, T, D], piece by piece."""


class KVCache:
    """The layers of a decoder."""

    def __init__(self) -> None:
        self.layers: dict[int, Past] = {}
        """By number of the block."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are here."""
        return sum(piece.shape[2] for piece in self.layer(0)[0])

    def layer(self, index: int) -> Past:
        """The layer of block `index`, empty before its first piece."""
        return self.layers.get(index, ((), ()))

    def append(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Adds a piece to the layer of block `index`."""
        before = self.layer(index)
        self.layers[index] = (*before[0], keys), (*before[1], values)


def joined(past: Past, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens, the new ones last."""
    if not past[0]:
        return keys, values
    return cat((*past[0], keys), 2), cat((*past[1], values), 2)
