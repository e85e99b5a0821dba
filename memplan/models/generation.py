"""Greedy generation through a KV cache."""

import torch
from torch import Tensor

from memplan.models.cache import KVCache
from memplan.models.decoder import Decoder


@torch.no_grad()
def generate(decoder: Decoder, tokens: Tensor, num_tokens: int) -> Tensor:
    """The `num_tokens` likeliest next tokens of each sample, int64 [B, num_tokens], behind `tokens` [B, S]."""
    cache, made = KVCache(), []
    for _ in range(num_tokens):
        hidden = decoder.trunk(decoder.embed(tokens, cache.num_tokens), cache=cache)
        tokens = decoder.logits(hidden[:, -1:]).argmax(-1)
        made.append(tokens)
    return torch.cat(made, dim=1)
