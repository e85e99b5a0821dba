"""From a `ModelSpec` to the module that trains.

Letters: `B` batch, `S` sequence, `H` hidden.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from memplan.models.batch import Batch
from memplan.models.cache import KVCache
from memplan.models.decoder import Decoder
from memplan.models.head import Head
from memplan.models.hf_modules import HfModel
from memplan.models.molmo2 import Molmo2
from memplan.models.trainable import Trainable
from memplan.models.user_module import UserModel
from memplan.spec.model import Component, ModelSpec

INIT_STD = 0.02
"""Standard deviation of every random matrix, GPT-2's."""


class LanguageModel(Trainable):
    """A batch -> final normed hidden states [B, S, H]; the head is the decoder's."""

    def __init__(self, spec: ModelSpec, *, attention: str = "sdpa", norm: str = "eager", dropout: float = 0.0) -> None:
        super().__init__()
        self.decoder = Decoder(spec.decoder, attention=attention, norm=norm, dropout=dropout)
        self.shares_kv = spec.decoder.kv_shared > 0

    block_paths = ("decoder.blocks",)

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return self.decoder.readout

    def forward(self, batch: Batch) -> Tensor:
        if batch.suffix is None:
            mask = None if batch.segments is None else self.decoder.segment_mask(batch.segments)
            return self.decoder.trunk(self.decoder.embed(batch.tokens), mask)
        cache = KVCache()
        self.decoder.encode(self.decoder.embed(batch.tokens), cache=cache)
        return self.read_cache(self.decoder, cache, batch.suffix)


def build_model(
    spec: ModelSpec, *, attention: str = "sdpa", norm: str = "eager", dropout: float = 0.0
) -> LanguageModel | Molmo2 | HfModel | UserModel:
    """The module of `spec` on torch's default device and in its default dtype, randomly initialised, its frozen
    components without gradients."""
    if spec.impl != "memplan":
        other = HfModel if spec.impl == "hf" else UserModel
        return other(spec, attention=attention, norm=norm, dropout=dropout)
    kind = LanguageModel if spec.vision is None else Molmo2
    model = kind(spec, attention=attention, norm=norm, dropout=dropout)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INIT_STD)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    for component in spec.frozen:
        for parameter in component_parameters(model, component):
            parameter.requires_grad_(False)
    return model


def component_parameters(model: LanguageModel | Molmo2, component: Component) -> Iterator[nn.Parameter]:
    """Parameters of one component: `embedding` is the base table and the positions, `blocks` includes the final norm,
    `head` is the base table again when tied."""
    decoder = model.decoder
    if component == "embedding":
        yield decoder.embedding.weight
        if decoder.positions is not None:
            yield from decoder.positions.parameters()
    elif component == "blocks":
        yield from decoder.blocks.parameters()
        yield from decoder.norm.parameters()
    elif component == "head" and decoder.head is None:
        yield decoder.embedding.weight
    elif component == "head" and decoder.head is not None:
        yield from decoder.head.parameters()
    elif isinstance(model, Molmo2):
        yield from (model.vision if component == "vision" else model.connector).parameters()
