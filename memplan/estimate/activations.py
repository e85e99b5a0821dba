"""What a block keeps for backward and what its backward needs on top, part by part, as closed formulas.

Letters: `N` rows (samples x tokens of one backward pass), `B` samples of it, `S` sequence, `H` hidden, `A` query heads,
`K` key/value heads, `D` head size, `F` feed-forward; `w`, `r`, `p` bytes of an element in products, residual and
parameters (`Widths`). Under autocast an fp32 tensor that a product reads is copied to bf16, once for every reader.
"""

from memplan.estimate.parts import Part, Stage, Widths
from memplan.estimate.states import block_shapes
from memplan.spec.model import DecoderSpec


def rms_norm(name: str, rows: int, width: int, widths: Widths, *, kind: str, inner: bool = False) -> Part:
    """RMSNorm of `rows` x `width`.

    Formula: eager keeps the fp32 input 4, the normalised rows r and the fp32 root 4 a row: fp32 8*n + 4, bf16 6*n + 4
    bytes a row. Backward's largest moment is the power's: the mean's gradient and three fp32 temporaries of the input's
    size; `inner` norms (of q and k) hold the input's gradient besides. torch's own on CUDA keeps the input r and the
    root only.
    Counts: the input, which nothing before it keeps. Leaves out: the output, which its reader keeps.
    Source: the elementwise definition (arXiv 1910.07467, equation 4); torch's derivatives of mul, pow and mean.
    Checked: tests/estimate/test_activations.py.
    """
    size = rows * width
    weight_grad = widths.param * width
    if kind == "fused" and widths.rules == "cuda":
        source = (widths.compute if inner else widths.residual) * size
        return Part(
            name=name,
            saved=source + 4 * rows,
            forward=2 * source,
            unkept=source,
            backward=2 * source,
            grads=weight_grad,
        )
    source_width = widths.compute if inner else widths.residual
    # torch's own norm on the CPU keeps the normed rows in fp32.
    normed = (4 if kind == "fused" else source_width) * size
    saved = 4 * size + normed + 4 * rows
    out = (widths.residual if inner else source_width) * size
    # At the power's derivative the normalised rows are gone and four fp32 tensors stand on the input.
    backward = 16 * size - normed + (4 * size if inner else 0)
    forward = max(8 * size + normed, saved + out)
    unkept = forward if source_width == 2 else normed + out
    return Part(name=name, saved=saved, forward=forward, unkept=unkept, backward=backward, grads=weight_grad)


def layer_norm(name: str, rows: int, width: int, widths: Widths, *, bias: bool) -> Part:
    """LayerNorm of `rows` x `width`.

    Formula: keeps the input r*n (an fp32 copy of it where autocast runs the norm in fp32) and mean and root, fp32 (on
    the CPU in the weights' dtype), 8 or 4 bytes a row. Backward holds the gradients that come in and go out.
    Source: aten native_layer_norm, torch 2.13. Checked: tests/estimate/test_measured.py.
    """
    source = max(widths.residual, widths.normed) * rows * width
    out = widths.normed * rows * width
    return Part(
        name=name,
        saved=source + 2 * (widths.param if widths.rules == "cpu" else 4) * rows,
        forward=source + out,
        unkept=out,
        backward=source + out,
        grads=widths.param * width * (2 if bias else 1),
    )


def norm(name: str, rows: int, spec: DecoderSpec, widths: Widths, kind: str) -> Part:
    """The norm over H that `spec` asks for."""
    if spec.norm == "rms":
        return rms_norm(name, rows, spec.hidden, widths, kind=kind)
    return layer_norm(name, rows, spec.hidden, widths, bias=spec.norm_bias)


def qkv(rows: int, spec: DecoderSpec, widths: Widths, kind: str) -> Part:
    """The query, key and value projections of the normed rows.

    Formula: keep their input w*H a row: once, or once for each of three readers when autocast copies it. Backward: the
    three gradients that come in, and the input's gradient of up to three addends, 3*r*H.
    """
    hidden = rows * spec.hidden
    inner = rows * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    queries = rows * spec.num_heads * spec.head_dim
    fused = spec.projections == "fused"
    shapes = block_shapes(spec)
    weights = sum(numel for name, numel in shapes.items() if name in ("q", "k", "v", "qkv"))
    biases = sum(numel for name, numel in shapes.items() if name in ("q.bias", "k.bias", "v.bias", "qkv.bias"))
    readers = 3 if widths.copied and not fused else 1
    saved = readers * widths.compute * hidden + whole_projection(rows, spec, widths, kind)
    grads = widths.param * (weights + biases)
    stream = widths.normed * hidden
    if fused:
        backward = max(2 * widths.compute * inner, widths.compute * (inner + hidden) + grads)
    else:
        backward = grads + max(widths.compute * inner + stream, widths.compute * queries + 3 * stream)
    return Part(
        name="qkv",
        saved=saved,
        casts=2 * weights if widths.mixed else 0,
        forward=saved + widths.compute * inner + (stream if widths.copied else 0),
        unkept=stream + widths.compute * (inner + (hidden if widths.copied else 0)),
        backward=backward,
        grads=grads,
    )


