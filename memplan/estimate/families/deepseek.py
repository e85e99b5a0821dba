"""DeepSeek V2 and V3 as transformers 5.24 has them: latent attention, shared experts beside routed ones, routers that
pick groups first, dense layers before those with experts.

Letters: `B` batch, `S` sequence, `A` heads, `N` tokens, `E` experts, `G` groups of experts, `k` experts a token.
"""

from typing import Any

from memplan.estimate import ops, views
from memplan.estimate.families.hf_attention import Rope, apply_rotary, attend, heads_of
from memplan.estimate.families.hf_decoder import Decoder, DecoderLayer, Mlp, RMSNorm, RotaryEmbedding, head_dim
from memplan.estimate.families.hf_experts import Experts, div_in_place, largest
from memplan.estimate.modules import Linear, Module
from memplan.estimate.ops import add, mul, scale, shift
from memplan.estimate.products import gather, linear, masked_fill, plain, topk
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import cat, expand, flatten, narrow, split, to, unsqueeze, view


class LatentAttention(Module):
    """Attention whose keys and values come from one narrow row a token, beside a rotated part that heads share."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, "self_attn")
        self.kind, self.drop = kind, tape.setup.dropout
        hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
        bias = bool(config.get("attention_bias", False))
        self.rank, self.rope, self.nope = rank, config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        self.value = config["v_head_dim"]
        q_rank, q_width = config["q_lora_rank"], heads * (self.nope + self.rope)
        self.q_proj = self.q_a_proj = None
        if q_rank is None:
            self.q_proj = Linear(tape, "q_proj", hidden, q_width)
        else:
            self.q_a_proj = Linear(tape, "q_a_proj", hidden, q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(tape, "q_a_layernorm", q_rank)
            self.q_b_proj = Linear(tape, "q_b_proj", q_rank, q_width)
        self.kv_a_proj_with_mqa = Linear(tape, "kv_a_proj_with_mqa", hidden, rank + self.rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(tape, "kv_a_layernorm", rank)
        self.kv_b_proj = Linear(tape, "kv_b_proj", rank, heads * (self.nope + self.value))
        self.o_proj = Linear(tape, "o_proj", heads * self.value, hidden, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None, rope: Any, places: Tensor) -> tuple[Tensor, Tensor | None]:
        B, S = x.shape[:2]
        q = self.queries(x)
        q_pass, q_rot = split(q, [self.nope, self.rope])
        compressed = self.kv_a_proj_with_mqa(x)
        kv, k_rot = split(compressed, [self.rank, self.rope])
        kv = self.kv_a_layernorm(kv)
        kv, k_rot = view(kv, B, 1, S, self.rank), view(k_rot, B, 1, S, self.rope)
        q_rot, k_rot = self.turned(q_rot, k_rot, rope)
        query = cat((q_pass, q_rot))
        key, value = self.expanded(kv, k_rot)
        out, weights = attend(self.kind, query, key, value, mask, drop=self.drop, strided="v")
        out = flatten(out, 2)
        out = self.o_proj(out)
        return out, weights

    def queries(self, x: Tensor) -> Tensor:
        """Queries [B, A, S, D]."""
        if self.q_proj is not None:
            return heads_of(self.q_proj(x), self.nope + self.rope)
        assert self.q_a_proj is not None
        return heads_of(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), self.nope + self.rope)

    def turned(self, q: Tensor, k: Tensor, rope: Any) -> Rope:
        """The rotated parts of queries and keys with their positions."""
        raise NotImplementedError

    def expanded(self, kv: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads [B, A, S, ...]."""
        kv = heads_of(flatten(self.kv_b_proj(kv), 0, 1), self.nope + self.value)
        k_pass, value = split(kv, [self.nope, self.value])
        k_rot = expand(k_rot, *k_pass.shape[:3], self.rope)
        key = self.tape.make("new_empty", ((*kv.shape[:-1], self.nope + self.rope), kv.dtype))
        key = written(key, k_pass)
        key = written(key, k_rot)
        return key, value


