"""gpt-oss as transformers 5.24 has it: attention sinks, windows in every other layer, experts with biases.

Letters: `B` batch, `S` sequence, `A` query heads, `N` tokens, `E` experts, `k` experts a token, `n` = N * k.
"""

from functools import partial
from typing import Any

from memplan.errors import MemplanError
from memplan.estimate import ops, views
from memplan.estimate.checkpoint import Policy
from memplan.estimate.families.hf_attention import Rope, heads_of, matmul, repeat_kv
from memplan.estimate.families.hf_decoder import Attention, Decoder, DecoderLayer, RMSNorm, RotaryEmbedding
from memplan.estimate.families.hf_experts import Experts, largest
from memplan.estimate.modules import Module
from memplan.estimate.ops import add, dropout, mul, scale, shift, sub
from memplan.estimate.products import linear, topk
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import cat, chunk, clone, expand, flatten, narrow, to, transpose, unsqueeze, view
from memplan.spec.run import RunSpec

LateNorm = partial(RMSNorm, late=True)
"""A norm that casts back behind its weight."""


class SinkAttention(Attention):
    """Eager attention with one more column of scores, which the softmax sees and nobody reads."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        bias = bool(config.get("attention_bias", True))
        super().__init__(tape, config, kind, bias=bias, out_bias=bias)
        self.sinks = tape.setup.parameter(tape, "self_attn.sinks", (config["num_attention_heads"],))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (heads_of(one(x), self.size) for one in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def turned(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(rope[0], 1), unsqueeze(rope[1], 1)
        turned = halves_turned(q, cos, sin)
        return turned, halves_turned(k, cos, sin)

    def weighed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        times = q.shape[1] // k.shape[1]
        keys, values = repeat_kv(k, times), repeat_kv(v, times)
        weights = scale(matmul(q, transpose(keys, 2, 3), False, False))
        if mask is not None:
            weights = add(weights, mask)
        B, A, S = q.shape[:3]
        sinks = expand(view(self.sinks, 1, A, 1, 1), B, A, S, 1)
        logits = cat((weights, sinks))
        logits = sub(logits, unsqueeze(largest(logits), -1))
        chances = ops.softmax(logits)
        scores = narrow(chances, -1, weights.shape[-1])
        weights = to(dropout(scores, self.drop), values.dtype)
        out = matmul(weights, values, False, times == 1 and not views.is_one(B))
        out = clone(transpose(out, 1, 2))
        return out, weights


def halves_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, D] turned as two halves."""
    first, second = chunk(x, 2)
    one = sub(mul(first, cos), mul(second, sin))
    two = add(mul(second, cos), mul(first, sin))
    return cat((one, two))


class HalfRotary(RotaryEmbedding):
    """Tables of half the size [1, S, dim / 2]."""

    def forward(self, x: Tensor, places: Tensor) -> Rope:
        angles = mul(to(unsqueeze(places, -1), "float32"), self.inv_freq)
        cos, sin = scale(scale(angles, "cos")), scale(scale(angles, "sin"))
        return to(cos, x.dtype), to(sin, x.dtype)


class GptOssExperts(Experts):
    """Gate and up in turns, both clamped."""

    def gated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        gate, up = narrow(x, -1, half), narrow(x, -1, half)
        gate = clamp(gate, bounds=1)
        up = clamp(up, bounds=2)
        glu = mul(gate, ops.of_result("sigmoid", scale(gate)))
        return mul(shift(up), glu)


class LogitsRouter(Module):
    """Logits [N, E], a softmax over the k largest, and their numbers."""

    def __init__(self, tape: Tape, num: int, width: int, k: int) -> None:
        super().__init__(tape, "router")
        self.k = k
        self.weight = tape.setup.parameter(tape, "router.weight", (num, width))
        self.bias = tape.setup.parameter(tape, "router.bias", (num,))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(rows, self.weight, self.bias)
        values, chosen = topk(logits, self.k)
        return logits, ops.softmax(values, values.dtype), chosen


class GptOssMlp(Module):
    """Router and experts; the shares are given back too."""

    def __init__(self, tape: Tape, config: dict[str, Any]) -> None:
        super().__init__(tape, "mlp")
        num, width = config["num_local_experts"], config["hidden_size"]
        self.router = LogitsRouter(tape, num, width, config["num_experts_per_tok"])
        self.experts = GptOssExperts(tape, num, width, config["intermediate_size"], "", transposed=True, bias=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = flatten(x, 0, 1)
        logits, shares, chosen = self.router(x)
        x = self.experts(x, chosen, shares)
        x = view(x, *shape)
        del logits
        return x, shares


class GptOssLayer(DecoderLayer):
    """Holds attention's weights until the experts have run, and their shares until it returns."""

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, rest = self.self_attn(x, mask, rope, places)
        x = add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x, rest = self.mlp(x)
        x = add(residual, x)
        del rest
        return x


class GptOss(Decoder):
    """Experts in every layer; transformers has no other attention than eager for it."""

    make_norm = LateNorm

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        mode = run.step.checkpointing
        kept = Policy(mode.ops) if mode.kind == "selective" else None
        if kept is not None and kept.saves("_grouped_mm"):
            raise MemplanError(
                "selective keeps results of _grouped_mm, to which gpt_oss adds biases in place.",
                "Keep other ops, or use --ckpt full.",
            )
        super().__init__(tape, run)

    def make_layer(self, index: int) -> Module:
        layer = GptOssLayer(self.tape, self.layer_type(index))
        layer.self_attn = SinkAttention(self.tape, self.config, self.kind)
        layer.mlp = GptOssMlp(self.tape, self.config)
        layer.make_norms(self.config["hidden_size"], LateNorm)
        return layer

    def make_rotary(self) -> Any:
        return HalfRotary(self.tape, self.config.get("head_dim", 64))


def clamp(x: Tensor, *, bounds: int) -> Tensor:
    """`x` within one bound or two: saves it; backward compares once a bound, and picks."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        masks = [tape.new("scalar_tensor", (), grads[0].dtype)]
        masks += [tape.new("le", saved[0].shape, "bool") for _ in range(bounds)]
        out = tape.new("where", grads[0].shape, grads[0].dtype)
        masks.clear()
        return [out]

    node = tape.record("clamp", (x,), backward, (x,))
    linked: Tensor = tape.link(node, tape.make("clamp", (x.shape, x.dtype)))
    return linked
