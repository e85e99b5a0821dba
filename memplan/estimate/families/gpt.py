"""GPT-2 and GPT-NeoX as transformers 5.24 has them.

Locals live as long as those of models/gpt2/modeling_gpt2.py and models/gpt_neox/modeling_gpt_neox.py. Letters: `B`
batch, `S` sequence, `H` hidden, `A` heads, `D` head size, `F` feed-forward.
"""

from typing import Any

from memplan.errors import MemplanError
from memplan.estimate import views
from memplan.estimate.autocast import operands
from memplan.estimate.checkpoint import put_on
from memplan.estimate.families import config_of
from memplan.estimate.families.hf_attention import Rope, attend, position_ids, rotated
from memplan.estimate.families.hf_decoder import Decoder, RotaryEmbedding, activated, head_dim
from memplan.estimate.families.hf_masks import Filling, causal_mask
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, LayerNorm, Linear, Module
from memplan.estimate.ops import add, dropout
from memplan.estimate.products import mm
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import cat, chunk, flatten, narrow, split, transpose, unflatten_last, unsqueeze
from memplan.spec.run import RunSpec


class Conv1D(Linear):
    """x [..., I] -> [..., O] by a matrix [I, O] and a bias."""

    transposed = True

    def __init__(self, tape: Tape, name: str, out: int, width: int) -> None:
        super().__init__(tape, name, width, out, bias=True)

    def multiplied(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        bias, rows, weight = operands(self.bias, flatten(x, 0, -2), self.weight)
        out = mm(rows, weight, bias)
        del bias, rows, weight
        return views.view(out, *x.shape[:-1], out.shape[-1])


class Gpt2Attention(Module):
    """Attention of one matrix for queries, keys and values, cut after the product."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "attn")
        self.kind = kind
        width = config["n_embd"]
        self.size = width // config["n_head"]
        self.c_attn = Conv1D(tape, "c_attn", 3 * width, width)
        self.c_proj = Conv1D(tape, "c_proj", width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        drop = self.tape.setup.dropout
        q, k, v = split(self.c_attn(x), [x.shape[-1]] * 3)
        k = transpose(unflatten_last(k, self.size), 1, 2)
        v = transpose(unflatten_last(v, self.size), 1, 2)
        q = transpose(unflatten_last(q, self.size), 1, 2)
        out, weights = attend(self.kind, q, k, v, mask, drop=drop, wide=False)
        out = flatten(out, 2)
        out = self.c_proj(out)
        out = dropout(out, drop)
        return out, weights


class Gpt2Mlp(Module):
    """Two matrices with an activation between them."""

    def __init__(self, tape: Tape, config: dict[str, Any]) -> None:
        super().__init__(tape, "mlp")
        width = config["n_embd"]
        ffn = config["n_inner"] or 4 * width
        self.act = config["activation_function"]
        self.c_fc = Conv1D(tape, "c_fc", ffn, width)
        self.c_proj = Conv1D(tape, "c_proj", width, ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = activated(self.act, x)
        x = self.c_proj(x)
        return dropout(x, self.tape.setup.dropout)


class Gpt2Block(Module):
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "h")
        width = config["n_embd"]
        self.ln_1 = LayerNorm(tape, "ln_1", width)
        self.attn = Gpt2Attention(tape, config, kind)
        self.ln_2 = LayerNorm(tape, "ln_2", width)
        self.mlp = Gpt2Mlp(tape, config)

    def forward(self, x: Tensor, mask: Tensor | None, places: Tensor) -> Tensor:
        residual = x
        x = self.ln_1(x)
        out, weights = self.attn(x, mask)
        x = add(out, residual)
        residual = x
        x = self.ln_2(x)
        more = self.mlp(x)
        x = add(residual, more)
        del out, weights, more
        return x


class Gpt2:
    """Decoder with learned positions, its head tied."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape, self.run = tape, run
        self.config = config_of(run)
        self.kind = run.step.attention
        if self.config["reorder_and_upcast_attn"] and self.kind == "eager":
            raise MemplanError("estimate has no formula for reorder_and_upcast_attn.", "Type memplan trace.")
        width, vocab, layers = (self.config[key] for key in ("n_embd", "vocab_size", "n_layer"))
        tape.component = "embedding"
        self.wte = Embedding(tape, "wte", vocab, width)
        self.wpe = Embedding(tape, "wpe", self.config["n_positions"], width, words=False)
        tape.component = "blocks"
        mode = run.step.checkpointing
        kinds = [mode.treats(index) for index in range(layers)]
        self.stack = Stack(tape, kinds, lambda index: Gpt2Block(tape, self.config, self.kind))
        put_on(tape, self.stack.blocks, mode)
        self.ln_f = LayerNorm(tape, "ln_f", width)
        tape.component = "head"
        self.head_weight: Tensor = self.wte.weight
        if not run.model.decoder.tied:
            self.head_weight = tape.setup.parameter(tape, "lm_head.weight", (vocab, width))

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return Head(weight=self.head_weight)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Final normed hidden states [B, S, H]; the embedded tokens stay until then."""
        tokens, filling = batch["tokens"], Filling.of(self.run, batch)
        embeds = self.wte(tokens)
        places = position_ids(self.tape, tokens.shape[1]) if filling.positions is None else filling.positions
        position_embeds = self.wpe(places)
        held = [add(embeds, position_embeds)]
        mask = causal_mask(embeds, self.kind, filling)
        held.append(dropout(held.pop(), self.tape.setup.dropout))

        def call(block: Module, x: Tensor) -> Tensor:
            out: Tensor = block(x, mask, places)
            return out

        out: Tensor = self.ln_f(self.stack.run(held, call))
        del position_embeds, embeds
        return out


class NeoXAttention(Module):
    """Attention of one matrix, whose heads have q, k and v side by side; positions on a part of each head."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "attention")
        self.kind = kind
        width, bias = config["hidden_size"], config["attention_bias"]
        self.size = width // config["num_attention_heads"]
        self.query_key_value = Linear(tape, "query_key_value", width, 3 * width, bias=bias)
        self.dense = Linear(tape, "dense", width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None, rope: Rope, places: Tensor) -> tuple[Tensor, Tensor | None]:
        qkv = transpose(unflatten_last(self.query_key_value(x), 3 * self.size), 1, 2)
        q, k, v = chunk(qkv, 3)
        q, k = self.turned(q, k, rope)
        out, weights = attend(self.kind, q, k, v, mask, drop=self.tape.setup.dropout, strided="v")
        out = flatten(out, 2)
        out = self.dense(out)
        return out, weights

    def turned(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries and keys with the first part of each head turned."""
        cos, sin = unsqueeze(rope[0], 1), unsqueeze(rope[1], 1)
        size = cos.shape[-1]
        q_part, q_pass = narrow(q, -1, size), narrow(q, -1, self.size - size)
        k_part, k_pass = narrow(k, -1, size), narrow(k, -1, self.size - size)
        turned_q, turned_k = rotated(q_part, cos, sin), rotated(k_part, cos, sin)
        turned_q = cat((turned_q, q_pass))
        turned_k = cat((turned_k, k_pass))
        return turned_q, turned_k


class NeoXMlp(Module):
    """Two matrices with an activation between them."""

    def __init__(self, tape: Tape, config: dict[str, Any]) -> None:
        super().__init__(tape, "mlp")
        width, ffn = config["hidden_size"], config["intermediate_size"]
        self.act = config["hidden_act"]
        self.dense_h_to_4h = Linear(tape, "dense_h_to_4h", width, ffn, bias=True)
        self.dense_4h_to_h = Linear(tape, "dense_4h_to_h", ffn, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense_h_to_4h(x)
        x = activated(self.act, x)
        out: Tensor = self.dense_4h_to_h(x)
        return out


class NeoXLayer(Module):
    """Attention and feed-forward, beside one another or one behind the other."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "layers")
        self.parallel = config["use_parallel_residual"]
        width = config["hidden_size"]
        self.input_layernorm = LayerNorm(tape, "input_layernorm", width)
        self.post_attention_layernorm = LayerNorm(tape, "post_attention_layernorm", width)
        self.attention = NeoXAttention(tape, config, kind)
        self.mlp = NeoXMlp(tape, config)

    def forward(self, x: Tensor, mask: Tensor | None, rope: Rope, places: Tensor) -> Tensor:
        drop = self.tape.setup.dropout
        out, weights = self.attention(self.input_layernorm(x), mask, rope, places)
        out = dropout(out, drop)
        if self.parallel:
            more = self.mlp(self.post_attention_layernorm(x))
            more = dropout(more, drop)
            x = add(add(more, out), x)
        else:
            out = add(out, x)
            more = self.mlp(self.post_attention_layernorm(out))
            more = dropout(more, drop)
            x = add(more, out)
        del weights
        return x


class GptNeoX(Decoder):
    """Decoder with LayerNorms and partial rotary positions."""

    make_norm = LayerNorm

    def make_layer(self, index: int) -> Module:
        return NeoXLayer(self.tape, self.config, self.kind)

    def make_rotary(self) -> Any:
        rope = self.config.get("rope_parameters") or {}
        return RotaryEmbedding(self.tape, int(head_dim(self.config) * rope.get("partial_rotary_factor", 1.0)))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        embeds = self.embed_tokens(batch["tokens"])
        out = self.decode(dropout(embeds, self.tape.setup.dropout), filling=Filling.of(self.run, batch))
        del embeds
        return out

    def arguments(self, layer: Any, masks: dict[str, Tensor | None], rope: Any) -> tuple[Any, ...]:
        return masks["full_attention"], rope


__all__ = ["Gpt2", "GptNeoX"]
