"""transformers' models, built from their configurations and trained as they are.

Letters: `B` batch, `S` sequence, `H` hidden.
"""

import json
from typing import Any

import torch
from torch import Tensor

from memplan.errors import MemplanError
from memplan.models.batch import Batch
from memplan.models.blocks import block_paths
from memplan.models.head import Head
from memplan.models.trainable import Trainable
from memplan.spec.model import ModelSpec

SCALED_LOGITS = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Fields of configurations whose models do more to their logits than a matrix and a soft cap. Source: Granite, Cohere
and FalconH1 in transformers 5.24."""


class HfModel(Trainable):
    """A batch -> final normed hidden states [B, S, H] of a base model; the head is its output embeddings."""

    def __init__(self, spec: ModelSpec, *, attention: str = "sdpa", norm: str = "eager", dropout: float = 0.0) -> None:
        super().__init__()
        if norm != "eager":
            raise MemplanError(f"{spec.name} has transformers' own norms.", "Leave --norm out.")
        config = hf_config(spec)
        if dropout:
            set_dropout(config, spec.name, dropout)
        self.model: Any = hf_model(config, spec.name, attention)
        self.text_config = config.get_text_config()
        self.block_paths = block_paths(self)
        self.shares_kv = bool(getattr(self.text_config, "num_kv_shared_layers", 0))

    inner = "model"

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        out = self.model.get_output_embeddings()
        softcap = getattr(self.text_config, "final_logit_softcapping", None)
        return Head(weight=out.weight, bias=out.bias, softcap=softcap)

    def forward(self, batch: Batch) -> Tensor:
        if batch.suffix is not None:
            raise MemplanError(
                "The workload prefix-suffix needs a cache that is connected with its graph, which transformers' models "
                "do not have.",
                "Take one of memplan's own: --model qwen3-0.6b.",
            )
        return self.model.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state


def library() -> Any:
    """transformers; MemplanError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise MemplanError("transformers is not installed.", "Type: pip install 'memplan[hf]'") from None
    return transformers


def hf_config(spec: ModelSpec) -> Any:
    """transformers' configuration of `spec`; MemplanError for a type that the installed transformers does not know."""
    facts = json.loads(spec.config)
    try:
        config = library().AutoConfig.for_model(**facts)
    except ValueError:
        raise MemplanError(
            f"The installed transformers knows no model of the type {facts.get('model_type')!r}.",
            "Type: pip install -U transformers",
        ) from None
    scaled = [name for name in SCALED_LOGITS if getattr(config.get_text_config(), name, None) not in (None, 1.0)]
    if scaled:
        raise MemplanError(f"{spec.name} scales its logits by {scaled[0]}, which memplan does not know of.")
    return config


def hf_model(config: Any, name: str, attention: str) -> Any:
    """The module for `config`, randomly initialised in torch's default dtype, its attention by `attention`."""
    (architecture,) = config.architectures or [None]
    kind = getattr(library(), str(architecture), None)
    if kind is None:
        raise MemplanError(
            f"The installed transformers has no {architecture}, which {name} needs.",
            "Type: pip install -U transformers",
        )
    try:
        return kind._from_config(config, attn_implementation=attention, dtype=torch.get_default_dtype())
    except ValueError as error:
        other = "eager" if attention == "sdpa" else "sdpa"
        reason = str(error).splitlines()[0].rstrip(".")
        raise MemplanError(f"transformers refuses {name}: {reason}.", f"Type --attention {other}.") from None


def set_dropout(config: Any, name: str, dropout: float) -> None:
    """Sets every probability of dropping something that `config` has; MemplanError where it has none."""
    fields = [field for field in config.to_dict() if field.endswith(("dropout", "_pdrop", "dropout_prob"))]
    if not fields:
        raise MemplanError(f"{name} drops nothing anywhere.", "Leave --dropout out.")
    for field in fields:
        setattr(config, field, dropout)
