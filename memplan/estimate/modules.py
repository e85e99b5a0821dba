"""Modules over the ledger: linears, norms, embeddings, and how their calls hold what torch's hold.

Letters: as in `spec.model`.
"""

from collections.abc import Callable
from typing import Any

from memplan.estimate import views
from memplan.estimate.autocast import for_autocast
from memplan.estimate.four_bits import linear_4_bit, nf4_matrix
from memplan.estimate.ops import add_scaled, dropout, mean_last, mul, rsqrt, shift, square
from memplan.estimate.products import embedding, linear
from memplan.estimate.tape import Node, Parameter, Tape, Tensor
from memplan.estimate.views import to


class Module:
    """A part of a model; a call holds its arguments until it returns, as torch's `Module.__call__` does."""

    def __init__(self, tape: Tape, name: str = "") -> None:
        self.tape = tape
        self.name = name
        self.around: Callable[..., Any] | None = None
        """What runs `forward` instead: a checkpointed region."""

    def __call__(self, *args: Any) -> Any:
        tape, outer = self.tape, self.tape.part
        tape.part = f"{outer}.{self.name}" if outer else self.name
        run = self.forward if self.around is None else self.around
        try:
            return run(*args)
        finally:
            tape.part = outer

    def forward(self, *args: Any) -> Any:
        """What the module does."""
        raise NotImplementedError

    def children(self) -> dict[str, "Module"]:
        """Modules that are attributes of this one, by attribute."""
        return {name: child for name, child in vars(self).items() if isinstance(child, Module)}

    def parameters(self) -> list[Parameter]:
        """Its own parameters and its children's."""
        own = [value for value in vars(self).values() if isinstance(value, Parameter)]
        for child in self.children().values():
            own += child.parameters()
        return own


class Linear(Module):
    """x [..., I] -> [..., O]: a matrix, in 4 bits where the step keeps those of the blocks so, and an adapter beside it
    where the step has one for its name."""

    transposed = False
    """Whether the matrix is kept as [I, O]; in 4 bits none is."""

    def __init__(self, tape: Tape, name: str, width: int, out: int, *, bias: bool = False) -> None:
        super().__init__(tape, name)
        setup = tape.setup
        self.low = setup.base_dtype(tape.component)
        make = nf4_matrix if self.low else setup.parameter
        turned = self.transposed and not self.low
        self.weight = make(tape, f"{name}.weight", (width, out) if turned else (out, width))
        self.bias = setup.parameter(tape, f"{name}.bias", (out,), dtype=self.low) if bias else None
        self.down = self.up = None
        rank = setup.adapter_rank(name, tape.component)
        self.dropout = setup.dropout
        if rank:
            self.down = setup.parameter(tape, f"{name}.lora_down", (rank, width), adapter=True)
            self.up = setup.parameter(tape, f"{name}.lora_up", (out, rank), adapter=True)

    def forward(self, x: Tensor) -> Tensor:
        out = linear_4_bit(x, self.weight, self.low) if self.low else self.multiplied(x)
        if self.down is None or self.up is None:
            return out
        inner = dropout(x, self.dropout)
        return add_scaled(out, linear(linear(inner, self.down), self.up))

    def multiplied(self, x: Tensor) -> Tensor:
        """`x` by the matrix as it is, and the bias."""
        return linear(x, self.weight, self.bias)


class RMSNorm(Module):
    """Root-mean-square norm: `eager` by elementwise ops in fp32, or torch's own; `offset` multiplies by 1 + weight in
    fp32, and `late` casts back behind the weight."""

    def __init__(
        self, tape: Tape, name: str, width: int, kind: str, *, offset: bool = False, late: bool = False
    ) -> None:
        super().__init__(tape, name)
        self.kind = kind
        self.offset = offset
        self.late = late
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width,))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "fused":
            return fused_rms_norm(x, shift(self.weight) if self.offset else self.weight)
        dtype = x.dtype
        x = to(x, "float32")
        if self.offset:
            x = mul(x, rsqrt(shift(mean_last(square(x)))))
            return to(mul(x, shift(to(self.weight, "float32"))), dtype)
        if self.late:
            x = mul(x, rsqrt(shift(mean_last(square(x)))))
            return to(mul(self.weight, x), dtype)
        return mul(self.weight, to(mul(x, rsqrt(shift(mean_last(square(x))))), dtype))


