"""The step of automodel.py over the estimate's ledger, module for module, on one GPU or on each of W under FSDP2.

Beyond that step, from the same commit (components/distributed/parallelizer.py, loss/linear_ce.py) and
apple/ml-cross-entropy@87a86ab, which its lock file names:

- under FSDP2 layers are gathered one by one, the last stays whole from forward to backward, and so does the rest;
- `recompute` runs each norm, attention and feed-forward layer again in backward, one by one;
- `cut` makes the loss from hidden states without logits: its gradients are of the rows and of the matrix, in bf16.
  The model's output then has the hidden states of all layers and the last token's logits, and the step holds it until
  backward is done.

Letters as there.
"""

from collections.abc import Callable
from typing import Any

from automodel_shapes import FFN, HIDDEN, KV_HEADS, LAYERS, ROW_BLOCKS, SIZE, VOCAB

from memplan.estimate import ops
from memplan.estimate.attention import sdpa
from memplan.estimate.checkpoint import region
from memplan.estimate.modules import Embedding, Linear, Module
from memplan.estimate.ops import add, to
from memplan.estimate.optimizers import ForeachAdamW
from memplan.estimate.products import cross_entropy, linear
from memplan.estimate.sharding_fsdp import make_sharding
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import flatten, narrow, transpose, unflatten_last, view
from memplan.spec.step import StepSpec


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


class Attention(Module):
    """Attention [B, S, H] -> [B, S, H]."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, "attn")
        self.q, self.out = (Linear(tape, name, HIDDEN, HIDDEN) for name in ("q", "out"))
        self.k, self.v = (Linear(tape, name, HIDDEN, KV_HEADS * SIZE) for name in ("k", "v"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (transpose(unflatten_last(matrix(x), SIZE), 1, 2) for matrix in (self.q, self.k, self.v))
        q, k = rotate(q, k)
        out = sdpa(q, k, v)
        return self.out(flatten(transpose(out, 1, 2), 2))


class Mlp(Module):
    """Gated feed-forward [B, S, H] -> [B, S, H]."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, "mlp")
        self.gate, self.up = (Linear(tape, name, HIDDEN, FFN) for name in ("gate", "up"))
        self.down = Linear(tape, "down", FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate(x), self.up(x)))


class Layer(Module):
    """Norm, attention, residual; norm, gated feed-forward, residual; each of the four on its own where `recompute`."""

    def __init__(self, tape: Tape, *, recompute: bool) -> None:
        super().__init__(tape, "layer")
        self.attn_norm, self.mlp_norm = Norm(tape), Norm(tape)
        self.attn, self.mlp = Attention(tape), Mlp(tape)
        for child in self.children().values() if recompute else ():
            child.around = region(tape, child.forward, None)

    def forward(self, x: Tensor) -> Tensor:
        x = add(x, self.attn(self.attn_norm(x)))
        return add(x, self.mlp(self.mlp_norm(x)))


def cut_cross_entropy(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of rows [N, H] and a matrix [V, H] without logits: saves both, the labels and one fp32 number a row."""
    tape = rows.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        made = [tape.new("zeros_like", one.shape, one.dtype) for one in saved[:2]]
        tape.hidden("locks", *(4 * -(-one.shape[0] // 128) * -(-HIDDEN // 64) for one in saved[:2]))
        return made

    node = tape.record("LinearCrossEntropyFunction", (rows, weight), backward, (rows, weight, labels))
    sums = tape.make("new_full", (rows.shape[:1], "float32"))
    losses = tape.make("new_zeros", (rows.shape[:1], "float32"))
    out = tape.make("sum", ((), "float32"))
    del losses
    return tape.link(node, out, saved=(sums,))


class Model(Module):
    """Tied embedding, layers, final norm; under FSDP2 where there are several GPUs."""

    def __init__(self, tape: Tape, *, recompute: bool) -> None:
        super().__init__(tape)
        self.embedding = Embedding(tape, "embedding", VOCAB, HIDDEN)
        self.layers = [Layer(tape, recompute=recompute) for _ in range(LAYERS)]
        tape.blocks += self.layers
        self.norm = Norm(tape)

    def forward(self, tokens: Tensor, keep: int | None) -> tuple[Tensor, list[Tensor]]:
        """Logits of the last `keep` tokens, all by default, and every layer's hidden states."""
        sharding = self.tape.sharding
        sharding.enter()
        x = self.embedding(tokens)
        states = [x]
        for layer in self.layers:
            x = sharding.around(layer, Layer.__call__, x)
            states.append(x)
        states[-1] = self.norm(x)
        del x
        last = states[-1] if keep is None else narrow(states[-1], 1, keep)
        logits = linear(last, self.embedding.weight)
        del last
        if keep is None:
            return sharding.leave(logits), states
        states[-1] = sharding.leave(states[-1])  # of which the loss is made
        return logits, states


def finetune(
    tape: Tape, *, batch: int, seq: int, world: int = 1, recompute: bool = False, cut: bool = False
) -> Callable[[], object]:
    """The step: bf16 parameters, AdamW by its default (foreach), one backward."""
    parallel = "single" if world == 1 else "fsdp2:keep-last"
    sharding = tape.sharding = make_sharding(tape, StepSpec(batch=batch, seq=seq, parallel=parallel, world=world))
    model = Model(tape, recompute=recompute)
    parts = sharding.prepare(tape.parameters)
    optimizer = ForeachAdamW(tape, parts)
    tokens, labels = (tape.new("batch", (batch, seq), "int64") for _ in range(2))

    def step() -> None:
        logits, states = model(tokens, 1 if cut else None)
        if cut:
            loss = cut_cross_entropy(flatten(states[-1], 0, 1), model.embedding.weight, flatten(labels, 0))
        else:
            states.clear()
            loss = cross_entropy(to(view(logits, -1, VOCAB), "float32"), view(labels, -1))
        tape.backward(ops.scale(loss, "div"))
        sharding.finish_backward()
        optimizer.step()
        for part in parts:
            part.grad = None

    return step
