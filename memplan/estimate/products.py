"""Matrix products, lookups and sorts: what they make and save, and what their backward makes.

Letters: `N` rows, `I` inputs, `O` outputs of a linear; `E` experts, `k` experts a token.
"""

import math
from typing import Any

from memplan.estimate.autocast import for_autocast, operands
from memplan.estimate.ops import softmax
from memplan.estimate.tape import Node, Shape, Tensor
from memplan.estimate.views import flatten, sum_to, transpose, view


def workspace(x: Tensor) -> None:
    """The workspace that cuBLAS takes for good with the first product of each thread."""
    tape = x.tape
    tape.stay(f"cublas workspace of the {tape.thread} thread", tape.workspace_bytes)


def product(op: str, shape: Shape, x: Tensor) -> Tensor:
    """What `op` makes of `x` and another, and then the workspace."""
    out: Tensor = x.tape.make(op, (shape, x.dtype))
    workspace(x)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] by a matrix [O, I], and a bias [O]: saves the rows where the matrix trains, and the matrix where the
    rows want a gradient."""
    if bias is None:
        x, weight = operands(x, weight)
    else:
        x, weight, bias = operands(x, weight, bias)
    turned = None if bias is not None else transpose(weight, 0, 1)  # before the rows: backward takes the rows first
    rows = x if len(x.shape) == 2 else flatten(x, 0, -2)
    out = mm(rows, transpose(weight, 0, 1) if turned is None else turned, bias)
    del turned
    return out if len(x.shape) == 2 else view(out, *x.shape[:-1], out.shape[-1])


def mm(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [N, I] x matrix [I, O] (+ bias [O]), torch's `mm` or `addmm`."""
    tape = rows.tape
    op = "mm" if bias is None else "addmm"

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        left, right = saved
        saved.clear()
        grad, shapes = grads[0], node.info
        wanted = right is not None, left is not None
        made: list[Tensor | None] = [None, None, None]
        for slot in (1, 0) if shapes[2] is None else (0, 1):  # in the order of the names: mat2, self; mat1, mat2, self
            if wanted[slot]:
                made[slot] = product("mm", shapes[slot], grad)
        del left, right  # the engine sums when the op has returned
        if len(node.edges) > 2 and node.edges[2] is not None:
            made[2] = sum_to(grad, shapes[2])
        return made

    inputs = (rows, matrix) if bias is None else (rows, matrix, bias)
    saves = (rows if matrix.requires_grad else None, matrix if rows.requires_grad else None)
    shapes = (rows.shape, matrix.shape, None if bias is None else bias.shape)
    node = tape.record(op, inputs, backward, saves, info=shapes)
    return tape.link(node, product(op, (rows.shape[0], matrix.shape[1]), rows))


def batched(x: Tensor) -> Tensor:
    """`x` with its leading dimensions made one, as `matmul` hands it on."""
    return x.alias((math.prod(x.shape[:-2]), *x.shape[-2:]))


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """Batched product [..., n, m] x [..., m, p] of equal leading dimensions, dense as `matmul` wants them."""
    x, y = operands(x, y)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        left, right = saved
        of_y = None if left is None else product("bmm", node.info[1], grads[0])  # mat2, self
        of_x = None if right is None else product("bmm", node.info[0], grads[0])
        return [of_x, of_y]

    saves = (batched(x) if y.requires_grad else None, batched(y) if x.requires_grad else None)
    node = tape.record("bmm", (x, y), backward, saves, info=(x.shape, y.shape))
    return tape.link(node, product("bmm", (*x.shape[:-1], y.shape[-1]), x))


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, op: str = "_grouped_mm") -> Tensor:
    """rows [n, I] by one matrix an expert of weight [E, I, O], sorted by expert: saves what the gradients that are
    wanted read, memplan's own op (any other `op`) all there is, and makes both."""
    tape = rows.tape
    own = op != "_grouped_mm"

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        of_weight = None if saved[0] is None else tape.make(op, (node.info[1], grads[0].dtype))
        of_rows = None if saved[1] is None else tape.make(op, (node.info[0], grads[0].dtype))
        return [of_rows, of_weight, None]

    saves = (rows if own or weight.requires_grad else None, weight if own or rows.requires_grad else None, ends)
    node = tape.record(op, (rows, weight, ends), backward, saves, info=(rows.shape, weight.shape))
    return tape.link(node, tape.make(op, ((rows.shape[0], weight.shape[-1]), rows.dtype)))


