"""Layers of experts as transformers runs them over the ledger: rows sorted by expert, two grouped products.

`grouped_mm` is what transformers 5.24 takes where nobody asks for another (integrations/moe.py); torch's kernel takes
every dtype, and autocast leaves it alone. Letters: `N` tokens, `k` experts a token, `n` = N * k, `E` experts, `H`
hidden, `F` feed-forward of one expert.
"""

from typing import Any

from memplan.estimate import ops, views
from memplan.estimate.autocast import for_autocast
from memplan.estimate.families.hf_decoder import activated
from memplan.estimate.modules import Module
from memplan.estimate.ops import mul
from memplan.estimate.products import grouped_mm, index_select, linear, plain, topk
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import chunk, flatten, to, transpose, unsqueeze


class Experts(Module):
    """Rows [N, H] through the k experts of each, added up by their shares: [N, H].

    `transposed`: matrices are [E, in, out], otherwise [E, out, in].
    """

    def __init__(
        self, tape: Tape, num: int, width: int, ffn: int, act: str, *, transposed: bool = False, bias: bool = False
    ) -> None:
        super().__init__(tape, "experts")
        self.num, self.act, self.transposed = num, act, transposed
        make = tape.setup.parameter
        up, down = ((width, 2 * ffn), (ffn, width)) if transposed else ((2 * ffn, width), (width, ffn))
        self.gate_up_proj = make(tape, "experts.gate_up_proj", (num, *up))
        self.gate_up_proj_bias = make(tape, "experts.gate_up_proj_bias", (num, 2 * ffn)) if bias else None
        self.down_proj = make(tape, "experts.down_proj", (num, *down))
        self.down_proj_bias = make(tape, "experts.down_proj_bias", (num, width)) if bias else None

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        N, k = chosen.shape
        n = N * k
        shares = flatten(shares, 0)
        sorted_, order = plain(chosen, "sort", ((n,), "int64"), ((n,), "int64"))
        picked = index(rows, plain(order, "floor_divide", ((n,), "int64")))
        own = index(shares, order)
        numbers = plain(sorted_, "to", ((n,), "float32"))
        counts = plain(numbers, "histc", ((self.num,), "float32"))
        ends = plain(counts, "cumsum", ((self.num,), "int32"))
        bias = None if self.gate_up_proj_bias is None else index(self.gate_up_proj_bias, sorted_)
        x = self.product(picked, self.gate_up_proj, ends, bias)
        x = self.gated(x)
        bias = None if self.down_proj_bias is None else index(self.down_proj_bias, sorted_)
        x = self.product(x, self.down_proj, ends, bias)
        weighted = mul(x, unsqueeze(own, -1))
        back = plain(order, "empty_like", ((n,), "int64"))
        plain(order, "arange", ((n,), "int64"))
        weighted = index(weighted, back)
        out = summed(weighted, N, k)
        del shares, numbers, counts, bias
        return to(out, rows.dtype)

    def product(self, x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        """Sorted rows by the matrices of their experts, plus a bias a row in place."""
        if not self.transposed:
            weight = transpose(weight, 1, 2)
        out = grouped_mm(to(x, weight.dtype), weight, ends)
        return out if bias is None else add_in_place(out, bias)

    def gated(self, x: Tensor) -> Tensor:
        """The activated gate times up, [n, F]."""
        gate, up = chunk(x, 2)
        return mul(activated(self.act, gate), up)


class TopKRouter(Module):
    """Logits [N, E], shares and numbers of the k experts with the largest chances; `normed` makes the shares add up to
    one, `lowered` gives them the logits' dtype."""

    def __init__(self, tape: Tape, num: int, width: int, k: int, *, normed: bool, lowered: bool) -> None:
        super().__init__(tape, "gate")
        self.k, self.normed, self.lowered = k, normed, lowered
        self.weight = tape.setup.parameter(tape, "gate.weight", (num, width))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(rows, self.weight)
        chances = ops.softmax(logits, "float32") if self.lowered else ops.softmax(to(logits, "float32"))
        shares, chosen = topk(chances, self.k)
        if self.normed:
            shares = div_in_place(shares, ops.total(shares, -1, keepdim=True))
        if self.lowered:
            shares = to(shares, logits.dtype)
        return logits, shares, chosen


class SparseBlock(Module):
    """Router and experts, [B, S, H] -> [B, S, H], with noise on what they read where `jitters`."""

    def __init__(self, tape: Tape, gate: Module, experts: Module, *, jitters: bool = False) -> None:
        super().__init__(tape, "mlp")
        self.gate, self.experts, self.jitters = gate, experts, jitters

    def forward(self, x: Tensor) -> Tensor:
        if self.jitters:
            x = mul_in_place(x, plain(x, "empty_like", (x.shape, x.dtype)))
        rows = flatten(x, 0, 1)
        logits, shares, chosen = self.gate(rows)
        out = self.experts(rows, chosen, shares)
        del logits
        return views.view(out, *x.shape)


def index(x: Tensor, places: Tensor) -> Tensor:
    """`x[places]`: rows of `x`; backward adds into zeros, on CUDA by indices that it sorts first."""
    return index_select(x, places, "index")


def summed(x: Tensor, num: int, k: int) -> Tensor:
    """x [n, H] added up over the `k` rows of each of `num` tokens; backward repeats the gradient in a copy."""
    (x,) = for_autocast("sum", x)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Tensor]:
        return [grads[0] if k == 1 else tape.new("clone", node.info, grads[0].dtype)]

    node = tape.record("sum", (x,), backward, info=x.shape)
    linked: Tensor = tape.link(node, tape.make("sum", ((num, x.shape[-1]), x.dtype)))
    return linked


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    """`x` plus `y` of its shape, in the memory of `x`."""
    tape = x.tape
    node = tape.record("add_", (x, y), lambda node, saved, grads: [grads[0], grads[0]])
    linked: Tensor = tape.link(node, x.alias())
    return linked


