"""Molmo2: a vision tower and a connector whose image tokens are added to the embeddings of a decoder.

Letters: `B` batch, `S` sequence, `H` hidden, `T` image tokens of a sample, `h` width of the tower.
"""

import torch
from torch import Tensor

from memplan.models.batch import Batch
from memplan.models.cache import KVCache
from memplan.models.connector import Connector
from memplan.models.decoder import Decoder
from memplan.models.head import Head
from memplan.models.trainable import Trainable
from memplan.models.vision import VisionTower
from memplan.spec.model import ModelSpec


class Molmo2(Trainable):
    """A batch -> final normed hidden states [B, S, H]; the head is the decoder's."""

    def __init__(self, spec: ModelSpec, *, attention: str = "sdpa", norm: str = "eager", dropout: float = 0.0) -> None:
        super().__init__()
        assert spec.vision is not None
        assert spec.connector is not None
        self.decoder = Decoder(spec.decoder, attention=attention, norm=norm, dropout=dropout)
        self.vision = VisionTower(spec.vision, attention=attention)
        self.connector = Connector(spec.vision, spec.connector, spec.decoder.hidden, attention=attention)

    block_paths = ("decoder.blocks",)

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return self.decoder.readout

    def forward(self, batch: Batch) -> Tensor:
        if batch.suffix is None:
            return self.decoder.trunk(self.embed(batch), self.mask(batch))
        cache = KVCache()
        self.decoder.encode(self.embed(batch), self.mask(batch), cache)
        return self.read_cache(self.decoder, cache, batch.suffix)

    def embed(self, batch: Batch) -> Tensor:
        """Embedded tokens [B, S, H] with the image tokens added at their places."""
        if batch.pixels is None or batch.pooled_idx is None or batch.image_index is None:
            return self.decoder.embed(batch.tokens)
        images: Tensor = self.connector(self.features(batch.pixels), batch.pooled_idx)
        hidden = self.decoder.embed(batch.tokens)
        index = batch.image_index[..., None].expand(-1, -1, hidden.size(-1))
        return hidden.scatter_add(1, index, images.to(hidden.dtype))

    def features(self, pixels: Tensor) -> Tensor:
        """Features of every patch [B, crops * patches, layers * h]; without a graph when the tower is frozen."""
        trains = pixels.requires_grad or any(parameter.requires_grad for parameter in self.vision.parameters())
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            features: Tensor = self.vision(pixels.flatten(0, 1))
        return features.view(pixels.size(0), -1, features.size(-1))

    def mask(self, batch: Batch) -> Tensor | None:
        """The dense additive mask fp32 [B, 1, S, S], causal except that image tokens see one another; None where the
        decoder makes its own."""
        if self.decoder.spec.mask != "dense" or batch.image_mask is None:
            return None
        images = batch.image_mask[:, None]
        rows, size = batch.tokens.shape
        lowest = torch.finfo(torch.float32).min
        seen = images[..., None] & images[:, :, None]
        seen |= torch.ones(size, size, dtype=torch.bool, device=seen.device).tril_()
        return torch.full((rows, 1, size, size), lowest, dtype=torch.float32, device=seen.device).masked_fill_(seen, 0)