class V3Attention(LatentAttention):
    """Pairs of numbers rotated, or halves where `rope_interleave` is off."""

    def __init__(self, tape: Tape, config: dict[str, Any], kind: str) -> None:
        super().__init__(tape, config, kind)
        self.pairs = bool(config.get("rope_interleave", True))

    def turned(self, q: Tensor, k: Tensor, rope: Rope) -> Rope:
        if not self.pairs:
            return apply_rotary(q, k, rope)
        half = self.rope // 2
        cos, sin = (unsqueeze(narrow(table, -1, half), 1) for table in rope)
        q1, q2 = narrow(q, -1, half), narrow(q, -1, half)
        k1, k2 = narrow(k, -1, half), narrow(k, -1, half)
        turned = cat((ops.sub(mul(q1, cos), mul(q2, sin)), add(mul(q2, cos), mul(q1, sin))))
        return turned, cat((ops.sub(mul(k1, cos), mul(k2, sin)), add(mul(k2, cos), mul(k1, sin))))


class V2Attention(LatentAttention):
    """Pairs of numbers as complex ones, in fp32."""

    def turned(self, q: Tensor, k: Tensor, rope: Tensor) -> Rope:
        q_pairs, k_pairs = to(q, "float32"), to(k, "float32")
        rope = unsqueeze(rope, 1)
        turned = to(mul(q_pairs, rope), q.dtype)
        return turned, to(mul(k_pairs, rope), k.dtype)


class ComplexRotary(RotaryEmbedding):
    """Complex turns [1, S, dim / 2], here as fp32 pairs [1, S, dim]."""

    def forward(self, x: Tensor, places: Tensor) -> Any:
        angles = mul(to(unsqueeze(places, -1), "float32"), self.inv_freq)
        ones = plain(angles, "ones_like", (angles.shape, "float32"))
        turns = plain(angles, "polar", ((*angles.shape[:-1], 2 * angles.shape[-1]), "float32"))
        del ones
        return scale(turns)


