"""memplan's own decoder over the ledger, module for module as `memplan.models` has it.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `K` key/value heads, `D` head size, `F` feed-forward.
"""

from typing import Any

from memplan.estimate import ops, views
from memplan.estimate.attention import eager, sdpa
from memplan.estimate.cache import Past, joined
from memplan.estimate.modules import LayerNorm, Linear, Module, RMSNorm
from memplan.estimate.ops import add, dropout, mul, of_input, scale
from memplan.estimate.products import grouped_mm, index_select, plain, topk
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import cat, chunk, clone, flatten, to, transpose, unflatten_last
from memplan.spec.model import DecoderSpec


def make_norm(tape: Tape, name: str, spec: DecoderSpec, kind: str) -> Module:
    """The norm over H that `spec` asks for."""
    if spec.norm == "rms":
        return RMSNorm(tape, name, spec.hidden, kind, offset=spec.norm_offset)
    return LayerNorm(tape, name, spec.hidden, bias=spec.norm_bias)


class Attention(Module):
    """Grouped-query attention [B, S, H] -> [B, S, H]."""

    def __init__(
        self, tape: Tape, spec: DecoderSpec, *, attention: str, norm: str, index: int, store: dict[int, Any]
    ) -> None:
        super().__init__(tape, "attn")
        self.spec = spec
        self.kind = attention
        self.index = index
        self.source = spec.kv_source(index)
        self.leaves_kv = spec.leaves_kv(index)
        self.store = store
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if self.source is not None:
            self.q = Linear(tape, "q", spec.hidden, q_width, bias=spec.qkv_bias)
        elif spec.projections == "fused":
            self.qkv = Linear(tape, "qkv", spec.hidden, q_width + 2 * kv_width, bias=spec.qkv_bias)
        else:
            self.q = Linear(tape, "q", spec.hidden, q_width, bias=spec.qkv_bias)
            self.k = Linear(tape, "k", spec.hidden, kv_width, bias=spec.qkv_bias)
            self.v = Linear(tape, "v", spec.hidden, kv_width, bias=spec.qkv_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(tape, "q_norm", spec.head_dim, norm, offset=spec.norm_offset)
        if spec.qk_norm and self.source is None:
            self.k_norm = RMSNorm(tape, "k_norm", spec.head_dim, norm, offset=spec.norm_offset)
        self.out = Linear(tape, "out", q_width, spec.hidden, bias=spec.out_bias)

    def forward(self, x: Tensor, rope: Any, mask: Tensor | None, past: Past | None = None) -> Any:
        q, k, v = self.projected(x, rope)
        if past is None:
            out = self.weigh(q, k, v, mask)
            del q, k, v
            return self.out(self.side_by_side(out))
        if self.spec.projections == "fused":
            v = clone(v)
        keys, values = joined(past, k, v)
        out = self.weigh(q, keys, values, mask)
        del q, keys, values
        return self.out(self.side_by_side(out)), k, v

    def side_by_side(self, out: Tensor) -> Tensor:
        """Heads side by side [B, S, A*D]: a view where the kernel wrote them so."""
        heads = transpose(out, 1, 2)
        copied = self.kind == "eager" or (out.node is not None and out.node.name in ("bmm", "to"))
        return flatten(clone(heads) if copied else heads, 2)

    def projected(self, x: Tensor, rope: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, A, S, D], keys and values [B, K, S, D], normed and rotated."""
        if self.source is not None:
            q = unflatten_last(self.q(x), self.spec.head_dim)
            q = transpose(q if self.q_norm is None else self.q_norm(q), 1, 2)
            return (q if rope is None else rotate(q, rope, self.spec.rope_fp32)), *self.store[self.source]
        q, k, v = self.project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)
        if rope is not None:
            q = rotate(q, rope, self.spec.rope_fp32)
            k = rotate(k, rope, self.spec.rope_fp32)
        if self.leaves_kv:
            self.store[self.index] = k, v
        return q, k, v

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention by the kernel asked for; under a dense mask the heads are repeated."""
        if self.kind == "eager":
            return eager(q, k, v, mask, strided="" if views.is_one(q.shape[0]) else "qkv")
        if mask is None:
            return sdpa(q, k, v)
        times = q.shape[1] // k.shape[1]
        if times > 1:
            k, v = views.repeat_interleave(k, times, 1), views.repeat_interleave(v, times, 1)
        return sdpa(q, k, v, to(mask, q.dtype), causal=False)

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries [B, S, A, D], keys and values [B, S, K, D]."""
        spec = self.spec
        if spec.projections == "fused":
            heads = unflatten_last(self.qkv(x), spec.head_dim)
            return views.split(heads, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 2)
        return [unflatten_last(linear(x), spec.head_dim) for linear in (self.q, self.k, self.v)]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor], in_fp32: bool) -> Tensor:
    """Rotary embedding of x [B, heads, S, D] by tables [S, D], as two halves."""
    cos, sin = rope
    dtype = x.dtype
    if in_fp32:
        x = to(x, "float32")
    first, second = chunk(x, 2)
    return to(add(mul(x, cos), mul(cat((ops.neg(second), first)), sin)), dtype if in_fp32 else cos.dtype)


class GatedMlp(Module):
    """Gated feed-forward layer, gate and up as two matrices or one."""

    def __init__(
        self, tape: Tape, name: str, width: int, ffn: int, out: int, *, act: str, bias: bool, fused: bool
    ) -> None:
        super().__init__(tape, name)
        self.act = act
        self.fused = fused
        if fused:
            self.gate_up = Linear(tape, "gate_up", width, 2 * ffn, bias=bias)
        else:
            self.gate = Linear(tape, "gate", width, ffn, bias=bias)
            self.up = Linear(tape, "up", width, ffn, bias=bias)
        self.down = Linear(tape, "down", ffn, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))

    def gated(self, x: Tensor) -> Tensor:
        """The activated gate times up, [..., F]."""
        if self.fused:
            gate, up = chunk(self.gate_up(x), 2)
            return mul(of_input(self.act, gate), up)
        return mul(of_input(self.act, self.gate(x)), self.up(x))


class Mlp(Module):
    """Two matrices with an activation between them."""

    def __init__(self, tape: Tape, name: str, width: int, ffn: int, *, act: str, bias: bool) -> None:
        super().__init__(tape, name)
        self.act = act
        self.up = Linear(tape, "up", width, ffn, bias=bias)
        self.down = Linear(tape, "down", ffn, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(of_input(self.act, self.up(x)))


class MoE(Module):
    """Router, softmax in fp32, the k best experts, tokens sorted by expert, two grouped products."""

    def __init__(self, tape: Tape, spec: DecoderSpec) -> None:
        super().__init__(tape, "mlp")
        self.spec = spec
        self.router = Linear(tape, "router", spec.hidden, spec.experts)
        setup = tape.setup
        self.gate_up = setup.parameter(tape, "mlp.gate_up", (spec.experts, 2 * spec.expert_ffn, spec.hidden))
        self.down = setup.parameter(tape, "mlp.down", (spec.experts, spec.hidden, spec.expert_ffn))

    def forward(self, x: Tensor) -> Tensor:
        spec, tape = self.spec, self.tape
        rows = flatten(x, 0, 1)
        shares, chosen = self.route(rows)
        num = rows.shape[0] * spec.experts_per_token
        experts, order = plain(chosen, "sort", ((num,), "int64"), ((num,), "int64"))
        numbers = plain(chosen, "arange", ((spec.experts,), "int64"))
        ends = plain(chosen, "searchsorted", ((spec.experts,), "int32"))
        rows = index_select(views.repeat_interleave(rows, spec.experts_per_token, 0), order)
        gate, up = chunk(self.grouped(rows, self.gate_up, ends), 2)
        rows = self.grouped(mul(of_input("silu", gate), up), self.down, ends)
        del gate, up
        rows = index_select(rows, plain(chosen, "argsort", ((num,), "int64"), ((num,), "int64"))[1])
        rows = views.view(rows, *chosen.shape, rows.shape[-1])
        out = ops.total(mul(rows, to(views.unsqueeze(shares, -1), rows.dtype)), 1)
        del experts, numbers, tape
        return views.view(out, *x.shape)

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows by the matrix of their expert, in autocast's dtype where that is on."""
        dtype = self.tape.autocast
        if dtype is not None:
            rows, weight = to(rows, dtype), to(weight, dtype)
        aligned = rows.shape[-1] % 8 == 0 and weight.shape[1] % 8 == 0
        op = "_grouped_mm" if rows.dtype == "bfloat16" and aligned else "grouped_mm"
        return grouped_mm(rows, transpose(weight, 1, 2), ends, op)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shares of the experts that each row goes through, and their numbers."""
        chances = ops.softmax(self.router(rows), "float32")
        shares, chosen = topk(chances, self.spec.experts_per_token)
        return to(ops.div(shares, ops.total(shares, -1, keepdim=True)), rows.dtype), chosen


def make_mlp(tape: Tape, spec: DecoderSpec) -> Module:
    """The feed-forward layer that `spec` asks for."""
    if spec.experts:
        return MoE(tape, spec)
    if spec.mlp in ("swiglu", "geglu"):
        act, fused = ("silu" if spec.mlp == "swiglu" else "gelu"), spec.projections == "fused"
        return GatedMlp(tape, "mlp", spec.hidden, spec.ffn, spec.hidden, act=act, bias=spec.mlp_bias, fused=fused)
    return Mlp(tape, "mlp", spec.hidden, spec.ffn, act="gelu", bias=spec.mlp_bias)


class Block(Module):
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(
        self, tape: Tape, spec: DecoderSpec, *, attention: str, norm: str, index: int, store: dict[int, Any]
    ) -> None:
        super().__init__(tape, "block")
        self.dropout = tape.setup.dropout
        self.attn_norm = make_norm(tape, "attn_norm", spec, norm)
        self.attn = Attention(tape, spec, attention=attention, norm=norm, index=index, store=store)
        self.attn_out_norm = make_norm(tape, "attn_out_norm", spec, norm) if spec.sandwich else None
        self.mlp_norm = make_norm(tape, "mlp_norm", spec, norm)
        self.mlp = make_mlp(tape, spec)
        self.mlp_out_norm = make_norm(tape, "mlp_out_norm", spec, norm) if spec.sandwich else None

    def forward(self, x: Tensor, rope: Any, mask: Tensor | None, past: Past | None = None) -> Any:
        if past is None:
            x = add(x, self.drop(self.normed(self.attn_out_norm, self.attn(self.attn_norm(x), rope, mask))))
            return add(x, self.feed(x))
        out, keys, values = self.attn(self.attn_norm(x), rope, mask, past)
        x = add(x, self.drop(self.normed(self.attn_out_norm, out)))
        del out
        return add(x, self.feed(x)), keys, values

    def normed(self, norm: Module | None, x: Tensor) -> Tensor:
        """`x` through a norm behind a layer, where there is one."""
        return x if norm is None else norm(x)

    def feed(self, x: Tensor) -> Tensor:
        """What the feed-forward layer adds."""
        return self.drop(self.normed(self.mlp_out_norm, self.mlp(self.mlp_norm(x))))

    def drop(self, x: Tensor) -> Tensor:
        """`x` with some of its elements dropped."""
        return dropout(x, self.dropout)


__all__ = ["Block", "make_norm", "scale"]