def mul_in_place(x: Tensor, y: Tensor) -> Tensor:
    """`x` times a `y` of its shape without a gradient, in the memory of `x`."""
    tape = x.tape
    node = tape.record("mul_", (x,), lambda node, saved, grads: [tape.new("mul", grads[0].shape, grads[0].dtype)], (y,))
    linked: Tensor = tape.link(node, x.alias())
    return linked


def div_in_place(x: Tensor, y: Tensor) -> Tensor:
    """`x` divided by `y` in the memory of `x`, of which a copy is saved for the gradient of `y`."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        before, divisor = saved
        saved.clear()
        shape, dtype = grads[0].shape, views.promoted(grads[0], divisor)
        of_y = None
        if before is not None:
            chain = [tape.new(op, shape, dtype) for op in ("div", "div")]
            chain.append(tape.new("neg", shape, grads[0].dtype))
            of_y = tape.new("mul", shape, dtype)
            chain.clear()
        made = [tape.new("div", shape, dtype), of_y]
        del before, divisor, of_y
        return views.as_inputs(made, node.info)

    copy = tape.make("clone", (x.shape, x.dtype)) if tape.grad_enabled and y.requires_grad else None
    node = tape.record("div_", (x, y), backward, (copy, y), info=((x.shape, x.dtype), (y.shape, y.dtype)))
    linked: Tensor = tape.link(node, x.alias())
    return linked


def largest(x: Tensor) -> Tensor:
    """`x.max(-1).values`; saves their places, and backward scatters into zeros."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [tape.new("value_selecting_reduction_backward", node.info, grads[0].dtype)]

    node = tape.record("max", (x,), backward, info=x.shape)
    values, places = tape.make("max", (x.shape[:-1], x.dtype), (x.shape[:-1], "int64"))
    linked: Tensor = tape.link(node, values, saved=(places,))
    return linked
