"""What transformers' decoders share, over the ledger: norm, rotary tables, attention, feed-forward, layer, model.

Locals live here exactly as long as those of transformers 5.24 do (models/llama/modeling_llama.py). Letters: `B`
batch, `S` sequence, `H` hidden, `A` query heads, `K` key/value heads, `D` head size.
"""

from typing import Any

from memplan.errors import MemplanError
from memplan.estimate import ops, views
from memplan.estimate.checkpoint import put_on
from memplan.estimate.families import config_of
from memplan.estimate.families.hf_attention import Rope, apply_rotary, attend, position_ids
from memplan.estimate.families.hf_masks import FULL, Filling, causal_mask
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, Linear, Module
from memplan.estimate.ops import add, mean_last, mul, rsqrt, scale, shift, square
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import cat, to, transpose, unsqueeze
from memplan.spec.run import RunSpec

OF_INPUT = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu"}
"""Activations by their name in a config that are one kernel which saves its input."""


class RMSNorm(Module):
    """Root-mean-square norm in fp32; cast back before the weight, or behind it where `late`."""

    def __init__(self, tape: Tape, name: str, width: int, *, late: bool = False) -> None:
        super().__init__(tape, name)
        self.late = late
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width,))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = to(x, "float32")
        variance = mean_last(square(x))
        x = mul(x, rsqrt(shift(variance)))
        if self.late:
            return to(mul(self.weight, x), dtype)
        return mul(self.weight, to(x, dtype))


