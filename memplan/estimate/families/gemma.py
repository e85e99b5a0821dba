"""Gemma 2 and 3 as transformers 5.24 has them.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `D` head size.
"""

from typing import Any

from memplan.estimate.families.hf_attention import attend
from memplan.estimate.families.hf_decoder import Attention, Decoder, DecoderLayer, Mlp, RotaryEmbedding, head_dim
from memplan.estimate.families.hf_masks import Filling, causal_mask
from memplan.estimate.modules import Embedding, Module
from memplan.estimate.ops import add, mean_last, mul, rsqrt, shift, square
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import to

PATTERN = 6
"""Of so many layers of Gemma 3 the last sees the whole sequence. Source: Gemma3TextConfig, transformers 5.24."""


class GemmaNorm(Module):
    """Root-mean-square norm times 1 + weight, in fp32."""

    def __init__(self, tape: Tape, name: str, width: int) -> None:
        super().__init__(tape, name)
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width,))

    def forward(self, x: Tensor) -> Tensor:
        out = scaled(to(x, "float32"))
        out = mul(out, shift(to(self.weight, "float32")))
        return to(out, x.dtype)


def scaled(x: Tensor) -> Tensor:
    """`x` over its root of mean squares."""
    return mul(x, rsqrt(shift(mean_last(square(x)))))


class ScaledEmbedding(Embedding):
    """A table whose rows are multiplied by a buffer without dimensions."""

    def __init__(self, tape: Tape, name: str, vocab: int, width: int) -> None:
        super().__init__(tape, name, vocab, width)
        self.scale = tape.new("buffer", (), self.weight.dtype, category="buffers")

    def forward(self, tokens: Tensor) -> Tensor:
        return mul(super().forward(tokens), self.scale)


class GemmaAttention(Attention):
    """Attention whose scores may be capped, where it is eager."""

    softcap = False

    def weighed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return attend(self.kind, q, k, v, mask, drop=self.drop, softcap=self.softcap)


class GemmaLayer(DecoderLayer):
    """Norms before and behind attention and feed-forward."""

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, weights = self.self_attn(x, mask, rope, places)
        x = self.post_attention_layernorm(x)
        x = add(residual, x)
        residual = x
        x = self.pre_feedforward_layernorm(x)
        x = self.mlp(x)
        x = self.post_feedforward_layernorm(x)
        x = add(residual, x)
        del weights
        return x

    def make_norms(self, width: int, kind: Any = GemmaNorm) -> None:
        super().make_norms(width, kind)
        self.pre_feedforward_layernorm = kind(self.tape, "pre_feedforward_layernorm", width)
        self.post_feedforward_layernorm = kind(self.tape, "post_feedforward_layernorm", width)


class Gemma2(Decoder):
    """Capped scores, every second layer with a window."""

    make_norm = GemmaNorm
    qk_norm: Any = None

    def make_embedding(self, vocab: int, hidden: int) -> Embedding:
        return ScaledEmbedding(self.tape, "embed_tokens", vocab, hidden)

    def make_layer(self, index: int) -> Module:
        config, tape = self.config, self.tape
        layer = GemmaLayer(tape, self.layer_type(index))
        bias = bool(config.get("attention_bias", False))
        attention = GemmaAttention(tape, config, self.kind, bias=bias, out_bias=bias, qk_norm=self.qk_norm)
        attention.softcap = self.caps_scores()
        layer.self_attn = attention
        act = config.get("hidden_activation") or "gelu_pytorch_tanh"
        layer.mlp = Mlp(tape, config["hidden_size"], config["intermediate_size"], act)
        layer.make_norms(config["hidden_size"])
        return layer

    def caps_scores(self) -> bool:
        """Whether attention's scores are capped."""
        return self.config.get("attn_logit_softcapping", 50.0) is not None

    def layer_type(self, index: int) -> str:
        types = self.config.get("layer_types")
        return types[index] if types else ("full_attention" if index % 2 else "sliding_attention")

    def masks(self, x: Tensor, filling: Filling) -> dict[str, Tensor | None]:
        full = causal_mask(x, self.kind, filling)
        return {
            "full_attention": full,
            "sliding_attention": causal_mask(x, self.kind, filling, self.config.get("sliding_window", 4096)),
        }


class Gemma3(Gemma2):
    """Norms of queries and keys, rotary tables of their own for layers with a window."""

    qk_norm = GemmaNorm

    def caps_scores(self) -> bool:
        return False

    def layer_type(self, index: int) -> str:
        types, pattern = self.config.get("layer_types"), self.config.get("sliding_window_pattern", PATTERN)
        return types[index] if types else ("sliding_attention" if (index + 1) % pattern else "full_attention")

    def make_rotary(self) -> Any:
        types = sorted({self.layer_type(index) for index in range(self.config["num_hidden_layers"])})
        return {kind: RotaryEmbedding(self.tape, head_dim(self.config)) for kind in types}

    def ropes(self, x: Tensor, places: Tensor) -> Any:
        return {kind: make(x, places) for kind, make in self.rotary_emb.items()}

    def arguments(self, layer: Any, masks: dict[str, Tensor | None], rope: Any) -> tuple[Any, ...]:
        return masks[layer.layer_type], rope[layer.layer_type]
