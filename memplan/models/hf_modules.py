"""transformers' models, built from their configurations and trained as they are.

Letters: `B` batch, `S` sequence, `H` hidden, `N` images of a batch.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from memplan.errors import MemplanError
from memplan.models.batch import Batch
from memplan.models.blocks import stacks
from memplan.models.head import Head
from memplan.models.hf_build import built_config, built_module, set_dropout, values_read
from memplan.models.trainable import Trainable
from memplan.spec.model import CLASSIFIERS, ModelSpec

TOWER = re.compile(r"(^|\.)(vision|visual)(_|\.)")
"""Names of image encoders inside a model: `vision_tower`, `vision_model`, `visual`."""
HEAD = re.compile(r"(^|\.)(classifier|cls|head)\.")
"""Names of what makes logits of rows, or of what it does before: BERT's transform, an image encoder's pooling head."""
EMBEDDING = re.compile(r"(^|\.)embeddings\.")
"""Names of all that embeds tokens or patches, norms included; other tables are known by their class."""
CONNECTOR = "multi_modal_projector"
"""Name of what joins an image encoder to a decoder."""


class HfModel(Trainable):
    """A batch -> the rows that the head's matrix reads: final hidden states [B, S, H] of a language model, behind the
    head's transform where it has one, or one pooled row a sample [B, 1, H] of an image classifier."""

    def __init__(self, spec: ModelSpec, *, attention: str = "sdpa", norm: str = "eager", dropout: float = 0.0) -> None:
        super().__init__()
        config = built_config(spec)
        set_dropout(config, spec.name, dropout)
        self.model: Any = built_module(config, spec.name, attention)
        self.text_config = config.get_text_config()
        self.block_paths = hf_block_paths(self)
        self.shares_kv = bool(getattr(self.text_config, "num_kv_shared_layers", 0))
        self.classifies = self.model.main_input_name == "pixel_values"
        if self.classifies and not (spec.family in CLASSIFIERS and hasattr(self.model, "classifier")):
            raise MemplanError(f"{spec.name} is {config.architectures[0]}, which has no classifier that a step trains.")
        self.note = hf_note(self.model)
        for component in spec.frozen:
            for parameter in component_parameters(self.model, component):
                parameter.requires_grad_(False)

    inner = "model"

    @property
    def head(self) -> Head:
        """What makes logits of the rows."""
        out = self.model.classifier if self.classifies else self.model.get_output_embeddings()
        softcap = getattr(self.text_config, "final_logit_softcapping", None)
        return Head(weight=out.weight, bias=out.bias, softcap=softcap)

    def forward(self, batch: Batch) -> Tensor:
        if batch.pixels is not None and self.classifies:
            return self.pooled(batch.pixels)
        inputs = {"input_ids": batch.tokens, **row_inputs(batch), **image_inputs(self.model, batch)}
        with values_read() if is_fake(batch.tokens) else nullcontext():
            hidden = self.model.base_model(use_cache=False, **inputs)
        rows = hidden.last_hidden_state
        del hidden
        masked_lm = getattr(self.model, "cls", None)  # BERT's
        return rows if masked_lm is None else masked_lm.predictions.transform(rows)

    def pooled(self, pixels: Tensor) -> Tensor:
        """One row a sample [B, 1, H], pooled as the class does it: ViT's first row, the mean of SigLIP's."""
        if hasattr(self.model, "vit"):
            return self.model.vit(pixel_values=pixels).last_hidden_state[:, :1]
        rows = self.model.vision_model(pixel_values=pixels).last_hidden_state
        return torch.mean(rows, dim=1)[:, None]


def hf_note(model: nn.Module) -> str:
    """Which code transformers chose for what it has several codes for, beside attention."""
    kinds: dict[str, Any] = {type(module).__name__: module for module in model.modules()}
    experts = next((kind.config for name, kind in kinds.items() if name.endswith("Experts")), None)
    notes = [] if experts is None else [f"experts by transformers' {experts._experts_implementation}"]
    if any(name.endswith("GatedDeltaNet") for name in kinds) and find_spec("fla") is None:
        notes.append("gated delta-nets by transformers' PyTorch code, since flash-linear-attention is not installed")
    return "; ".join(notes)


def row_inputs(batch: Batch) -> dict[str, Tensor]:
    """What says how rows are filled, by transformers' names; empty for full ones."""
    named = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def image_inputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """What a model with an image encoder takes beside the tokens, by transformers' names; empty for others."""
    if batch.token_types is None:
        return {}
    molmo2 = model.config.model_type == "molmo2"
    inputs = {"mm_token_type_ids" if molmo2 else "token_type_ids": batch.token_types}
    if batch.pixels is not None:
        inputs["pixel_values"] = batch.pixels.flatten(0, 1)
    if batch.pooled_idx is not None and batch.grids is not None:
        inputs |= {"image_token_pooling": batch.pooled_idx.flatten(0, 1), "image_grids": batch.grids.flatten(0, 1)}
    return inputs


def hf_block_paths(model: nn.Module) -> tuple[str, ...]:
    """Paths of the lists of blocks, those of an image encoder beside a decoder last; transformers' blocks are known by
    their class, whatever else is a list of equal modules."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    paths = [path for path in stacks(model) if isinstance(first_block(model, path), GradientCheckpointingLayer)]
    return tuple(sorted(paths, key=lambda path: TOWER.search(path) is not None))


def first_block(model: nn.Module, path: str) -> nn.Module:
    """The first block of the list at `path`."""
    return next(model.get_submodule(path).children())


def component_parameters(model: Any, component: str) -> Iterator[nn.Parameter]:
    """Parameters of one component of transformers' module, as `factory.component_parameters` divides them: a table
    that a tied head reads is of both."""
    tables = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    out = model.get_output_embeddings()
    heads = set() if out is None else {id(parameter) for parameter in out.parameters()}
    beside = model.main_input_name != "pixel_values"  # a decoder
    for name, parameter in model.named_parameters():
        if CONNECTOR in name:
            found = {"connector"}
        elif beside and TOWER.search(name):
            found = {"vision"}
        else:
            embeds = id(parameter) in tables or EMBEDDING.search(name)
            heads_it = id(parameter) in heads or HEAD.search(name)
            found = {word for word, of_it in (("embedding", embeds), ("head", heads_it)) if of_it}
        if component in (found or {"blocks"}):
            yield parameter
