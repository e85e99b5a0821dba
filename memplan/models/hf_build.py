"""transformers' configurations and modules for a `ModelSpec`, as transformers itself makes them."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import is_fake

from memplan.errors import MemplanError
from memplan.spec.model import ModelSpec

SCALED_LOGITS = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Fields of configurations whose models do more to their logits than a matrix and a soft cap. Source: Granite, Cohere
and FalconH1 in transformers 5.24."""


def library() -> Any:
    """transformers; MemplanError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise MemplanError("transformers is not installed.", "Type: pip install 'memplan[hf]'") from None
    return transformers


def built_config(spec: ModelSpec) -> Any:
    """transformers' configuration of `spec`, its defaults filled in; MemplanError for a type that the installed
    transformers does not know."""
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


def built_module(config: Any, name: str, attention: str) -> Any:
    """The module for `config` in torch's default dtype, its attention by `attention`, experts as transformers chooses
    them. Weights are random; those of fake tensors are left as they are, since nobody computes with them."""
    (architecture,) = config.architectures or [None]
    kind = getattr(library(), str(architecture), None)
    if kind is None:
        raise MemplanError(
            f"The installed transformers has no {architecture}, which {name} needs.",
            "Type: pip install -U transformers",
        )
    fake = is_fake(torch.empty(0))
    try:
        with no_initialisation() if fake else nullcontext():
            module = kind._from_config(config, attn_implementation=attention, dtype=torch.get_default_dtype())
    except ValueError as error:
        other = "eager" if attention == "sdpa" else "sdpa"
        reason = str(error).splitlines()[0].rstrip(".")
        raise MemplanError(f"transformers refuses {name}: {reason}.", f"Type --attention {other}.") from None
    if fake:
        module.tie_weights()  # a part of the initialisation that was left out
    return module


def no_initialisation() -> AbstractContextManager[None]:
    """A place in which transformers leaves weights as they were allocated."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5.0 had it there
        from transformers.modeling_utils import no_init_weights  # type: ignore[attr-defined,no-redef]
    found: AbstractContextManager[None] = no_init_weights()
    return found


@contextmanager
def values_read() -> Iterator[None]:
    """A place in which transformers asks fake tensors what it asks real ones, and makes the masks that it makes for
    them: of tokens without values it would take each row for several documents.

    Source: transformers/masking_utils.py `find_packed_sequence_indices`, 5.24.
    """
    from transformers import masking_utils

    with patch.object(masking_utils, "is_tracing", lambda *_: False, create=True):
        yield


def set_dropout(config: Any, name: str, dropout: float) -> None:
    """Sets every probability of dropping something that `config` has, its parts' included, whatever it says itself;
    MemplanError where it has none."""
    parts = [config, *(getattr(config, part) for part in config.sub_configs if getattr(config, part, None) is not None)]
    fields = [
        (part, field)
        for part in parts
        for field in part.to_dict()
        if field.endswith(("dropout", "_pdrop", "dropout_prob"))
    ]
    if dropout and not fields:
        raise MemplanError(f"{name} drops nothing anywhere.", "Leave --dropout out.")
    for part, field in fields:
        setattr(part, field, dropout)
