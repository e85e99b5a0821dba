"""Rotary positions, attention and masks as functions of transformers, over the ledger.

Locals live here exactly as long as those of transformers 5.24 do (models/llama/modeling_llama.py,
integrations/sdpa_attention.py, masking_utils.py). Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `K`
key/value heads, `D` head size.
"""

from typing import Any

from memplan.estimate import ops, views
from memplan.estimate.attention import kernel, sdpa
from memplan.estimate.autocast import operands
from memplan.estimate.ops import add, dropout, mul, scale
from memplan.estimate.products import bmm
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import cat, clone, expand, narrow, to, transpose, unsqueeze

Rope = tuple[Tensor, Tensor]
"""Cosines and sines."""


def position_ids(tape: Tape, size: int) -> Tensor:
    """0 .. S-1 as [1, S]."""
    return unsqueeze(ops.shift(tape.make("arange", ((size,), "int64"))), 0)


def rotate_half(x: Tensor) -> Tensor:
    """The second half negated before the first, each a slice of its own."""
    half = x.shape[-1] // 2
    first = narrow(x, -1, half)
    second = narrow(x, -1, x.shape[-1] - half)
    return cat((ops.neg(second), first))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, D] turned by tables that broadcast to it."""
    return add(mul(x, cos), mul(rotate_half(x), sin))


def apply_rotary(q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by tables [1, S, D]."""
    cos, sin = unsqueeze(rope[0], 1), unsqueeze(rope[1], 1)
    turned = rotated(q, cos, sin)
    return turned, rotated(k, cos, sin)


def heads_of(x: Tensor, size: int) -> Tensor:
    """x [B, S, A * size] as [B, A, S, size], a view; its gradient, whose heads lie in one piece, is copied."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [tape.new("clone", node.info, grads[0].dtype)]

    node = tape.record("view", (x,), backward, info=x.shape)
    linked: Tensor = tape.link(node, x.alias((x.shape[0], x.shape[-1] // size, x.shape[1], size)))
    return linked


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """x [B, K, S, D] as [B, K * times, S, D]: a copy, or itself; a single head is repeated by a view."""
    if times == 1:
        return x
    B, K, S, D = x.shape
    wide = expand(unsqueeze(x, 2), B, K, times, S, D)
    return views.flatten(wide if views.is_one(K) else clone(wide), 1, 2)


def matmul(x: Tensor, y: Tensor, copy_x: bool, copy_y: bool) -> Tensor:
    """Product of four dimensions; an operand whose heads lie apart in memory, or are one in each of several samples, is
    copied to be batched."""
    x, y = operands(x, y)
    several = not views.is_one(x.shape[0])
    copied = copy_x or (several and not x.dense), copy_y or (several and not y.dense)
    return bmm(clone(x) if copied[0] else x, clone(y) if copied[1] else y)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, drop: float, softcap: bool = False, strided: str = "qkv",
    wide: bool = True, back: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Heads [B, S, A, D] and the weights [B, A, S, S], which the caller holds on to.

    `strided`: which of q, k, v have heads that lie apart, as views of projections do; only several samples matter.
    `wide`: whether the softmax is asked for in fp32; `back`: whether its result is cast back.
    """
    times = q.shape[1] // k.shape[1]
    copied = "" if views.is_one(q.shape[0]) else strided
    keys, values = repeat_kv(k, times), repeat_kv(v, times)
    weights = scale(matmul(q, transpose(keys, 2, 3), "q" in copied, "k" in copied and times == 1))
    if softcap:
        weights = scale(weights, "div")
        weights = ops.of_result("tanh", weights)
        weights = scale(weights)
    if mask is not None:
        weights = add(weights, mask)
    chances = ops.softmax(weights, "float32" if wide else None)
    weights = to(chances, q.dtype) if back else chances
    del chances
    weights = dropout(weights, drop)
    out = matmul(weights, values, False, "v" in copied and times == 1)
    out = transpose(out, 1, 2)
    return (out if views.is_one(q.shape[2]) else clone(out)), weights


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, drop: float, causal: bool = True, strided: str = "qkv"
) -> tuple[Tensor, None]:
    """Heads [B, S, A, D] by torch's kernels, which group heads where there is no mask and heads are small; some kernels
    lay their result out as q is, which is `strided` as in `eager_attention`."""
    times = q.shape[1] // k.shape[1]
    if times > 1 and not (mask is None and k.shape[-1] == v.shape[-1] <= 256):
        k, v = repeat_kv(k, times), repeat_kv(v, times)
    out = sdpa(q, k, v, mask, causal=causal and mask is None, drop=drop, strided=strided)
    which = kernel(lowered_like(q), k, v, mask, drop=drop)
    cut = which == "flash" and v.shape[-1] % 8 != 0
    apart = which == "math" or (which in ("cudnn", "flash", "cpu") and "q" not in strided)
    out = transpose(out, 1, 2)
    return (clone(out) if cut or (apart and not views.is_one(q.shape[2])) else out), None


def lowered_like(x: Tensor) -> Tensor:
    """`x` as a kernel reads it: under autocast in its dtype, without the memory of a copy."""
    alias = x.alias()
    if x.tape.autocast is not None and x.dtype in views.FLOATS:
        alias.dtype = x.tape.autocast
    return alias


def attend(
    kind: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, drop: float = 0.0, softcap: bool = False,
    strided: str = "qkv", causal: bool = True, wide: bool = True, back: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of `kind`, `sdpa` or `eager`: heads [B, S, A, D], and the weights where it is eager."""
    if kind == "eager":
        return eager_attention(q, k, v, mask, drop=drop, softcap=softcap, strided=strided, wide=wide, back=back)
    return sdpa_attention(q, k, v, mask, drop=drop, strided=strided, causal=causal)