class Router(Module):
    """Logits [N, E], shares and numbers of the k experts taken, in fp32 whatever the model's dtype."""

    def __init__(self, tape: Tape, config: dict[str, Any], num: int) -> None:
        super().__init__(tape, "gate")
        self.num, self.k = num, config["num_experts_per_tok"]
        self.groups, self.taken = config.get("n_group"), config.get("topk_group")
        self.weight = tape.setup.parameter(tape, "gate.weight", (num, config["hidden_size"]), dtype="float32")

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, E] of x [B, S, H]."""
        return linear(to(flatten(x, 0, 1), "float32"), self.weight)

    def unwanted(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """A mask [N, E] of the experts outside of the groups with the best scores [N, G], and what it was made of."""
        best = topk(groups, self.taken or 1)[1]
        mask = plain(groups, "zeros_like", (groups.shape, "float32"))
        del best
        size = self.num // groups.shape[-1]
        wide = expand(unsqueeze(mask, -1), *groups.shape, size)
        wide = flatten(views.clone(wide) if groups.shape[-1] > 1 and size > 1 else wide, 1)
        return plain(wide, "bitwise_not", (wide.shape, "bool")), wide


class V3Router(Router):
    """Sigmoids, a bias that only the choice sees, groups by their two best, shares made to add up to one."""

    def __init__(self, tape: Tape, config: dict[str, Any], num: int) -> None:
        super().__init__(tape, config, num)
        self.normed = bool(config.get("norm_topk_prob", True))
        storage = tape.allocate("buffer", (num,), "float32", category="buffers", copies=tape.copies)
        self.e_score_correction_bias = Tensor(storage, (num,), "float32")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(x)
        scores = ops.of_result("sigmoid", logits)
        choice = add(scores, self.e_score_correction_bias)
        groups = ops.total(topk(views.unflatten_last(choice, self.num // (self.groups or 1)), 2)[0], -1)
        mask, wide = self.unwanted(groups)
        choice = masked_fill(choice, mask)
        del mask
        chosen = topk(choice, self.k)[1]
        shares = gather(scores, chosen)
        if self.normed:
            whole = shift(ops.total(shares, -1, keepdim=True))
            shares = div_in_place(shares, whole)
        shares = scale(shares)
        del wide
        return logits, shares, chosen


class V2Router(Router):
    """Chances, from the groups with the best where `topk_method` says so."""

    def __init__(self, tape: Tape, config: dict[str, Any], num: int) -> None:
        super().__init__(tape, config, num)
        self.grouped = config.get("topk_method", "greedy") == "group_limited_greedy"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(x)
        scores = ops.softmax(logits, "float32")
        wide = groups = None
        if self.grouped:
            groups = largest(views.unflatten_last(scores, self.num // (self.groups or 1)))
            mask, wide = self.unwanted(groups)
            scores = masked_fill(scores, mask)
            del mask
        shares, chosen = topk(scores, self.k)
        shares = scale(shares)
        del wide, groups
        return logits, shares, chosen


class SharedBlock(Module):
    """Routed experts, and shared ones as one feed-forward layer."""

    def __init__(self, tape: Tape, config: dict[str, Any], gate: Module, num: int, *, bias: bool) -> None:
        super().__init__(tape, "mlp")
        width, ffn, act = config["hidden_size"], config["moe_intermediate_size"], config.get("hidden_act", "silu")
        self.experts = Experts(tape, num, width, ffn, act)
        self.gate = gate
        self.shared_experts = Mlp(tape, width, ffn * config["n_shared_experts"], act, bias=bias, name="shared_experts")

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        logits, shares, chosen = self.gate(x)
        x = flatten(x, 0, 1)
        x = view(self.experts(x, chosen, shares), *residual.shape)
        x = add(x, self.shared_experts(residual))
        del logits
        return x


class DeepseekV3(Decoder):
    """Dense layers, then layers with experts."""

    attention: Any = V3Attention
    router: Any = V3Router
    experts_key = ("num_local_experts", "n_routed_experts")
    """Names of the number of experts in a config."""

    def make_layer(self, index: int) -> Module:
        config = self.config
        layer = DecoderLayer(self.tape)
        layer.self_attn = self.attention(self.tape, config, self.kind)
        bias = bool(config.get("mlp_bias", False)) and config["model_type"] == "deepseek_v2"
        if self.is_sparse(index):
            num = next(config[key] for key in self.experts_key if key in config)
            layer.mlp = SharedBlock(self.tape, config, self.router(self.tape, config, num), num, bias=bias)
        else:
            act = config.get("hidden_act", "silu")
            layer.mlp = Mlp(self.tape, config["hidden_size"], config["intermediate_size"], act, bias=bias)
        layer.make_norms(config["hidden_size"])
        return layer

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return bool(index >= self.config["first_k_dense_replace"])

    def layer_kind(self, index: int) -> Any:
        return self.is_sparse(index)


class DeepseekV2(DeepseekV3):
    """Chances instead of sigmoids, complex turns."""

    attention = V2Attention
    router = V2Router

    def make_rotary(self) -> Any:
        return ComplexRotary(self.tape, head_dim(self.config))


def written(whole: Tensor, part: Tensor) -> Tensor:
    """`whole` with `part` copied into a slice of it; backward copies the gradient, and the slice's out of it.

    Source: CopySlices::apply, torch/csrc/autograd/functions/tensor.cpp, torch 2.13.
    """
    tape = whole.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        shape, part_shape = node.info
        of_whole = tape.new("new_empty_strided", shape, grads[0].dtype)
        of_part = tape.new("clone", part_shape, grads[0].dtype)
        if node.edges[0] is None:
            return [None, of_part]
        tape.hidden("zeros_like", of_part.numel * of_part.width)
        return [of_whole, of_part]

    node = tape.record("CopySlices", (whole, part), backward, info=(whole.shape, part.shape))
    linked: Tensor = tape.link(node, whole.alias())
    return linked