def fused_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """torch's rms_norm: on CUDA one kernel that saves its input and the fp32 root of each row; on the CPU the same of
    elementwise ops in fp32."""
    tape = x.tape
    x, weight = for_autocast("rms_norm", x, weight)
    if tape.rules == "cpu":
        dtype = x.dtype
        wide = to(x, "float32")
        root = rsqrt(shift(mean_last(square(wide))))
        return to(mul(mul(wide, root), weight), dtype)
    rows = x.shape[:-1]

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        x, weight, _ = saved
        of_x = tape.new("_fused_rms_norm_backward", x.shape, x.dtype)
        of_weight = None if node.edges[1] is None else tape.new("_fused_rms_norm_backward", node.info, weight.dtype)
        tape.hidden("_fused_rms_norm_backward", *partial_sums(x, weight, of_weight is not None))
        return [of_x, of_weight]

    node = tape.record("_fused_rms_norm", (x, weight), backward, (x, weight), info=weight.shape)
    out, root = tape.make("_fused_rms_norm", (x.shape, x.dtype), ((*rows, 1), "float32"))
    return tape.link(node, out, saved=(root,))


MANY_ROWS = 64 * 1024
"""Rows from which on a norm's backward sums by blocks of them. Source: LaunchGammaBetaBackwardCUDAKernel,
aten/src/ATen/native/cuda/layer_norm_kernel.cu, torch 2.13."""


def partial_sums(x: Tensor, weight: Tensor, vectors: int) -> tuple[Any, ...]:
    """Bytes inside a norm's backward on CUDA over many short rows: blocks of each of the `vectors` whose gradient is
    asked for."""
    tape, width = x.tape, weight.shape[0]
    if tape.rules == "cpu" or width // 32 >= tape.multiprocessors // 2:
        return ()
    rows, most = x.numel // width, MANY_ROWS // 2 // -(-width // 32)
    if isinstance(rows, int):
        return (min(most, -(-rows // 32)) * width * weight.width,) * vectors if rows > MANY_ROWS else ()
    import numpy as np

    return (np.where(rows > MANY_ROWS, np.minimum(most, -(-rows // 32)) * width * weight.width, 0),) * vectors


class LayerNorm(Module):
    """torch's layer norm: saves its input, mean and root of each row, fp32 on CUDA, the weight's dtype on the CPU."""

    strided = False
    """Whether its input's rows do not lie one behind another in memory, so that each call on CUDA reads a copy."""

    def __init__(self, tape: Tape, name: str, width: int, *, bias: bool = True) -> None:
        super().__init__(tape, name)
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width,))
        self.bias = tape.setup.parameter(tape, f"{name}.bias", (width,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tape, weight, bias = self.tape, self.weight, self.bias
        (x,) = for_autocast("layer_norm", x)
        stats = "float32" if tape.rules == "cuda" else weight.dtype
        copied = [x.numel * x.width] if self.strided and tape.rules == "cuda" else []

        def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
            of_x = tape.new("native_layer_norm_backward", saved[0].shape, saved[0].dtype)
            vectors = [
                None if edge is None else tape.new("native_layer_norm_backward", node.info, weight_dtype)
                for edge in node.edges[1:]
            ]
            sums = partial_sums(saved[0], saved[1], sum(vector is not None for vector in vectors))
            tape.hidden("native_layer_norm_backward", *copied, *sums)
            return [of_x, *vectors]

        weight_dtype = weight.dtype
        inputs = (x, weight) if bias is None else (x, weight, bias)
        node = tape.record("native_layer_norm", inputs, backward, (x, weight), info=weight.shape)
        rows = (*x.shape[:-1], 1)
        out, mean, root = tape.make("native_layer_norm", (x.shape, x.dtype), (rows, stats), (rows, stats))
        tape.hidden("native_layer_norm", *copied)
        return tape.link(node, out, saved=(mean, root))


class Embedding(Module):
    """Token table [V, H], with a second one of `extra` rows concatenated below it at each forward; with `words` False
    a table of places or types, which no head reads."""

    def __init__(self, tape: Tape, name: str, vocab: int, width: int, *, extra: int = 0, words: bool = True) -> None:
        super().__init__(tape, name)
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (vocab, width), words=words)
        self.extra = tape.setup.parameter(tape, f"{name}.extra", (extra, width), always=True) if extra else None

    def forward(self, tokens: Tensor) -> Tensor:
        table: Tensor = self.weight if self.extra is None else views.cat((self.weight, self.extra), 0)
        return embedding(table, tokens)