def whole_projection(rows: int, spec: DecoderSpec, widths: Widths, kind: str) -> int:
    """Bytes that a fused projection keeps alive beyond its parts that are counted where they are read.

    A view keeps the whole of its storage: w*(A + 2*K)*D a row stay when SDPA reads v where it lies (its heads not
    repeated), or when an fp32 qk-norm reads q and k where they lie; eager attention reads copies. Nothing is added
    where attention reads all three in place.
    """
    if spec.projections != "fused" or (spec.positions == "learned" and not spec.qk_norm):
        return 0
    queries = rows * spec.num_heads * spec.head_dim
    keys = rows * spec.num_kv_heads * spec.head_dim
    v_in_place = kind == "sdpa" and (spec.mask != "dense" or spec.num_kv_heads == spec.num_heads)
    qk_in_place = spec.qk_norm and widths.compute == 4
    if v_in_place:
        return 0 if qk_in_place else widths.compute * (queries + keys)
    return widths.compute * keys if qk_in_place else 0


def rope(rows: int, spec: DecoderSpec, widths: Widths) -> Part:
    """Rotation of q and k; keeps nothing, since its tables have no gradient.

    Formula: backward of q holds the finished gradients of k and v, w*2*K*D a row, and 3.5 tensors of q's size in the
    tables' dtype: the gradient, both products and the negated half.
    """
    queries = rows * spec.num_heads * spec.head_dim
    keys = rows * spec.num_kv_heads * spec.head_dim
    table = 4 if spec.rope_fp32 else widths.residual
    return Part(
        name="rope",
        saved=0,
        forward=widths.compute * (queries + 2 * keys) + 4 * table * queries,
        unkept=widths.residual * rows * spec.hidden + widths.compute * (queries + 2 * keys) + 3 * table * queries,
        backward=2 * widths.compute * keys + table * queries * 7 // 2,
    )


def attention(samples: int, seq: int, spec: DecoderSpec, widths: Widths, kind: str) -> Part:
    """Attention of A heads over S keys.

    Formula: SDPA keeps q, k, v, its output and the fp32 log-sum-exp: w*(2*A + 2*K)*D + 4*A a row, K counting as A where
    a dense mask has the heads repeated; plus w*S a row for the mask's copy in the compute dtype, where it is not fp32.
    Eager attention keeps q, k, v, the fp32 softmax 4*A*S and its w*A*S copy, and its output. Backward: gradients of the
    output and of q, k, v; eager holds four fp32-or-w tensors of A*S a row.
    Leaves out: the kernels' own accumulators (cuda_rules of the trace).
    Source: aten _scaled_dot_product_flash_attention(_for_cpu), torch 2.13. Checked: tests/estimate/test_activations.py.
    """
    rows = samples * seq
    repeated = spec.mask == "dense" or kind == "eager"
    kv_heads = spec.num_heads if repeated else spec.num_kv_heads
    queries = rows * spec.num_heads * spec.head_dim
    keys = rows * kv_heads * spec.head_dim
    own_keys = rows * spec.num_kv_heads * spec.head_dim
    w = widths.compute
    normed = widths.residual * rows * spec.hidden
    if kind == "eager":
        scores = rows * spec.num_heads * seq
        copied = 0 if w == 4 else w * scores
        saved = w * (2 * queries + 2 * keys) + 4 * scores + copied
        return Part(
            name="attention",
            saved=saved,
            forward=saved + (8 if w == 4 else 4 + w) * scores,
            unkept=normed + saved + w * scores,
            backward=w * (queries + 2 * keys) + 8 * scores,
        )
    mask = w * samples * seq * seq if spec.mask == "dense" and w != 4 else 0
    saved = w * (2 * queries + 2 * keys) + 4 * rows * spec.num_heads + mask
    extra = 2 * w * own_keys if repeated and spec.num_kv_heads != spec.num_heads else 0
    return Part(
        name="attention",
        saved=saved,
        forward=saved + extra,
        unkept=normed + saved + extra,
        backward=w * (2 * queries + 2 * keys) + extra,
    )


def output(name: str, rows: int, width: int, out: int, numel: int, bias: int, widths: Widths) -> Part:
    """A projection from `width` to `out` whose input another part keeps and whose output is added to the residual.

    Formula: backward holds the gradient of its input, w*width a row, and under autocast the residual gradient's copy.
    """
    grads = widths.param * (numel + bias)
    made = widths.compute * rows * out
    return Part(
        name=name,
        saved=0,
        casts=2 * numel if widths.mixed else 0,
        forward=made,
        unkept=made + widths.compute * rows * width + widths.residual * rows * out,
        backward=widths.compute * rows * width + grads + (made if widths.compute != widths.residual else 0),
        grads=grads,
    )


