"""Llama and its kin as transformers 5.24 has them: mistral, qwen2, qwen3, smollm3, olmo2, phi3.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `K` key/value heads, `D` head size, `F` feed-forward.
"""

from functools import partial
from typing import Any

from memplan.estimate.families.hf_attention import Rope, attend, rotated
from memplan.estimate.families.hf_decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    Mlp,
    RMSNorm,
    RotaryEmbedding,
    activated,
    head_dim,
)
from memplan.estimate.families.hf_masks import Filling, causal_mask
from memplan.estimate.modules import Linear, Module
from memplan.estimate.ops import add, dropout, mul
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import cat, chunk, flatten, narrow, to, transpose, unflatten_last, unsqueeze


class Llama(Decoder):
    """Pre-norm decoder; linears have biases where the config says so."""

    def make_layer(self, index: int) -> Module:
        layer = DecoderLayer(self.tape, self.layer_type(index))
        layer.self_attn = self.make_attention(index)
        layer.mlp = self.make_mlp(bias=bool(self.config.get("mlp_bias", False)))
        layer.make_norms(self.config["hidden_size"])
        return layer

    def make_attention(self, index: int) -> Module:
        """Attention of layer `index`."""
        bias = bool(self.config.get("attention_bias", False))
        return Attention(self.tape, self.config, self.kind, bias=bias, out_bias=bias)

    def make_mlp(self, *, bias: bool = False) -> Module:
        """The feed-forward layer."""
        config = self.config
        act = config.get("hidden_act", "silu")
        return Mlp(self.tape, config["hidden_size"], config["intermediate_size"], act, bias=bias)


class Mistral(Llama):
    """A window over every layer, no biases."""

    def make_attention(self, index: int) -> Module:
        return Attention(self.tape, self.config, self.kind, bias=False, out_bias=False)

    def masks(self, x: Tensor, filling: Filling) -> dict[str, Tensor | None]:
        return {"full_attention": causal_mask(x, self.kind, filling, self.config.get("sliding_window"))}

    def layer_type(self, index: int) -> str:
        return "full_attention"


class Qwen2(Llama):
    """Biases of queries, keys and values."""

    def make_attention(self, index: int) -> Module:
        return Attention(self.tape, self.config, self.kind, bias=True, out_bias=False)


class Qwen3(Llama):
    """Norms of queries and keys, head by head."""

    def make_attention(self, index: int) -> Module:
        bias = bool(self.config.get("attention_bias", False))
        return Attention(self.tape, self.config, self.kind, bias=bias, out_bias=bias, qk_norm=RMSNorm)


class SmolLM3(Llama):
    """Some layers without positions."""

    def make_attention(self, index: int) -> Module:
        attention: Any = super().make_attention(index)
        if not self.turns(index):
            attention.turned = lambda q, k, rope: (q, k)
        return attention

    def turns(self, index: int) -> bool:
        """Whether layer `index` has rotary positions."""
        layers = self.config.get("no_rope_layers")
        every = self.config.get("no_rope_layer_interval", 4)
        return bool(layers[index]) if layers else (index + 1) % every != 0

    def layer_kind(self, index: int) -> Any:
        return self.layer_type(index), self.turns(index)


LateNorm = partial(RMSNorm, late=True)
"""A norm that casts back behind its weight."""


