"""A user's module, trained as it is.

Letters: `B` batch, `S` sequence, `V` vocabulary.
"""

from torch import Tensor, nn

from memplan.errors import MemplanError
from memplan.models.batch import Batch
from memplan.models.head import Head
from memplan.models.trainable import Trainable
from memplan.models.user_factory import load_entry
from memplan.spec.model import ModelSpec


class UserModel(Trainable):
    """A batch -> the logits [B, S, V] of the module that `pkg.mod:make` makes."""

    def __init__(self, spec: ModelSpec, *, attention: str = "sdpa", norm: str = "eager", dropout: float = 0.0) -> None:
        super().__init__()
        module = load_entry(spec.config)()
        if not isinstance(module, nn.Module):
            raise MemplanError(
                f"{spec.name} made a {type(module).__name__}, not a torch.nn.Module.",
                "Let it return the module: int64 tokens [B, S] in, logits [B, S, V] out.",
            )
        self.module = module
        self.name = spec.name
        self.vocab: int = vocabulary(module, spec.name)
        if dropout:
            set_dropout(module, spec.name, dropout)

    inner = "module"

    @property
    def head(self) -> Head:
        """None of its own: the module makes the logits."""
        return Head(weight=None)

    def forward(self, batch: Batch) -> Tensor:
        out = self.module(batch.tokens)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor):
            raise MemplanError(
                f"{self.name} returned a {type(out).__name__} for tokens, not logits.",
                "Let it return a tensor [B, S, V], or an object with .logits.",
            )
        if logits.shape[:-1] != batch.tokens.shape or logits.size(-1) < self.vocab or not logits.is_floating_point():
            dtype = str(logits.dtype).removeprefix("torch.")
            raise MemplanError(
                f"{self.name} returned {dtype} {list(logits.shape)} for tokens {list(batch.tokens.shape)}.",
                f"Let it return logits of every token: {[*batch.tokens.shape, self.vocab]}.",
            )
        return logits


def vocabulary(module: nn.Module, name: str) -> int:
    """Tokens that `module` knows: `.config.vocab_size`, or else the rows of its first embedding."""
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return child.num_embeddings
    raise MemplanError(
        f"{name} has neither an nn.Embedding nor a .config.vocab_size, so that nobody knows which tokens it takes.",
        "Give the module a config with vocab_size.",
    )


def set_dropout(module: nn.Module, name: str, dropout: float) -> None:
    """Sets the probability of every dropout layer of `module`; MemplanError where there is none."""
    layers = [child for child in module.modules() if isinstance(child, nn.Dropout)]
    if not layers:
        raise MemplanError(f"{name} has no nn.Dropout.", "Leave --dropout out.")
    for layer in layers:
        layer.p = dropout
