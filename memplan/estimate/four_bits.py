"""Frozen matrices in nf4, as QLoRA keeps them, and products with them.

Source: bitsandbytes 0.50.2 (functional.py: `quantize_4bit`, `dequantize_4bit`; autograd/_functions.py: `MatMul4Bit`;
nn/modules.py: `Linear4bit`; backends/cuda/ops.py: `_dequant_linear_fallback`), read and written down anew. Of few rows,
1,536 at most and fewer the faster the card's memory, a kernel of its own reads the codes themselves: the matrix counted
here is then an upper bound.
"""

from typing import Any

from memplan.estimate.products import workspace
from memplan.estimate.tape import Node, Parameter, Shape, Tape, Tensor
from memplan.estimate.views import to

BLOCK = 64
"""Elements that share a scale."""
NESTED_BLOCK = 256
"""Scales that share one of their own."""


def blocks(shape: Shape) -> int:
    """Scales of a matrix."""
    return int(-(-shape[0] * shape[1] // BLOCK))


def state(shape: Shape) -> list[tuple[str, Shape, str]]:
    """Beside the codes of two elements a byte: 8-bit scales, fp32 scales of those, what either table says, the mean."""
    num = blocks(shape)
    return [
        ("absmax", (num,), "uint8"),
        ("nested_absmax", (-(-num // NESTED_BLOCK),), "float32"),
        ("code", (16,), "float32"),
        ("nested_code", (256,), "float32"),
        ("offset", (), "float32"),
    ]


def nf4_matrix(tape: Tape, name: str, shape: Shape) -> Parameter:
    """A frozen matrix in 4 bits; it counts as many parameters as before."""
    copies, dtype = tape.copies, tape.setup.dtype
    codes = tape.allocate("quantize_4bit", (-(-shape[0] * shape[1] // 2), 1), "uint8", category="params", copies=copies)
    matrix = Parameter(codes, shape, dtype, name=name, component=tape.component, copies=copies)
    for part, sizes, kind in state(shape):
        matrix.state.append(tape.allocate(part, sizes, kind, category="params", copies=copies))
    tape.parameters.append(matrix)
    tape.stay("table of 8-bit codes", 4 * 256)
    return matrix


def linear_4_bit(x: Tensor, matrix: Parameter, dtype: str) -> Tensor:
    """x [..., I] by a matrix [O, I] in nf4, in `dtype`: saves the codes alone, and makes the matrix for the moment, in
    backward again, by way of the dtype that it had."""
    tape, wanted = x.tape, x.dtype
    x = to(x, dtype)

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        grad = grads[0]
        low = to(dequantised(matrix, matrix.dtype), grad.dtype)
        workspace(grad)
        of_x = tape.new("mm", node.info, grad.dtype)
        del low
        return [of_x]

    node = tape.record("MatMul4Bit", (x,), backward, info=x.shape)
    scales = tape.new("dequantize_blockwise", (blocks(matrix.shape),), "float32")
    shifted = tape.new("add", scales.shape, "float32")
    made = tape.new("dequantize_4bit", matrix.shape, dtype)
    workspace(x)
    out = tape.make("gemm_4bit", ((*x.shape[:-1], matrix.shape[0]), dtype))
    del scales, shifted, made
    return to(tape.link(node, out), wanted)


def dequantised(matrix: Tensor, dtype: str) -> Tensor:
    """The matrix in `dtype`, for the moment of a product."""
    tape = matrix.tape
    scales = tape.new("dequantize_blockwise", (blocks(matrix.shape),), "float32")
    made = tape.new("dequantize_4bit", matrix.shape, dtype)
    del scales
    return made
