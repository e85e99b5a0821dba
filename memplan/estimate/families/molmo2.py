"""Molmo2 as transformers 5.24 has it: a decoder to whose embeddings image tokens are added.

Locals live as long as those of models/molmo2/modeling_molmo2.py. Letters: `B` batch, `S` sequence, `T` image tokens of
a chunk, `H` hidden.
"""

from typing import Any

from memplan.estimate import views
from memplan.estimate.families import config_of
from memplan.estimate.families.hf_decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    Mlp,
    RMSNorm,
    RotaryEmbedding,
    head_dim,
)
from memplan.estimate.families.molmo2_vision import Connector, Facts, VisionTower, first_blocks
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, Module
from memplan.estimate.ops import add
from memplan.estimate.picking import masked_scatter, picked
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import cat, flatten, transpose, unflatten_last, unsqueeze
from memplan.spec.run import RunSpec


class TextAttention(Attention):
    """Attention whose queries and keys are normalised head by head, or all heads together (`olmo`)."""

    def __init__(self, tape: Tape, config: Facts, kind: str) -> None:
        bias = bool(config["attention_bias"])
        super().__init__(tape, config, kind, bias=bias, out_bias=False)
        heads, heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.whole = config["qk_norm_type"] == "olmo"
        self.q_norm = RMSNorm(tape, "q_norm", self.size * (heads if self.whole else 1))
        self.k_norm = RMSNorm(tape, "k_norm", self.size * (heads_kv if self.whole else 1))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.q_proj(x), self.k_proj(x)
        v = transpose(unflatten_last(self.v_proj(x), self.size), 1, 2)
        if self.whole:
            q = self.normed(self.q_norm, q)
            k = self.normed(self.k_norm, k)
        q, k = unflatten_last(q, self.size), unflatten_last(k, self.size)
        if not self.whole:
            q = self.normed(self.q_norm, q)
            k = self.normed(self.k_norm, k)
        return transpose(q, 1, 2), transpose(k, 1, 2), v


class TextLayer(DecoderLayer):
    """Norms before attention and feed-forward, or behind them (`after`)."""

    after = False

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> Tensor:
        if not self.after:
            return super().forward(x, mask, rope, places)
        residual = x
        x, weights = self.self_attn(x, mask, rope, places)
        x = self.input_layernorm(x)
        x = add(residual, x)
        residual = x
        x = self.mlp(x)
        x = self.post_attention_layernorm(x)
        x = add(residual, x)
        del weights
        return x


class TextModel(Decoder):
    """The decoder, whose table has rows for more tokens than the head; its layers' tables of positions are scaled or
    not."""

    def make_embedding(self, vocab: int, hidden: int) -> Embedding:
        return Embedding(self.tape, "embed_tokens", vocab + self.config["additional_vocab_size"], hidden)

    def make_layer(self, index: int) -> Module:
        config, tape = self.config, self.tape
        layer = TextLayer(tape)
        layer.after = bool(config["norm_after"])
        layer.self_attn = TextAttention(tape, config, self.kind)
        layer.mlp = Mlp(tape, config["hidden_size"], config["intermediate_size"], config["hidden_act"])
        layer.make_norms(config["hidden_size"])
        return layer

    def layer_type(self, index: int) -> str:
        return "full_attention"

    def first_block(self) -> int | None:
        return first_blocks(self.run)["language_model"]

    def make_rotary(self) -> Any:
        names = "rotary_emb", "rotary_emb_unscaled"
        return [RotaryEmbedding(self.tape, head_dim(self.config), name=name) for name in names]

    def ropes(self, x: Tensor, places: Tensor) -> Any:
        return [make(x, places) for make in self.rotary_emb]

    def arguments(self, layer: Any, masks: dict[str, Tensor | None], rope: Any) -> tuple[Any, ...]:
        return masks[layer.layer_type], rope[0]  # both are as large, and alive throughout


class Molmo2:
    """The model of a run; without images its tower and its connector wait for gradients that never come."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape, self.kind = tape, run.step.attention
        config = config_of(run)
        self.text = TextModel(tape, run, config["text_config"])
        vision, adapter = config["vision_config"], config["adapter_config"]
        self.layers = [layer % vision["num_hidden_layers"] for layer in adapter["vision_feature_layer"]]
        tape.component = "vision"
        self.vision_tower = VisionTower(tape, run, vision, self.layers)
        tape.component = "connector"
        self.projector = Connector(tape, run, adapter, vision["num_position_embeddings"])
        for parameter in () if run.step.images else tape.parameters:
            parameter.idle = parameter.component in ("vision", "vision blocks", "connector")

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return self.text.head

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Final normed hidden states [B, S, H]."""
        embeds: Tensor = self.text.embed_tokens(batch["tokens"])
        images, last = None, None
        if "pixels" in batch:
            pooled, last = self.images(batch)
            images = cat((pooled,), 0)
            embeds = self.joined(embeds, images)
        groups = self.tape.make("where", (batch["tokens"].shape, "int64"))
        hidden = self.text.decode(embeds, {"full_attention": self.mask(groups, embeds.dtype)})
        del images, last
        return hidden

    def images(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Image tokens [T, H] of the crops of all samples, and the tower's last states, which stay beside them."""
        states, others = self.vision_tower(flatten(batch["pixels"], 0, 1))
        features = cat([states[layer] for layer in self.layers])
        pooled: Tensor = self.projector(features, flatten(batch["pooled_idx"], 0, 1))
        del others
        return views.split(pooled, [pooled.shape[0]], 0)[0], states[max(states)]

    def joined(self, embeds: Tensor, images: Tensor) -> Tensor:
        """`embeds` [B, S, H] with the image tokens added at their places."""
        tape = self.tape
        mask = tape.make("eq", (embeds.shape[:2], "bool"))
        mask = views.expand(unsqueeze(mask, -1), *embeds.shape)
        return masked_scatter(embeds, mask, add(picked(embeds, mask, (images.numel,)), flatten(images, 0)))

    def mask(self, groups: Tensor, dtype: str) -> Tensor:
        """The mask [B, 1, S, S] under which image tokens see one another, as bools or additive."""
        tape, (samples, size) = self.tape, groups.shape
        aranges = [tape.make("arange", ((n,), "int64")) for n in (samples, 1, size, size)]
        zero = tape.make("new_zeros", ((), "bool"))
        causal = tape.make("le", ((1, 1, size, size), "bool"))
        causal = tape.make("bitwise_or", ((1, 1, size, size), "bool"))
        del zero
        of_queries = tape.make("index", ((samples, 1, size, 1), "int64"))
        of_keys = tape.make("index", ((samples, 1, 1, size), "int64"))
        same = tape.make("eq", ((samples, 1, size, size), "bool"))
        inside = tape.make("ge", ((samples, 1, size, 1), "bool"))
        same = tape.make("bitwise_and", ((samples, 1, size, size), "bool"))
        del of_queries, of_keys, inside
        mask: Tensor = tape.make("bitwise_or", ((samples, 1, size, size), "bool"))
        del aranges, causal, same
        return mask if self.kind == "sdpa" else tape.make("where", (mask.shape, dtype))
