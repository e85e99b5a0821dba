"""A lean pre-norm decoder: the reference implementation whose memory the estimate speaks of.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `K` key/value heads, `D` head size, `F` feed-forward,
`V` vocabulary. No tensor outlives its last reader: what autograd does not save is gone when its line is.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.models.attention import Attention, KVStore, Rope
from memplan.models.cache import KVCache, KVLayer
from memplan.models.feedforward import make_mlp
from memplan.models.head import Head
from memplan.models.norms import make_norm
from memplan.spec.model import DecoderSpec


class Embedding(nn.Module):
    """Token table [V, H], with a second table of `extra` rows concatenated below it at each forward."""

    def __init__(self, vocab: int, extra: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        self.extra = nn.Parameter(torch.empty(extra, width)) if extra else None

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.weight if self.extra is None else torch.cat((self.weight, self.extra))
        return F.embedding(tokens, table)


class Block(nn.Module):
    """Norm, attention, residual; norm, feed-forward, residual: [B, S, H] -> [B, S, H]."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        attention: str,
        norm: str,
        dropout: float,
        index: int = 0,
        store: KVStore | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.attn_norm = make_norm(spec, norm)
        self.attn = Attention(spec, attention=attention, norm=norm, index=index, store=store)
        self.attn_out_norm = make_norm(spec, norm) if spec.sandwich else nn.Identity()
        self.mlp_norm = make_norm(spec, norm)
        self.mlp = make_mlp(spec)
        self.mlp_out_norm = make_norm(spec, norm) if spec.sandwich else nn.Identity()

    def forward(
        self, x: Tensor, rope: Rope | None, mask: Tensor | None, past: KVLayer | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The next hidden states; with `past`, a view of this layer's cache, also the keys and values of `x`, for the
        caller to append."""
        if past is None:
            x = x + self.drop(self.attn_out_norm(self.attn(self.attn_norm(x), rope, mask)))
            return x + self.feed(x)
        out, keys, values = self.attn(self.attn_norm(x), rope, mask, past)
        x = x + self.drop(self.attn_out_norm(out))
        del out
        return x + self.feed(x), keys, values

    def feed(self, x: Tensor) -> Tensor:
        """What the feed-forward layer adds to `x`."""
        return self.drop(self.mlp_out_norm(self.mlp(self.mlp_norm(x))))

    def drop(self, x: Tensor) -> Tensor:
        """`x` with some of its elements dropped while training; itself without dropout."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head."""

    def __init__(
        self, spec: DecoderSpec, *, attention: str = "sdpa", norm: str = "eager", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.spec = spec
        self.attention = attention
        self.embedding = Embedding(spec.vocab, spec.extra_vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_positions, spec.hidden) if spec.positions == "learned" else None
        self.kv_store: KVStore = {}
        """What blocks leave to later blocks while they run; empty otherwise."""
        self.blocks = nn.ModuleList(
            Block(spec, attention=attention, norm=norm, dropout=dropout, index=index, store=self.kv_store)
            for index in range(spec.num_layers)
        )
        self.norm = make_norm(spec, norm)
        self.head = None if spec.tied else nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.positions == "rope":
            self.inv_freq: Tensor
            self.register_buffer("inv_freq", inverse_frequencies(spec), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, H]; the base embedding's own when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def readout(self) -> Head:
        """What makes logits of the hidden states."""
        return Head(weight=self.head_weight, softcap=self.spec.head_softcap)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Hidden states [B, S, H] of `tokens` [B, S], the first of which stands at position `start`."""
        hidden: Tensor = self.embedding(tokens)
        if self.spec.scale_embedding:
            hidden = hidden * math.sqrt(self.spec.hidden)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(start, start + tokens.size(1), device=tokens.device))
        return hidden

    def trunk(self, hidden: Tensor, mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Final normed hidden states [B, S, H] from embedded ones; `mask` is additive, fp32 [B, 1, S, S]. With a cache
        they see the tokens in it too, and are appended to it."""
        return self.norm(self.encode(hidden, mask, cache))

    def encode(self, hidden: Tensor, mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """As `trunk`, before the final norm."""
        start = 0 if cache is None else cache.num_tokens
        rope = self.rope_tables(hidden, start) if self.spec.positions == "rope" else None
        if mask is None:
            mask = self.causal_mask(hidden, start)
        sliding = self.causal_mask(hidden, start, self.spec.window) if self.spec.window else None
        for index, block in enumerate(self.blocks):
            seen = sliding if self.spec.slides(index) else mask
            if cache is None:
                hidden = block(hidden, rope, seen)
            else:
                hidden, keys, values = block(hidden, rope, seen, cache.layer(index))
                cache.append(index, keys, values)
        self.kv_store.clear()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed hidden states [..., H]."""
        return self.readout.logits(hidden)

    def rope_tables(self, hidden: Tensor, start: int = 0) -> Rope:
        """Cosines and sines [S, D] in the dtype of `hidden`, or in fp32 when rotation is."""
        stop = start + hidden.size(1)
        positions = torch.arange(start, stop, device=hidden.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        dtype = torch.float32 if self.spec.rope_fp32 else hidden.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def causal_mask(self, hidden: Tensor, start: int = 0, window: int = 0) -> Tensor | None:
        """The additive mask fp32 [B or 1, 1, S, start + S] that dense masks, eager attention, a cache of `start` tokens
        and a window of fewer tokens need, or None."""
        size = hidden.size(1)
        cut = 0 < window < start + size
        if self.spec.mask == "causal" and self.attention == "sdpa" and (start == 0 or size == 1) and not cut:
            return None
        rows = hidden.size(0) if self.spec.mask == "dense" else 1
        lowest = torch.finfo(torch.float32).min
        shape = (rows, 1, size, start + size)
        mask = torch.full(shape, lowest, dtype=torch.float32, device=hidden.device).triu_(start + 1)
        if cut:
            mask += torch.full(shape, lowest, dtype=torch.float32, device=hidden.device).tril_(start - window)
        return mask

    def segment_mask(self, segments: Tensor) -> Tensor:
        """The additive mask fp32 [B, 1, S, S] under which a token sees those before it of its own number in `segments`
        [B, S]."""
        (rows, size), lowest = segments.shape, torch.finfo(torch.float32).min
        seen = (segments[:, :, None] == segments[:, None]).tril_()
        mask = torch.full((rows, 1, size, size), lowest, dtype=torch.float32, device=seen.device)
        return mask.masked_fill_(seen[:, None], 0)


def inverse_frequencies(spec: DecoderSpec) -> Tensor:
    """Rotary frequencies fp32 [D / 2], rescaled as Llama 3.1 does where the model asks for it.

    Source: RoFormer (arXiv 2104.09864) section 3.2.2; the Llama 3.1 model card for the rescaling.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
