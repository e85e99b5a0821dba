"""Qwen3.5 and its kin as transformers 5.24 has them: gated delta-nets, every fourth layer gated attention.

Known limits: the delta rule and the causal convolution are told as transformers' own torch code runs them. Where the
packages flash-linear-attention and causal_conv1d are installed, transformers calls their kernels on CUDA instead, which
keep far less for backward.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `D` head size; of a delta-net `K` key heads, `V` value
heads, `C` channels of its convolution, `n` parts of 64 tokens.
"""

from typing import Any

from memplan.estimate import ops, views
from memplan.estimate.families.gemma import GemmaNorm
from memplan.estimate.families.hf_attention import Rope, attend, matmul, rotated
from memplan.estimate.families.hf_decoder import Attention, Decoder, DecoderLayer, Mlp, activated, head_dim
from memplan.estimate.families.hf_masks import Filling, causal_mask, padding_of_states
from memplan.estimate.modules import Linear, Module
from memplan.estimate.ops import add, mean_last, mul, rsqrt, scale, shift, square
from memplan.estimate.products import masked_fill
from memplan.estimate.recurrent import assign, convolved, cumsum, pad, rounds, select, solve_triangular
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import (
    cat,
    chunk,
    clone,
    expand,
    flatten,
    narrow,
    to,
    transpose,
    unflatten_last,
    unsqueeze,
    view,
)

PART = 64
"""Tokens of a part. Source: `torch_chunk_gated_delta_rule`, models/qwen3_5/modeling_qwen3_5.py, transformers 5.24."""


class GatedNorm(Module):
    """Root-mean-square norm in fp32, then times an activated gate."""

    def __init__(self, tape: Tape, name: str, width: int) -> None:
        super().__init__(tape, name)
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width,))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = x.dtype
        x = to(x, "float32")
        variance = mean_last(square(x))
        x = mul(x, rsqrt(shift(variance)))
        x = mul(self.weight, to(x, dtype))
        x = mul(x, ops.of_input("silu", to(gate, "float32")))
        return to(x, dtype)


