"""The step of automodel.py over the estimate's ledger, module for module. Letters as there."""

from collections.abc import Callable
from typing import Any

from automodel_shapes import FFN, HIDDEN, KV_HEADS, LAYERS, ROW_BLOCKS, SIZE, VOCAB

from memplan.estimate import ops
from memplan.estimate.attention import sdpa
from memplan.estimate.modules import Embedding, Linear, Module
from memplan.estimate.ops import add, to
from memplan.estimate.optimizers import ForeachAdamW
from memplan.estimate.products import cross_entropy, linear
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import flatten, transpose, unflatten_last, view


class Norm(Module):
    """RMSNorm by Liger: its gradient is written over the one that comes in."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, "norm")
        self.weight = tape.setup.parameter(tape, "norm.weight", (HIDDEN,))

    def forward(self, x: Tensor) -> Tensor:
        tape, weight = self.tape, self.weight

        def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
            partial = tape.new("new_empty", (ROW_BLOCKS, HIDDEN), "float32")
            total = tape.new("sum", (HIDDEN,), "float32")
            del partial
            return [grads[0], to(total, weight.dtype)]

        node = tape.record("NormFunction", (x, weight), backward, (x, weight))
        out = tape.make("empty_like", (x.shape, x.dtype))
        root = tape.make("new_empty", (x.shape[:-1], "float32"))
        return tape.link(node, out, saved=(root,))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up by Liger; the gradients are written over gate and up."""
    tape = gate.tape
    node = tape.record("GatedFunction", (gate, up), lambda node, saved, grads: list(saved), (gate, up))
    return tape.link(node, tape.make("empty_like", (gate.shape, gate.dtype)))


def rotate(q: Tensor, k: Tensor) -> list[Tensor]:
    """q and k rotated in place by Liger, in forward and in backward, there in copies that are dense as [B, S, A, D]."""
    tape = q.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        return [tape.new("clone", grad.shape, grad.dtype) for grad in grads]

    node = tape.record("RotateFunction", (q, k), backward)
    return list(tape.link(node, q.alias(), k.alias()))


class Layer(Module):
    """Norm, attention, residual; norm, gated feed-forward, residual."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, "layer")
        self.attn_norm, self.mlp_norm = Norm(tape), Norm(tape)
        self.q, self.out = (Linear(tape, name, HIDDEN, HIDDEN) for name in ("q", "out"))
        self.k, self.v = (Linear(tape, name, HIDDEN, KV_HEADS * SIZE) for name in ("k", "v"))
        self.gate, self.up = (Linear(tape, name, HIDDEN, FFN) for name in ("gate", "up"))
        self.down = Linear(tape, "down", FFN, HIDDEN)

    def attend(self, x: Tensor) -> Tensor:
        """Attention [B, S, H] -> [B, S, H]."""
        q, k, v = (transpose(unflatten_last(matrix(x), SIZE), 1, 2) for matrix in (self.q, self.k, self.v))
        q, k = rotate(q, k)
        out = sdpa(q, k, v)
        return self.out(flatten(transpose(out, 1, 2), 2))

    def forward(self, x: Tensor) -> Tensor:
        x = add(x, self.attend(self.attn_norm(x)))
        h = self.mlp_norm(x)
        return add(x, self.down(gated(self.gate(h), self.up(h))))


def finetune(tape: Tape, *, batch: int, seq: int) -> Callable[[], object]:
    """The step: bf16 parameters, AdamW by its default (foreach), one backward."""
    embedding = Embedding(tape, "embedding", VOCAB, HIDDEN)
    layers = [Layer(tape) for _ in range(LAYERS)]
    norm = Norm(tape)
    optimizer = ForeachAdamW(tape, tape.parameters)
    tokens, labels = (tape.new("batch", (batch, seq), "int64") for _ in range(2))

    def forward() -> Tensor:
        x = embedding(tokens)
        for layer in layers:
            x = layer(x)
        return linear(norm(x), embedding.weight)

    def loss(logits: Tensor) -> Tensor:
        return ops.scale(cross_entropy(to(view(logits, -1, VOCAB), "float32"), view(labels, -1)), "div")

    def step() -> None:
        logits = forward()
        tape.backward(loss(logits))
        optimizer.step()
        for parameter in tape.parameters:
            parameter.grad = None

    return step