def avg_pool2d(x: Tensor, size: int) -> Tensor:
    """Means of squares of x [B, C, h, w] that do not overlap: saves x; backward makes the whole again."""
    tape = x.tape
    B, C, h, w = x.shape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [tape.new("avg_pool2d_backward", node.info, grads[0].dtype)]

    node = tape.record("avg_pool2d", (x,), backward, (x,), info=x.shape)
    out: Tensor = tape.link(node, tape.make("avg_pool2d", ((B, C, h // size, w // size), x.dtype)))
    return out


def conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Images x [B, C, h, w] by patches that do not overlap, weight [O, C, p, p] -> [B, O, h / p, w / p]: saves images
    and weight. The kernels' own workspaces, which cuDNN chooses by measuring, are left out."""
    x, weight, bias = operands(x, weight, bias)
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        shapes, dtype = node.info, grads[0].dtype
        wanted = [edge is not None for edge in node.edges]
        return [
            tape.new("convolution_backward", shape, dtype) if one else None
            for shape, one in zip(shapes, wanted, strict=True)
        ]

    inputs = (x, weight, bias)
    node = tape.record("convolution", inputs, backward, (x, weight), info=[tensor.shape for tensor in inputs])
    (B, _, height, width), (channels, _, down, right) = x.shape, weight.shape
    return tape.link(node, tape.make("convolution", ((B, channels, height // down, width // right), x.dtype)))


def embedding(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of table [V, H] for tokens [...]: saves the tokens; backward makes a whole table."""
    tape = table.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        grad, shape = grads[0], node.info
        out = tape.new("embedding_dense_backward", shape, grad.dtype)
        if tape.rules == "cuda":
            tape.hidden("embedding_dense_backward", *embedding_temps(saved[0].numel, shape, grad.width))
        return [out]

    node = tape.record("embedding", (table,), backward, (tokens,), info=table.shape)
    return tape.link(node, tape.make("embedding", ((*tokens.shape, table.shape[-1]), table.dtype)))


def embedding_temps(num: Any, table: Shape, width: int) -> tuple[Any, ...]:
    """Bytes inside the table's gradient over `num` tokens: nothing up to 3,072, above sorted indices and fp32 sums of
    runs. Source: embedding_dense_backward_cuda, aten/src/ATen/native/cuda/Embedding.cu, torch 2.13."""
    vocab, hidden = table
    if not isinstance(num, int):
        import numpy as np

        segments: Any = np.minimum(num, vocab)
        partials = num // 10 + segments
        sums = partials * hidden * max(width, 4)
        return (np.where(num > 3072, 24 * num + 16 * segments + 8 * partials + sums, 0),)
    if num <= 3072:
        return ()
    segments = min(num, vocab)
    partials = num // 10 + segments
    return 8 * num, 8 * num, 8 * num, 8, 8 * segments, 8 * segments, 8, 8 * partials, partials * hidden * max(width, 4)


def index_select(x: Tensor, index: Tensor, op: str = "index_select") -> Tensor:
    """Rows of x [N, ...] by index [n]: saves the index; backward adds into zeros of the whole, for `x[index]` (the op
    `index`) on CUDA by a flat index and its sorted copy with their origins (Indexing.cu, index_put_with_sort_kernel,
    torch 2.13)."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        out = tape.new(f"{op}_backward", node.info, grads[0].dtype)
        if op == "index" and tape.rules == "cuda":
            tape.hidden("index_put", *[8 * saved[0].numel] * 3)
        return [out]

    node = tape.record(op, (x,), backward, (index,), info=x.shape)
    return tape.link(node, tape.make(op, ((*index.shape, *x.shape[1:]), x.dtype)))


def index(x: Tensor, *indices: Tensor) -> Tensor:
    """Rows of x [B, N, ...] by places that broadcast to those of the last index [B, ...]: saves the indices; backward
    adds into zeros of the whole, by way of sorted numbers on CUDA."""
    tape, places = x.tape, indices[-1]

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        out = tape.new("index_backward", node.info, grads[0].dtype)
        if tape.rules == "cuda":
            tape.hidden("index_put", *[8 * saved[-1].numel] * 3)
        return [out]

    node = tape.record("index", (x,), backward, indices, info=x.shape)
    return tape.link(node, tape.make("index", ((*places.shape, *x.shape[2:]), x.dtype)))


def scatter_add(x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """x [B, S, H] with rows [B, T, H] added at their places [B, T]: saves the places; backward picks the gradient's."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [grads[0], None if node.edges[1] is None else tape.new("gather", node.info, grads[0].dtype)]

    node = tape.record("scatter_add", (x, rows), backward, (places,), info=rows.shape)
    return tape.link(node, tape.make("scatter_add", (x.shape, x.dtype)))


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Entries of x along its last dimension: saves the index; backward scatters into zeros."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [tape.new("gather_backward", node.info, grads[0].dtype)]

    node = tape.record("gather", (x,), backward, (index,), info=x.shape)
    return tape.link(node, tape.make("gather", (index.shape, x.dtype)))


def topk(x: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The largest `num` along the last dimension and their int64 places, which it saves."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [None if grads[0] is None else tape.new("value_selecting_reduction_backward", node.info, grads[0].dtype)]

    shape = (*x.shape[:-1], num)
    node = tape.record("topk", (x,), backward, info=x.shape)
    values, places = tape.make("topk", (shape, x.dtype), (shape, "int64"))
    tape.link(node, values, saved=(places,))
    return values, places


def plain(x: Tensor, op: str, *outputs: tuple[Shape, str]) -> Any:
    """What an op makes that no gradient goes through: sorts, comparisons, counts."""
    return x.tape.make(op, *outputs)


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with entries replaced by a number: saves the mask; backward fills a copy of the gradient."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [tape.new("masked_fill", grads[0].shape, grads[0].dtype)]

    node = tape.record("masked_fill", (x,), backward, (mask,))
    return tape.link(node, tape.make("masked_fill", (x.shape, x.dtype)))


def where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Entries of `x` where `mask`, of `y` elsewhere: saves the mask."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        grad = grads[0]
        of_x = None if node.edges[0] is None else sum_to(tape.new("where", grad.shape, grad.dtype), node.info[0])
        of_y = None if node.edges[1] is None else sum_to(tape.new("where", grad.shape, grad.dtype), node.info[1])
        return [of_x, of_y]

    node = tape.record("where", (x, y), backward, (mask,), info=(x.shape, y.shape))
    return tape.link(node, tape.make("where", (x.shape if len(x.shape) >= len(y.shape) else y.shape, x.dtype)))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over rows [N, V]: saves log-probabilities; backward makes two tensors of their size. CUDA's autocast lets
    the log-probabilities have the logits' dtype, which cross_entropy_loss asks for (aten/src/ATen/native/LossNLL.cpp,
    torch 2.13), and makes fp32 ones of them for nll_loss; the CPU's makes the logits fp32."""
    (logits,) = for_autocast("cross_entropy", logits)
    return nll_loss(softmax(logits, logits.dtype, op="_log_softmax"), labels)


def nll_losses(probs: Tensor, labels: Tensor) -> Tensor:
    """The labels' entries [N] of fp32 log-probabilities [N, V], which it saves."""
    return nll_loss(probs, labels, probs.shape[:1])


def nll_loss(probs: Tensor, labels: Tensor, shape: Shape = ()) -> Tensor:
    """The sum of the labels' entries of log-probabilities [N, V], which it saves in fp32 under autocast."""
    (probs,) = for_autocast("nll_loss", probs)
    tape = probs.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [tape.new("nll_loss_backward", *node.info)]

    node = tape.record("nll_loss", (probs,), backward, (probs, labels), info=(probs.shape, probs.dtype))
    out, weight = tape.make("nll_loss_forward", (shape, "float32"), ((), "float32"))
    return tape.link(node, out, saved=(weight,))


def log_softmax(x: Tensor) -> Tensor:
    """Over the last dimension; saves its result."""
    return softmax(x, op="_log_softmax")