def feed_forward(
    rows: int, width: int, ffn: int, mlp: str, weights: int, biases: int, widths: Widths, fused: bool
) -> Part:
    """The matrices that widen the normed rows and the activation between: a feed-forward layer but `down`.

    Formula: keep the input w*H (two copies under autocast with separate matrices); SwiGLU gate, up, silu(gate) and
    their product, 4*w*F; GELU its input and output, 2*w*F. Backward's largest moment is the product's: the gradient
    that comes in and the two that go out, 3*w*F, while the product is already gone; GELU's is the same with two.
    """
    w = widths.compute
    inner = w * rows * ffn
    stream = widths.normed * rows * width
    gated = mlp == "swiglu"
    separate = gated and not fused
    source = (2 if widths.copied and separate else 1) * w * rows * width
    kept = (4 if gated else 2) * inner
    grads = widths.param * (weights + biases)
    moments = [(2 if gated else 1) * inner]
    if separate:
        moments += [grads // 2 + stream - inner, grads + 2 * stream - 3 * inner, grads + 3 * stream - 4 * inner]
    else:
        moments += [grads + stream + inner * (2 if gated else 1) - kept]
    return Part(
        name="feed_forward",
        saved=source + kept,
        casts=2 * weights if widths.mixed else 0,
        forward=source + kept + (stream if widths.copied else 0),
        unkept=2 * stream + (inner * (4 if fused else 3) if gated else 2 * inner),
        backward=max(moments),
        grads=grads,
    )


def decoder_block(samples: int, seq: int, spec: DecoderSpec, widths: Widths, *, kind: str, norms: str) -> Stage:
    """One decoder block over `samples` x `seq` rows, with `kind` attention and `norms` norms.

    Formula, fp32, eager norms, separate projections, causal: 4*(6*H + (2*A + 2*K)*D + 4*F) + 4*A + 8 bytes a row;
    with A*D = H, K*D = H and F = 4*H that is 26 tensors of N*H.
    Checked: tests/estimate/test_activations.py, whole numbers on a toy block.
    """
    rows = samples * seq
    shapes = block_shapes(spec)
    q_width = spec.num_heads * spec.head_dim
    parts = [norm("attn_norm", rows, spec, widths, norms), qkv(rows, spec, widths, kind)]
    if spec.qk_norm:
        parts.append(qk_norm(rows, spec, widths, norms))
    if spec.positions == "rope":
        parts.append(rope(rows, spec, widths))
    parts.append(attention(samples, seq, spec, widths, kind))
    parts.append(output("out", rows, q_width, spec.hidden, shapes["out"], shapes.get("out.bias", 0), widths))
    parts.append(norm("mlp_norm", rows, spec, widths, norms))
    names = ("gate", "up", "gate_up")
    parts.append(
        feed_forward(
            rows,
            spec.hidden,
            spec.ffn,
            spec.mlp,
            sum(shapes.get(name, 0) for name in names),
            sum(shapes.get(f"{name}.bias", 0) for name in names),
            widths,
            spec.projections == "fused",
        )
    )
    parts.append(output("down", rows, spec.ffn, spec.hidden, shapes["down"], shapes.get("down.bias", 0), widths))
    stream = widths.residual * rows * spec.hidden
    copied_norm = spec.norm == "rms" and not (norms == "fused" and widths.rules == "cuda")
    entry_saved = widths.residual == (4 if copied_norm else max(widths.residual, widths.normed))
    return Stage(
        name="block",
        parts=tuple(parts),
        carried=stream,
        held=0 if entry_saved else stream,
        output=stream + widths.compute * rows * spec.hidden,
        entry=stream,
        entry_saved=entry_saved,
    )


def qk_norm(rows: int, spec: DecoderSpec, widths: Widths, norms: str) -> Part:
    """RMSNorms of every query and key head, width D; k's backward comes first, so q's holds k's and v's gradients."""
    q = rms_norm("q_norm", rows * spec.num_heads, spec.head_dim, widths, kind=norms, inner=True)
    k = rms_norm("k_norm", rows * spec.num_kv_heads, spec.head_dim, widths, kind=norms, inner=True)
    keys = rows * spec.num_kv_heads * spec.head_dim
    return Part(
        name="qk_norm",
        saved=q.saved + k.saved,
        forward=max(q.forward, q.saved + k.forward) + widths.compute * keys,
        unkept=widths.residual * rows * spec.hidden + max(q.unkept, k.unkept) + 2 * widths.compute * keys,
        backward=q.backward + 2 * widths.compute * keys,
        grads=q.grads + k.grads,
    )