class Olmo2Attention(Attention):
    """Norms over all heads together, tables in fp32 whose results are cast back."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str, *, bias: bool) -> None:
        super().__init__(tape, config, kind, bias=bias, out_bias=bias)
        heads = config["num_attention_heads"]
        self.q_norm = LateNorm(tape, "q_norm", heads * self.size)
        self.k_norm = LateNorm(tape, "k_norm", config.get("num_key_value_heads", heads) * self.size)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.normed(self.q_norm, self.q_proj(x)), self.normed(self.k_norm, self.k_proj(x)), self.v_proj(x)
        q = transpose(unflatten_last(q, self.size), 1, 2)
        k = transpose(unflatten_last(k, self.size), 1, 2)
        v = transpose(unflatten_last(v, self.size), 1, 2)
        return q, k, v

    def turned(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(rope[0], 1), unsqueeze(rope[1], 1)
        dtype = q.dtype
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return to(q, dtype), to(k, dtype)


class Olmo2Layer(DecoderLayer):
    """Norms behind attention and feed-forward."""

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> Tensor:
        residual = x
        x, weights = self.self_attn(x, mask, rope, places)
        x = self.post_attention_layernorm(x)
        x = add(residual, x)
        residual = x
        x = self.mlp(x)
        x = self.post_feedforward_layernorm(x)
        x = add(residual, x)
        del weights
        return x

    def make_norms(self, width: int, kind: Any = LateNorm) -> None:
        self.post_attention_layernorm = kind(self.tape, "post_attention_layernorm", width)
        self.post_feedforward_layernorm = kind(self.tape, "post_feedforward_layernorm", width)


class Olmo2(Llama):
    """Post-norm decoder."""

    make_norm = LateNorm

    def make_layer(self, index: int) -> Module:
        layer = Olmo2Layer(self.tape, self.layer_type(index))
        bias = bool(self.config.get("attention_bias", False))
        layer.self_attn = Olmo2Attention(self.tape, self.config, self.kind, bias=bias)
        layer.mlp = self.make_mlp()
        layer.make_norms(self.config["hidden_size"])
        return layer

    def make_rotary(self) -> Any:
        return RotaryEmbedding(self.tape, head_dim(self.config), wide=True)


class Phi3Attention(Attention):
    """One matrix of queries, keys and values; positions on a part of each head."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        Module.__init__(self, tape, "self_attn")
        self.kind, self.drop = kind, tape.setup.dropout
        heads, self.size = config["num_attention_heads"], head_dim(config)
        self.widths = [n * self.size for n in (heads, *[config.get("num_key_value_heads", heads)] * 2)]
        self.o_proj = Linear(tape, "o_proj", heads * self.size, config["hidden_size"])
        self.qkv_proj = Linear(tape, "qkv_proj", config["hidden_size"], sum(self.widths))

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> tuple[Tensor, Tensor | None]:
        qkv = self.qkv_proj(x)
        q, k, v = (narrow(qkv, -1, width) for width in self.widths)
        q, k, v = (transpose(unflatten_last(part, self.size), 1, 2) for part in (q, k, v))
        q, k = self.turned(q, k, rope)
        out, weights = attend(self.kind, q, k, v, mask, drop=self.drop, strided="v")
        out = self.o_proj(flatten(out, 2))
        return out, weights

    def turned(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(rope[0], 1), unsqueeze(rope[1], 1)
        size = cos.shape[-1]
        q_part, q_pass = narrow(q, -1, size), narrow(q, -1, self.size - size)
        k_part, k_pass = narrow(k, -1, size), narrow(k, -1, self.size - size)
        q = cat((rotated(q_part, cos, sin), q_pass))
        return q, cat((rotated(k_part, cos, sin), k_pass))


class Phi3Mlp(Module):
    """Gate and up in one matrix."""

    def __init__(self, tape: Tape, width: int, ffn: int, act: str) -> None:
        super().__init__(tape, "mlp")
        self.act = act
        self.gate_up_proj = Linear(tape, "gate_up_proj", width, 2 * ffn)
        self.down_proj = Linear(tape, "down_proj", ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.gate_up_proj(x)
        gate, up = chunk(up, 2)
        up = mul(up, activated(self.act, gate))
        out: Tensor = self.down_proj(up)
        return out


class Phi3Layer(DecoderLayer):
    """Pre-norm, with dropout before each residual."""

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> Tensor:
        drop = self.tape.setup.dropout
        residual = x
        x = self.input_layernorm(x)
        x, weights = self.self_attn(x, mask, rope, places)
        x = add(residual, dropout(x, drop))
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = add(residual, dropout(x, drop))
        del weights
        return x


class Phi3(Mistral):
    """Fused matrices, and a window over every layer where there is one."""

    def make_layer(self, index: int) -> Module:
        config = self.config
        layer = Phi3Layer(self.tape)
        layer.self_attn = Phi3Attention(self.tape, config, self.kind)
        layer.mlp = Phi3Mlp(
            self.tape, config["hidden_size"], config["intermediate_size"], config.get("hidden_act", "silu")
        )
        layer.make_norms(config["hidden_size"])
        return layer

    def make_rotary(self) -> Any:
        rope = self.config.get("rope_parameters") or {}
        factor = rope.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0))
        return RotaryEmbedding(self.tape, int(head_dim(self.config) * factor))
