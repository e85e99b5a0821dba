"""Keys and values of the tokens so far, connected with the graph that made them.

Letters: `B` batch, `K` key/value heads, `T` tokens of one piece, `D` head size.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's keys and values, piece by piece: what a block may see of a cache. A block cannot append to it, so
    that it may run twice."""

    keys: tuple[Tensor, ...] = ()
    """[B, K, T, D] each, rotated."""
    values: tuple[Tensor, ...] = ()
    """[B, K, T, D] each."""

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, the new ones last."""
        if not self.keys:
            return keys, values
        return torch.cat((*self.keys, keys), dim=2), torch.cat((*self.values, values), dim=2)


@dataclass(slots=True)
class KVCache:
    """The layers of a decoder; appended to by the decoder alone, once for each block and piece."""

    layers: dict[int, KVLayer] = field(default_factory=dict)
    """By number of the block."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are here."""
        return sum(piece.size(2) for piece in self.layer(0).keys)

    def layer(self, index: int) -> KVLayer:
        """The layer of block `index`, empty before its first piece."""
        return self.layers.get(index, KVLayer())

    def append(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Adds a piece to the layer of block `index`."""
        layer = self.layer(index)
        self.layers[index] = KVLayer((*layer.keys, keys), (*layer.values, values))
