"""Attention kernels: which one the device takes, what it saves, what its backward makes.

Letters: `B` batch, `S` queries, `T` keys, `A` query heads, `K` key/value heads, `D` head size.
Source: sdp_utils.cpp (choice), attention.cpp and attention_backward.cu (tensors), torch 2.13.
"""

import math
from typing import Any

from memplan.estimate import views
from memplan.estimate.autocast import LOW, lowered, operands
from memplan.estimate.ops import dropout, scale, shift, softmax
from memplan.estimate.products import bmm
from memplan.estimate.tape import Node, Tensor
from memplan.estimate.views import clone, is_one, repeat_interleave, to, transpose


def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, drop: float = 0.0) -> str:
    """`cudnn`, `flash`, `efficient`, `math` on CUDA, `cpu` or `math` elsewhere: the first that can run the call."""
    tape = q.tape
    if tape.rules == "cpu":
        return "math" if drop or q.shape[-1] != v.shape[-1] else "cpu"
    major, _ = tape.generation
    low, size, value_size = q.dtype in LOW, q.shape[-1], v.shape[-1]
    grouped = q.shape[1] != k.shape[1]
    widest = 256 if tape.generation == (9, 0) else 128
    even = size % 8 == 0 and value_size % 8 == 0
    narrow = max(size, value_size) <= widest or (major == 10 and (size, value_size) == (192, 128))
    if major in (9, 10) and low and even and narrow and (drop * 16).is_integer():
        return "cudnn"
    if low and mask is None and size == value_size <= 256:
        return "flash"
    if not grouped and size % (8 if low else 4) == 0 and value_size % (8 if low else 4) == 0:
        return "efficient"
    return "math"


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = True, drop: float = 0.0,
    strided: str = "qkv",
) -> Tensor:  # fmt: skip
    """torch's scaled_dot_product_attention of q [B, A, S, D], k [B, K, T, D], v [B, K, T, Dv] -> [B, A, S, Dv].

    Saves q, k, v, the output and the fp32 log-sum-exp 4*B*A*S; the result lies in memory as [B, S, A, Dv], so that
    joining its heads costs nothing, but for the math path, whose result `joined` copies. `strided`: which of q, k, v
    have heads that lie apart in memory, as views of projections do.
    """
    tape = q.tape
    mask = mask if mask is None or mask.dtype == "bool" else lowered(mask)
    q, k, v = operands(q, k, v)
    which = kernel(q, k, v, mask, drop=drop)
    if which == "math":  # below autocast, which has done its part
        before, tape.autocast = tape.autocast, None
        out = math_attention(q, k, v, mask, causal=causal, drop=drop, strided=strided)
        tape.autocast = before
        return out
    if mask is not None and mask.dtype == "bool" and which != "flash":
        mask = tape.make("where", (mask.shape, q.dtype))
    if which == "efficient" and mask is not None and views.is_ragged(mask.shape[-1], 8):
        mask = views.narrow(views.pad_last(mask, -(-mask.shape[-1] // 8) * 8), -1, mask.shape[-1])
    if which == "efficient" and mask is not None:  # for each head, without memory of its own
        mask = views.expand(mask, *q.shape[:3], k.shape[2])
    size = q.shape[-1]
    if which != "flash" or size % 8 == 0:
        copies = int(which == "flash" and "q" not in strided)
        return fused(which, q, k, v, mask, draws=drop > 0, copies=copies)
    wide = -(-size // 8) * 8
    q, k, v = views.pad_last(q, wide), views.pad_last(k, wide), views.pad_last(v, wide)
    return views.narrow(fused(which, q, k, v, mask, draws=drop > 0, copies=2), -1, size)


def fused(
    which: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, draws: bool = False, copies: int = 0
) -> Tensor:
    """The kernel `which`; no policy keeps what it `draws`. `copies`: how many of its output and that one's gradient lie
    in memory as its backward does not read them."""
    tape = q.tape
    B, A, S, _ = q.shape
    names = {
        "cpu": "_scaled_dot_product_flash_attention_for_cpu",
        "flash": "_scaled_dot_product_flash_attention",
        "efficient": "_scaled_dot_product_efficient_attention",
        "cudnn": "_scaled_dot_product_cudnn_attention",
    }
    op = names[which]

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        q, k, v = saved[:3]
        outs = [tape.new(f"{op}_backward", t.shape, t.dtype) for t in (q, k, v)]
        if tape.rules == "cuda":
            copied = [q.width * math.prod((B, A, S, v.shape[-1]))] * copies
            tape.hidden(f"{op}_backward", *copied, *backward_temps(which, q, k, v))
        return [*outs, None]

    node = tape.record(op, (q, k, v, mask), backward, (q, k, v, mask))
    rows = -(-S // 32) * 32 if which == "efficient" else S
    shapes = [((B, A, S, v.shape[-1]), q.dtype), ((B, A, rows), "float32")]
    if which in ("flash", "cudnn"):
        shapes += [((2,) if which == "flash" else (), "int64"), ((), "int64")]
    out, *rest = [tape.new(op, *one) for one in shapes] if draws else tape.make(op, *shapes)
    return tape.link(node, out, saved=(out, *rest))


def backward_temps(which: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Bytes inside a kernel's backward: flash adds up fp32 gradients of q, and of k and v for every query head."""
    B, A, S, D = q.shape
    if which == "flash":
        rows, head = -(-S // 128) * 128, -(-D // 32) * 32 if D <= 192 else 256
        sizes = [4 * B * A * rows, 4 * B * rows * A * head]
        if k.shape[1] != A:
            sizes += [B * k.shape[2] * A * D * q.width] * 2
        return tuple(sizes)
    if which == "efficient":
        largest = max(D, v.shape[-1])
        rows = 128 if largest > 64 and q.tape.generation in ((8, 0), (9, 0), (10, 0)) else 64
        inside = q.width == 2 and largest <= rows
        columns = 128 if inside and largest > 64 else 64
        tiles = -(-S // rows) * -(-D // columns) * (4 + rows * columns)
        if q.width == 2 and not inside:
            tiles = tiles + columns * (-(-D // rows) * rows + -(-v.shape[-1] // rows) * rows)
        return 4 * B * A * S, B * A * 4 * (-(-tiles // 4) * 4)
    return ()


def math_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, drop: float, strided: str
) -> Tensor:
    """The composite path: everything in fp32, grouped heads repeated, scores [B, A, S, T] scaled on both sides, the
    mask added in place, rows without keys cleared."""
    tape, dtype = q.tape, q.dtype
    q, k, v = to(q, "float32"), to(k, "float32"), to(v, "float32")
    held = q, k, v
    q = scale(q)
    if causal:
        mask = tape.make("tril", ((q.shape[2], k.shape[2]), "bool"))
        mask = tape.make("where", (mask.shape, "float32"))
    times = q.shape[1] // k.shape[1]
    if times > 1:
        k, v = repeat_interleave(k, times, 1), repeat_interleave(v, times, 1)
        strided = strided.strip("kv")
    copied = "" if is_one(q.shape[0]) else strided
    scaled = scale(transpose(k, 2, 3))
    scores = product(q, scaled, "q" in copied, "k" in copied)
    del scaled
    if mask is not None and tape.policy is not None:
        scores = shift(scores)
    chances = softmax(scores, op="_safe_softmax")
    if tape.rules == "cuda":
        count = scores.numel
        tape.hidden("_safe_softmax", 4 * count, count, count // scores.shape[-1], 4)
    del scores
    chances = dropout(chances, drop)
    second = to(chances, dtype) if dtype != "float32" else None
    out = to(product(chances, v, False, "v" in copied), dtype)
    del second, held
    return out


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, strided: str = "qkv") -> Tensor:
    """memplan's eager attention: scores = q k' / sqrt(D) + mask, fp32 softmax, product with v -> [B, A, S, D].

    `strided`: which of q, k, v have heads that lie apart in memory, so that `matmul` copies them.
    """
    times = q.shape[1] // k.shape[1]
    if times > 1:
        k, v = repeat_interleave(k, times, 1), repeat_interleave(v, times, 1)
        strided = strided.strip("kv")
    scores = scale(product(q, transpose(k, 2, 3), "q" in strided, "k" in strided), "div")
    if mask is not None:
        scores = shift_by(scores, mask)
    return product(to(softmax(scores, "float32"), v.dtype), v, False, "v" in strided)


def product(x: Tensor, y: Tensor, copy_x: bool, copy_y: bool) -> Tensor:
    """`torch.matmul` of four dimensions, whose strided operands are copied to be batched."""
    x, y = operands(x, y)
    if copy_x:
        x = clone(x)
    if copy_y:
        y = clone(y)
    return bmm(x, y)


def shift_by(scores: Tensor, mask: Tensor) -> Tensor:
    """`scores` plus a mask without a gradient, converted to their dtype for the moment."""
    cast = to(mask, scores.dtype)
    out = shift(scores)
    del cast
    return out


def causal_mask(tape: Any, samples: int, queries: int, keys: int) -> Tensor:
    """An additive fp32 mask [samples, 1, S, T]."""
    made: Tensor = tape.make("full", ((samples, 1, queries, keys), "float32"))
    return made


__all__ = ["causal_mask", "eager", "kernel", "math_attention", "sdpa"]