class DeltaNet(Module):
    """Gated delta-net [B, S, H] -> [B, S, H]."""

    def __init__(self, tape: Tape, config: dict[str, Any]) -> None:
        super().__init__(tape, "linear_attn")
        setup, hidden = tape.setup, config["hidden_size"]
        self.act = config.get("hidden_act", "silu")
        self.key_size, self.value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
        key_width = config["linear_num_key_heads"] * self.key_size
        heads = config["linear_num_value_heads"]
        width = heads * self.value_size
        self.widths = key_width, key_width, width
        self.kernel = config["linear_conv_kernel_dim"]
        self.conv1d = setup.parameter(tape, "conv1d.weight", (sum(self.widths), 1, self.kernel))
        self.dt_bias = setup.parameter(tape, "dt_bias", (heads,))
        self.decay = setup.parameter(tape, "A_log", (heads,))
        self.norm = GatedNorm(tape, "norm", self.value_size)
        self.out_proj = Linear(tape, "out_proj", width, hidden)
        self.in_proj_qkv = Linear(tape, "in_proj_qkv", hidden, sum(self.widths))
        self.in_proj_z = Linear(tape, "in_proj_z", hidden, width)
        self.in_proj_b = Linear(tape, "in_proj_b", hidden, heads)
        self.in_proj_a = Linear(tape, "in_proj_a", hidden, heads)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        if padding is not None:
            x = mul(x, unsqueeze(padding, 2))
        qkv = transpose(self.in_proj_qkv(x), 1, 2)
        z = unflatten_last(self.in_proj_z(x), self.value_size)
        b, a = self.in_proj_b(x), self.in_proj_a(x)
        qkv = self.convolve(qkv)
        qkv = transpose(qkv, 1, 2)
        q, k, v = views.split(qkv, self.widths)
        q, k = unflatten_last(q, self.key_size), unflatten_last(k, self.key_size)
        v = unflatten_last(v, self.value_size)
        beta = ops.of_result("sigmoid", b)
        rates = ops.neg(ops.exp(to(self.decay, "float32")))
        g = mul(rates, ops.of_input("softplus", add(to(a, "float32"), self.dt_bias)))
        del rates
        out = delta_rule(q, k, v, g, beta)
        out = flatten(clone(out) if out.dtype == "float32" else out, 0, 2)
        z = flatten(z, 0, 2)
        out = self.norm(out, z)
        out = view(out, *x.shape[:2], out.numel // x.shape[0] // x.shape[1])
        return self.out_proj(out)

    def convolve(self, x: Tensor) -> Tensor:
        """x [B, C, S] by the causal filter, activated."""
        size, dtype = x.shape[2], x.dtype
        weight = view(self.conv1d, *self.conv1d.shape)
        out = narrow(convolved(to(x, weight.dtype), weight), 2, size)
        out = activated(self.act, out)
        return to(out, dtype)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k [B, S, K, Dk], v [B, S, V, Dv], decays and rates [B, S, V] -> [B, S, V, Dv], in fp32 inside."""
    tape, dtype = q.tape, q.dtype
    B, size, heads, key_size = k.shape
    value_heads, value_size = v.shape[2:]
    repeats = value_heads // heads
    more = -size % PART
    num = (size + more) // PART
    apart = dtype == "float32" and not more
    """Whether heads lie apart in memory, as projections leave them; a cast or added zeros make them dense."""
    if repeats > 1:
        q, k = views.repeat_interleave(q, repeats, 2), views.repeat_interleave(k, repeats, 2)
    q, k, v, beta, decay = [to(transpose(x, 1, 2), "float32") for x in (q, k, v, beta, g)]
    q = l2norm(q)
    k = l2norm(k)
    q = scale(q)
    q, k, v = [pad(x, 2, more) for x in (q, k, v)]
    beta, decay = [pad(x, 2, more) for x in (beta, decay)]
    v_beta = mul(v, unsqueeze(beta, -1))
    k_beta = mul(k, unsqueeze(beta, -1))
    q, k = [parted(x, num) for x in (q, k)]
    k_beta, v_beta = [parted(x, num, columns=num > 1) for x in (k_beta, v_beta)]
    decay = view(decay, B, value_heads, num, PART)
    ones = tape.make("ones", ((PART, PART), "bool"))
    upper = tape.make("triu", (ones.shape, "bool"))
    del ones
    sums = cumsum(decay)
    pairs = ops.sub(unsqueeze(sums, 4), unsqueeze(sums, 3))
    pairs = masked_fill(pairs, upper)
    pairs = ops.exp(pairs)
    lone = apart and repeats > 1 and not views.is_one(B)
    split = lone or (apart and num > 1)
    system = mul(matmul(k_beta, transpose(k, -1, -2), split, split), pairs)
    inside = mul(matmul(q, transpose(k, -1, -2), split, split), pairs)
    decayed = mul(k_beta, unsqueeze(ops.exp(sums), -1))
    values = solve_triangular(system, v_beta)
    keys = solve_triangular(system, decayed)
    state = tape.make("zeros", ((B, value_heads, key_size, value_size), "float32"))
    out = tape.make("zeros_like", (values.shape, "float32"))
    q = mul(q, unsqueeze(ops.exp(sums), -1))
    k = mul(k, unsqueeze(ops.exp(ops.sub(narrow(sums, -1, 1), sums)), -1))
    decays = view(ops.exp(select(sums, -1)), B, value_heads, num, 1, 1)

    def run(held: list[Tensor]) -> None:
        new = ops.sub(select(values, 2), matmul(select(keys, 2), held[0], False, False))
        held[1:2] = [new]
        held[2:] = [matmul(select(q, 2), held[0], lone, False)]
        assign(out, add(held[2], matmul(select(inside, 2), new, False, False)))
        held[0] = add(mul(held[0], select(decays, 2)), matmul(transpose(select(k, 2), -1, -2), new, lone, False))

    held = [state]
    del state
    rounds(num, held, run)
    del held[0]
    out = view(clone(out) if num > 1 else out, B, value_heads, size + more, value_size)
    if more:
        out = narrow(out, 2, size)
    return to(transpose(out, 1, 2), dtype)


def l2norm(x: Tensor) -> Tensor:
    """`x` over its length along the last dimension."""
    root = rsqrt(shift(ops.total(mul(x, x), -1, keepdim=True)))
    return mul(x, root)


def parted(x: Tensor, num: int, *, columns: bool = False) -> Tensor:
    """x [B, V, S, D] as [B, V, n, S / n, D]; a gradient whose `columns` are dense is copied on its way back."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        grad: Tensor = grads[0]
        return [tape.new("clone", node.info, grad.dtype) if columns else grad.alias(node.info)]

    node = tape.record("view", (x,), backward, info=x.shape)
    return tape.link(node, x.alias((*x.shape[:2], num, x.shape[2] // num, x.shape[3])))


class GatedAttention(Attention):
    """Attention whose result is multiplied by a gate that comes with the queries; positions on a part of each head."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        Module.__init__(self, tape, "self_attn")
        self.kind, self.drop = kind, tape.setup.dropout
        bias, hidden = bool(config.get("attention_bias", False)), config["hidden_size"]
        heads, self.size = config["num_attention_heads"], head_dim(config)
        kv_width = config.get("num_key_value_heads", heads) * self.size
        self.q_proj = Linear(tape, "q_proj", hidden, 2 * heads * self.size, bias=bias)
        self.k_proj = Linear(tape, "k_proj", hidden, kv_width, bias=bias)
        self.v_proj = Linear(tape, "v_proj", hidden, kv_width, bias=bias)
        self.o_proj = Linear(tape, "o_proj", heads * self.size, hidden, bias=bias)
        self.q_norm, self.k_norm = GemmaNorm(tape, "q_norm", self.size), GemmaNorm(tape, "k_norm", self.size)

    def forward(
        self, x: Tensor, mask: Tensor | None, rope: Rope | None, places: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        q, gate = chunk(unflatten_last(self.q_proj(x), 2 * self.size), 2)
        gate = flatten(clone(gate), 2)
        q = transpose(self.normed(self.q_norm, view(q, *q.shape)), 1, 2)
        k = transpose(self.normed(self.k_norm, unflatten_last(self.k_proj(x), self.size)), 1, 2)
        v = transpose(unflatten_last(self.v_proj(x), self.size), 1, 2)
        assert rope is not None
        q, k = self.turned(q, k, rope)
        out, weights = attend(self.kind, q, k, v, mask, drop=self.drop, strided="v")
        out = flatten(out, 2)
        out = mul(out, ops.of_result("sigmoid", gate))
        out = self.o_proj(out)
        return out, weights

    def turned(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(rope[0], 1), unsqueeze(rope[1], 1)
        size = cos.shape[-1]
        q_part, q_pass = narrow(q, -1, size), narrow(q, -1, self.size - size)
        k_part, k_pass = narrow(k, -1, size), narrow(k, -1, self.size - size)
        turned_q = rotated(q_part, cos, sin)
        turned_k = rotated(k_part, cos, sin)
        turned_q = cat((turned_q, q_pass))
        turned_k = cat((turned_k, k_pass))
        return turned_q, turned_k


class Layer(DecoderLayer):
    """Norm, delta-net or attention, residual; norm, feed-forward, residual."""

    linear_attn: Module

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> Tensor:
        residual, weights = x, None
        x = self.input_layernorm(x)
        if self.layer_type == "linear_attention":
            x = self.linear_attn(x, mask)
        else:
            x, weights = self.self_attn(x, mask, rope, places)
        x = add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = add(residual, x)
        del weights
        return x


class Rotary(Module):
    """Cosines and sines [B, S, dim] of positions in time, height and width, which are the same for text."""

    def __init__(self, tape: Tape, dim: int) -> None:
        super().__init__(tape, "rotary_emb")
        self.inv_freq = tape.new("buffer", (dim // 2,), "float32", category="buffers")
        self.original_inv_freq = tape.new("buffer", (dim // 2,), "float32", category="buffers")

    def forward(self, x: Tensor, places: Tensor) -> Rope:
        samples, size = x.shape[:2]
        places = expand(view(places, 1, 1, size), 3, samples, size)
        angles = mul(to(unsqueeze(places, -1), "float32"), self.inv_freq)
        cos, sin = scale(scale(angles, "cos")), scale(scale(angles, "sin"))
        sin = cat((select(sin, 0), select(sin, 0)))
        cos = cat((select(cos, 0), select(cos, 0)))
        return to(cos, x.dtype), to(sin, x.dtype)


class Qwen3_5(Decoder):
    """Delta-nets and attention by turns."""

    make_norm = GemmaNorm

    def make_layer(self, index: int) -> Module:
        config, tape = self.config, self.tape
        layer = Layer(tape, self.layer_type(index))
        if layer.layer_type == "linear_attention":
            layer.linear_attn = DeltaNet(tape, config)
        else:
            layer.self_attn = GatedAttention(tape, config, self.kind)
        layer.mlp = Mlp(tape, config["hidden_size"], config["intermediate_size"], config.get("hidden_act", "silu"))
        layer.make_norms(config["hidden_size"], GemmaNorm)
        return layer

    def layer_type(self, index: int) -> str:
        types, every = self.config.get("layer_types"), self.config.get("full_attention_interval", 4)
        return types[index] if types else ("linear_attention" if (index + 1) % every else "full_attention")

    def make_rotary(self) -> Any:
        factor = self.config["rope_parameters"].get("partial_rotary_factor", 1.0)
        return Rotary(self.tape, int(head_dim(self.config) * factor))

    def masks(self, x: Tensor, filling: Filling) -> dict[str, Tensor | None]:
        full = causal_mask(x, self.kind, filling)
        return {"full_attention": full, "linear_attention": padding_of_states(filling)}
