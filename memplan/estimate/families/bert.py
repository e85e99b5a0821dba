"""BERT as transformers 5.24 has it, under its head for masked words.

Locals live as long as those of models/bert/modeling_bert.py. Letters: `B` batch, `S` sequence, `H` hidden, `V`
vocabulary.
"""

from typing import Any

from memplan.errors import MemplanError
from memplan.estimate.checkpoint import put_on
from memplan.estimate.families import config_of
from memplan.estimate.families.hf_attention import attend
from memplan.estimate.families.hf_decoder import activated
from memplan.estimate.families.hf_masks import Filling, mask_to_both_sides
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, LayerNorm, Linear, Module
from memplan.estimate.ops import add, dropout
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import expand, flatten, transpose, unflatten_last
from memplan.spec.run import RunSpec


class Embeddings(Module):
    """Words, their types and places, added up and normed."""

    def __init__(self, tape: Tape, config: dict[str, Any]) -> None:
        super().__init__(tape, "embeddings")
        width, length = config["hidden_size"], config["max_position_embeddings"]
        self.word_embeddings = Embedding(tape, "word_embeddings", config["vocab_size"], width)
        self.position_embeddings = Embedding(tape, "position_embeddings", length, width, words=False)
        self.token_type_embeddings = Embedding(
            tape, "token_type_embeddings", config["type_vocab_size"], width, words=False
        )
        self.LayerNorm = LayerNorm(tape, "LayerNorm", width)
        self.position_ids = tape.new("buffer", (1, length), "int64", category="buffers")
        self.token_type_ids = tape.new("buffer", (1, length), "int64", category="buffers")

    def forward(self, tokens: Tensor) -> Tensor:
        B, S = tokens.shape
        places = self.position_ids.alias((1, S))
        types = expand(self.tape.make("gather", ((1, S), "int64")), B, S)
        words = self.word_embeddings(tokens)
        of_types = self.token_type_embeddings(types)
        x = add(words, of_types)
        of_places = self.position_embeddings(places)
        x = add(x, of_places)
        x = self.LayerNorm(x)
        x = dropout(x, self.tape.setup.dropout)
        del words, of_types, of_places
        return x


class SelfAttention(Module):
    """Attention to both sides [B, S, H] -> [B, S, H], before its output matrix."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "self")
        self.kind = kind
        width = config["hidden_size"]
        self.size = width // config["num_attention_heads"]
        self.query = Linear(tape, "query", width, width, bias=True)
        self.key = Linear(tape, "key", width, width, bias=True)
        self.value = Linear(tape, "value", width, width, bias=True)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q = transpose(unflatten_last(self.query(x), self.size), 1, 2)
        k = transpose(unflatten_last(self.key(x), self.size), 1, 2)
        v = transpose(unflatten_last(self.value(x), self.size), 1, 2)
        drop = self.tape.setup.dropout
        out, weights = attend(self.kind, q, k, v, mask, drop=drop, causal=False, wide=False, back=False)
        out = flatten(out, 2)
        return out, weights


class Output(Module):
    """A matrix, the residual and a norm behind it."""

    def __init__(self, tape: Tape, width: int, out: int) -> None:
        super().__init__(tape, "output")
        self.dense = Linear(tape, "dense", width, out, bias=True)
        self.LayerNorm = LayerNorm(tape, "LayerNorm", out)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        x = dropout(x, self.tape.setup.dropout)
        out: Tensor = self.LayerNorm(add(x, residual))
        return out


class Attention(Module):
    """Attention with its output."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "attention")
        self.self = SelfAttention(tape, config, kind)
        self.output = Output(tape, config["hidden_size"], config["hidden_size"])

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, weights = self.self(x, mask)
        out = self.output(out, x)
        return out, weights


class Dense(Module):
    """A matrix and an activation."""

    def __init__(self, tape: Tape, name: str, width: int, out: int, act: str) -> None:
        super().__init__(tape, name)
        self.act = act
        self.dense = Linear(tape, "dense", width, out, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return activated(self.act, x)


class Layer(Module):
    """Attention and feed-forward, each with a norm behind its residual."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "layer")
        width, ffn = config["hidden_size"], config["intermediate_size"]
        self.attention = Attention(tape, config, kind)
        self.intermediate = Dense(tape, "intermediate", width, ffn, config["hidden_act"])
        self.output = Output(tape, ffn, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        out, weights = self.attention(x, mask)
        inner = self.intermediate(out)
        x = self.output(inner, out)
        del weights
        return x


class Transform(Dense):
    """What the head does before its matrix."""

    def __init__(self, tape: Tape, width: int, act: str) -> None:
        super().__init__(tape, "transform", width, width, act)
        self.LayerNorm = LayerNorm(tape, "LayerNorm", width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(super().forward(x))
        return out


class Bert:
    """Encoder; the classes without a head for words have a pooler, with which they cannot train here."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape, self.run = tape, run
        config = self.config = config_of(run)
        kind, mode = run.step.attention, run.step.checkpointing
        width, vocab = config["hidden_size"], config["vocab_size"]
        self.architecture = (config.get("architectures") or ["BertForMaskedLM"])[0]
        tape.component = "embedding"
        self.embeddings = Embeddings(tape, config)
        tape.component = "blocks"
        kinds = [mode.treats(index) for index in range(config["num_hidden_layers"])]
        self.stack = Stack(tape, kinds, lambda index: Layer(tape, config, kind))
        put_on(tape, self.stack.blocks, mode)
        tape.component = "head"
        if self.architecture in ("BertModel", "BertForPreTraining"):
            self.pooler = Dense(tape, "pooler", width, width, "tanh")
        if self.architecture == "BertModel":
            return
        self.transform = Transform(tape, width, config["hidden_act"])
        self.head_weight: Tensor = self.embeddings.word_embeddings.weight
        if not config["tie_word_embeddings"]:
            self.head_weight = tape.setup.parameter(tape, "decoder.weight", (vocab, width))
            tape.setup.parameter(tape, "predictions.bias", (vocab,)).idle = True
        self.bias = tape.setup.parameter(tape, "decoder.bias", (vocab,))
        if self.architecture == "BertForPreTraining":
            self.seq_relationship = Linear(tape, "seq_relationship", width, 2, bias=True)

    @property
    def head(self) -> Head:
        """What makes logits of the transformed rows."""
        return Head(weight=self.head_weight, bias=self.bias)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows [B, S, H] behind the head's transform."""
        if self.architecture != "BertForMaskedLM":
            raise MemplanError(f"No step trains a {self.architecture}.", "Name BertForMaskedLM in architectures.")
        rows = self.encode(batch["tokens"], Filling.of(self.run, batch))
        out: Tensor = self.transform(rows)
        return out

    def encode(self, tokens: Tensor, filling: Filling) -> Tensor:
        """Hidden states behind the last layer; the embedded ones stay until then."""
        embeds = self.embeddings(tokens)
        mask = mask_to_both_sides(embeds, self.run.step.attention, filling)

        def call(layer: Module, x: Tensor) -> Tensor:
            out: Tensor = layer(x, mask)
            return out

        return self.stack.run([embeds], call)
