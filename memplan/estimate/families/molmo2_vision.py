"""Molmo2's image side as transformers 5.24 has it: a tower whose layers' outputs are read, and a connector that pools
them.

Locals live as long as those of models/molmo2/modeling_molmo2.py. Letters: `N` crops of a chunk, `P` patches of one, `T`
image tokens of a chunk, `p` patches pooled into one, `h` width of the tower, `H` hidden.
"""

import math
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.estimate import ops, views
from memplan.estimate.checkpoint import put_on
from memplan.estimate.families.encoders import Mlp
from memplan.estimate.families.hf_attention import attend
from memplan.estimate.families.hf_decoder import Mlp as GatedMlp
from memplan.estimate.modules import LayerNorm, Linear, Module
from memplan.estimate.ops import add, mul
from memplan.estimate.picking import picked
from memplan.estimate.stack import Stack, more
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import flatten, to, transpose, unflatten_last, unsqueeze, view
from memplan.spec.run import RunSpec

Facts = dict[str, Any]
"""Keys of a configuration."""


class VisionAttention(Module):
    """Attention from queries [N, Q, in] over a context [N, P, in] -> [N, Q, out]."""

    def __init__(self, tape: Tape, name: str, config: Facts, kind: str, *, width: int) -> None:
        super().__init__(tape, name)
        self.kind, self.size = kind, config["head_dim"]
        bias = bool(config["attention_bias"])
        inner = config["num_attention_heads"] * self.size
        inner_kv = config["num_key_value_heads"] * self.size
        self.q_proj = Linear(tape, "q_proj", width, inner, bias=bias)
        self.k_proj = Linear(tape, "k_proj", width, inner_kv, bias=bias)
        self.v_proj = Linear(tape, "v_proj", width, inner_kv, bias=bias)
        self.o_proj = Linear(tape, "o_proj", inner, config["hidden_size"], bias=bias)

    def forward(self, queries: Tensor, context: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        q = transpose(unflatten_last(self.q_proj(queries), self.size), 1, 2)
        k = transpose(unflatten_last(self.k_proj(context), self.size), 1, 2)
        v = transpose(unflatten_last(self.v_proj(context), self.size), 1, 2)
        strided = "kv" if views.is_one(q.shape[2]) else "qkv"
        drop = self.tape.setup.dropout
        out, weights = attend(self.kind, q, k, v, mask, drop=drop, causal=False, strided=strided)
        out = flatten(out, 2)
        out = self.o_proj(out)
        return out, weights


class VisionLayer(Module):
    """Norm, attention, residual; norm, feed-forward, residual: [N, P, h] -> [N, P, h]."""

    def __init__(self, tape: Tape, config: Facts, kind: str) -> None:
        super().__init__(tape, "layers")
        self.layer_norm1 = LayerNorm(tape, "layer_norm1", config["hidden_size"])
        self.self_attn = VisionAttention(tape, "self_attn", config, kind, width=config["hidden_size"])
        self.layer_norm2 = LayerNorm(tape, "layer_norm2", config["hidden_size"])
        self.mlp = Mlp(tape, config)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.layer_norm1(x)
        x, weights = self.self_attn(x, x)
        x = add(residual, x)
        residual = x
        x = self.layer_norm2(x)
        x = self.mlp(x)
        x = add(residual, x)
        del weights
        return x


class VisionTower(Module):
    """Patches [N, P, patch] -> what went into the layers and came out of each, all of which stays until it is read."""

    def __init__(self, tape: Tape, run: RunSpec, config: Facts, read: list[int]) -> None:
        super().__init__(tape, "vision_tower")
        width = config["hidden_size"]
        setup, mode, first = tape.setup, run.step.checkpointing, first_blocks(run)["vision_tower"]
        self.positions = setup.parameter(tape, "positional_embedding", (config["num_position_embeddings"], width))
        self.patch_embedding = Linear(
            tape, "patch_embedding", config["patch_size"] ** 2 * config["num_channels"], width, bias=True
        )

        def make(index: int) -> Module:
            return VisionLayer(tape, config, run.step.attention)

        def kind(index: int) -> tuple[bool, bool, bool]:
            return index in read, index > max(read), first is not None and mode.treats(first + index)

        tape.component = "vision blocks"
        kinds = [kind(index) for index in range(config["num_hidden_layers"])]
        self.stack = Stack(tape, kinds, make, counted=first is not None)
        tape.component = "vision"
        for index, block in self.stack.blocks:
            for parameter in block.parameters():
                parameter.idle = index > max(read)
        if first is not None:
            put_on(tape, [(first + index, block) for index, block in self.stack.blocks], mode)

    def forward(self, pixels: Tensor) -> tuple[dict[int, Tensor], list[Any]]:
        x = self.patch_embedding(to(pixels, self.patch_embedding.weight.dtype))
        x = add(x, to(unsqueeze(self.positions, 0), x.dtype))
        numbers = {id(block): index for index, block in self.stack.blocks}
        states: dict[int, Tensor] = {-1: x}
        others: list[Any] = []

        def call(block: Module, x: Tensor) -> Tensor:
            x = states[numbers[id(block)]] = block(x)
            copies = block.parameters()[0].copies
            if copies > 1 and not x.requires_grad:
                others.append(more(self.tape, self.tape.allocs[x.storage.index], copies - 1))
            return x

        held = [x]
        del x
        others.append(ops.mean(self.stack.run(held, call), 1))
        return states, others


class Connector(Module):
    """Features [N, P, layers * h] and places [T, p] -> image tokens [T, H]."""

    def __init__(self, tape: Tape, run: RunSpec, config: Facts, patches: int) -> None:
        super().__init__(tape, "multi_modal_projector")
        self.kind = run.step.attention
        assert run.model.connector is not None
        self.ragged = math.isqrt(patches) % math.isqrt(run.model.connector.pool) != 0
        """Whether some tokens pool fewer patches than others."""
        width = config["hidden_size"] * len(config["vision_feature_layer"])
        self.image_pooling_2d = VisionAttention(tape, "image_pooling_2d", config, self.kind, width=width)
        self.image_projector = Projector(tape, config)

    def forward(self, features: Tensor, places: Tensor) -> Tensor:
        tape, (tokens, pool) = self.tape, places.shape
        flat = flatten(features, 0, 1)
        valid = tape.make("ge", (places.shape, "bool"))
        some = tape.make("any", ((tokens,), "bool"))
        patches = picked(flat, tape.make("clamp", (places.shape, "int64")), (tokens, pool, flat.shape[1]))
        patches = mul(patches, unsqueeze(to(valid, patches.dtype), -1))
        count = tape.make("sum", ((tokens,), "float32"))
        count = tape.make("where", ((tokens,), "float32"))
        query = ops.div(ops.total(patches, -2, keepdim=True), to(view(count, tokens, 1, 1), patches.dtype))
        mask = self.mask(tokens, pool, query.dtype)
        pooled, weights = self.image_pooling_2d(query, patches, mask)
        pooled = views.squeeze(pooled, 1)
        pooled = self.image_projector(pooled)
        del weights
        return picked(pooled, some, pooled.shape)

    def mask(self, tokens: Any, pool: int, dtype: str) -> Tensor | None:
        """Which patches each token pools, where that is not all."""
        tape = self.tape
        if self.kind == "sdpa" and not self.ragged:
            return None
        mask: Tensor = tape.make("bitwise_and", ((tokens, 1, 1, pool), "bool"))
        return mask if self.kind == "sdpa" else tape.make("where", (mask.shape, dtype))


class Projector(GatedMlp):
    """Gated feed-forward layer from the tower's width to the decoder's."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        Module.__init__(self, tape, "image_projector")
        self.act = config["hidden_act"]
        width, ffn, bias = config["hidden_size"], config["intermediate_size"], bool(config["mlp_bias"])
        self.gate_proj = Linear(tape, "gate_proj", width, ffn, bias=bias)
        self.up_proj = Linear(tape, "up_proj", width, ffn, bias=bias)
        self.down_proj = Linear(tape, "down_proj", ffn, config["text_hidden_size"])


def first_blocks(run: RunSpec, tower: str = "vision_tower") -> dict[str, int | None]:
    """Number of the first layer of the decoder and of `tower` among those that the step's checkpointing counts; None
    where it counts none of them. MemplanError where it names a list that there is not."""
    assert run.model.vision is not None
    sizes = {"language_model": run.model.decoder.num_layers, tower: run.model.vision.num_layers}
    paths = {f"{start}model.{name}.layers": name for name in sizes for start in ("", "model.", "model.model.")}
    named = run.step.blocks.split("+") if run.step.blocks else [f"model.{name}.layers" for name in sizes]
    first: dict[str, int | None] = dict.fromkeys(sizes)
    count = 0
    for path in named:
        if path not in paths:
            raise MemplanError(f"{run.model.name} has no list of blocks {path!r}.", near_names(path, paths))
        first[paths[path]] = count
        count += sizes[paths[path]]
    return first