class RotaryEmbedding(Module):
    """Cosines and sines [1, S, dim] in the dtype of the hidden states, in fp32 where `wide`."""

    def __init__(self, tape: Tape, dim: int, *, wide: bool = False, name: str = "rotary_emb") -> None:
        super().__init__(tape, name)
        self.wide = wide
        self.inv_freq = tape.new("buffer", (dim // 2,), "float32", category="buffers")
        self.original_inv_freq = tape.new("buffer", (dim // 2,), "float32", category="buffers")

    def forward(self, x: Tensor, places: Tensor) -> Rope:
        angles = mul(to(unsqueeze(places, -1), "float32"), self.inv_freq)
        both = cat((angles, angles))
        cos, sin = scale(scale(both, "cos")), scale(scale(both, "sin"))
        return (cos, sin) if self.wide else (to(cos, x.dtype), to(sin, x.dtype))


class Mlp(Module):
    """Gated feed-forward layer of three matrices."""

    def __init__(self, tape: Tape, width: int, ffn: int, act: str, *, bias: bool = False, name: str = "mlp") -> None:
        super().__init__(tape, name)
        self.act = act
        self.gate_proj = Linear(tape, "gate_proj", width, ffn, bias=bias)
        self.up_proj = Linear(tape, "up_proj", width, ffn, bias=bias)
        self.down_proj = Linear(tape, "down_proj", ffn, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(mul(activated(self.act, self.gate_proj(x)), self.up_proj(x)))
        return out


def activated(act: str, x: Tensor) -> Tensor:
    """`x` through an activation, of one kernel but for GPT-2's own, which is the formula written out."""
    if act in OF_INPUT:
        return ops.of_input(OF_INPUT[act], x)
    if act == "gelu_new":
        return mul(scale(x), shift(ops.of_result("tanh", scale(add(x, scale(ops.cube(x)))))))
    if act in ("relu", "sigmoid", "tanh"):
        return ops.of_result(act, x)
    raise MemplanError(f"estimate has no formula for the activation {act!r}.", "Type memplan trace.")


class Attention(Module):
    """Grouped-query attention [B, S, H] -> [B, S, H], with norms over the size of a head where `qk_norm` makes them."""

    def __init__(
        self, tape: Tape, config: dict[str, Any], kind: str, *, bias: bool, out_bias: bool, qk_norm: Any = None
    ) -> None:
        super().__init__(tape, "self_attn")
        self.kind = kind
        self.drop = tape.setup.dropout
        hidden, heads, self.size = config["hidden_size"], config["num_attention_heads"], head_dim(config)
        kv_width = config.get("num_key_value_heads", heads) * self.size
        self.q_proj = Linear(tape, "q_proj", hidden, heads * self.size, bias=bias)
        self.k_proj = Linear(tape, "k_proj", hidden, kv_width, bias=bias)
        self.v_proj = Linear(tape, "v_proj", hidden, kv_width, bias=bias)
        self.o_proj = Linear(tape, "o_proj", heads * self.size, hidden, bias=out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            self.q_norm, self.k_norm = qk_norm(tape, "q_norm", self.size), qk_norm(tape, "k_norm", self.size)

    def forward(
        self, x: Tensor, mask: Tensor | None, rope: Rope | None, places: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.projected(x)
        if rope is not None:
            q, k = self.turned(q, k, rope)
        out, weights = self.weighed(q, k, v, mask)
        out = views.flatten(out, 2)
        out = self.o_proj(out)
        return out, weights

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, A, S, D], keys and values [B, K, S, D]."""
        q = transpose(self.normed(self.q_norm, views.unflatten_last(self.q_proj(x), self.size)), 1, 2)
        k = transpose(self.normed(self.k_norm, views.unflatten_last(self.k_proj(x), self.size)), 1, 2)
        v = transpose(views.unflatten_last(self.v_proj(x), self.size), 1, 2)
        return q, k, v

    def normed(self, norm: Module | None, x: Tensor) -> Tensor:
        """`x` through a norm, where there is one."""
        return x if norm is None else norm(x)

    def turned(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions."""
        return apply_rotary(q, k, rope)

    def weighed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Heads [B, S, A, D] and the weights."""
        return attend(self.kind, q, k, v, mask, drop=self.drop)


class DecoderLayer(Module):
    """Norm, attention, residual; norm, feed-forward, residual. `self_attn` and `mlp` are made by the family.

    It and its attention take the positions too, though only the tables are read: a checkpointed call holds all that it
    takes.
    """

    self_attn: Module
    mlp: Module

    def __init__(self, tape: Tape, layer_type: str = "full_attention") -> None:
        super().__init__(tape, "layers")
        self.layer_type = layer_type

    def make_norms(self, width: int, kind: Any = RMSNorm) -> None:
        """Makes the two norms over H."""
        self.input_layernorm = kind(self.tape, "input_layernorm", width)
        self.post_attention_layernorm = kind(self.tape, "post_attention_layernorm", width)

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, weights = self.self_attn(x, mask, rope, places)
        x = add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = add(residual, x)
        del weights
        return x


class Decoder:
    """Embedding, layers, final norm, head; families say what a layer is made of."""

    def __init__(self, tape: Tape, run: RunSpec, config: dict[str, Any] | None = None) -> None:
        self.tape, self.run = tape, run
        self.config: dict[str, Any] = config_of(run) if config is None else config
        self.kind = run.step.attention
        hidden, vocab = self.config["hidden_size"], self.config["vocab_size"]
        tape.component = "embedding"
        self.embed_tokens = self.make_embedding(vocab, hidden)
        tape.component = "blocks"
        mode, first, numbers = run.step.checkpointing, self.first_block(), range(self.config["num_hidden_layers"])
        kinds = [(self.layer_kind(i), first is not None and mode.treats(first + i)) for i in numbers]
        self.stack = Stack(tape, kinds, self.make_layer, counted=first is not None)
        if first is not None:
            put_on(tape, [(first + index, layer) for index, layer in self.stack.blocks], mode)
        self.norm = self.make_norm(tape, "norm", hidden)
        self.rotary_emb = self.make_rotary()
        tape.component = "head"
        self.head_weight: Tensor = self.embed_tokens.weight
        if not run.model.decoder.tied:
            self.head_weight = tape.setup.parameter(tape, "lm_head.weight", (vocab, hidden))

    make_norm: Any = RMSNorm

    def first_block(self) -> int | None:
        """Number of the first layer among the blocks that checkpointing counts; None where it counts none."""
        return 0

    def make_embedding(self, vocab: int, hidden: int) -> Embedding:
        """The table of tokens."""
        return Embedding(self.tape, "embed_tokens", vocab, hidden)

    def make_layer(self, index: int) -> Module:
        """Layer `index`."""
        raise NotImplementedError

    def make_rotary(self) -> Any:
        """What makes the rotary tables."""
        return RotaryEmbedding(self.tape, head_dim(self.config))

    def layer_type(self, index: int) -> str:
        """`full_attention`, `sliding_attention` or another of the config's `layer_types`."""
        types = self.config.get("layer_types")
        return types[index] if types else "full_attention"

    def layer_kind(self, index: int) -> Any:
        """What tells layer `index` from others that are made otherwise."""
        return self.layer_type(index)

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return Head(weight=self.head_weight, softcap=self.config.get("final_logit_softcapping") is not None)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Final normed hidden states [B, S, H]."""
        return self.decode(self.embed_tokens(batch["tokens"]), filling=Filling.of(self.run, batch))

    def decode(
        self, embeds: Tensor, masks: dict[str, Tensor | None] | None = None, *, filling: Filling = FULL
    ) -> Tensor:
        """Final normed hidden states of embedded ones, which stay until then."""
        places = position_ids(self.tape, embeds.shape[1]) if filling.positions is None else filling.positions
        masks = self.masks(embeds, filling) if masks is None else masks
        rope = self.ropes(embeds, places)

        def call(layer: Module, x: Tensor) -> Tensor:
            out: Tensor = layer(x, *self.arguments(layer, masks, rope), places)
            return out

        out: Tensor = self.norm(self.stack.run([embeds], call))
        return out

    def masks(self, x: Tensor, filling: Filling) -> dict[str, Tensor | None]:
        """A mask for each type of layer."""
        made = {"full_attention": causal_mask(x, self.kind, filling)}
        if any(self.layer_type(index) == "sliding_attention" for index in range(self.config["num_hidden_layers"])):
            made["sliding_attention"] = causal_mask(x, self.kind, filling, self.config["sliding_window"])
        return made

    def ropes(self, x: Tensor, places: Tensor) -> Any:
        """Rotary tables."""
        return self.rotary_emb(x, places)

    def arguments(self, layer: Any, masks: dict[str, Tensor | None], rope: Any) -> tuple[Any, ...]:
        """What a layer takes between the hidden states and the positions."""
        return masks[layer.layer_type], rope


def head_dim(config: dict[str, Any]) -> int:
    """Size of a head."""
    found: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return found
