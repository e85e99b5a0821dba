"""torchtitan's training step of Llama 2 on one of W GPUs under FSDP2, as of 2024-03-28, over the estimate's ledger.

Written from pytorch/torchtitan@83c879f18, the commit that printed the figures (torchtrain/models/llama/model.py,
parallelisms/parallelize_llama.py, train.py). What matters for memory there:

- parameters, gradients' sums and AdamW's states are fp32 and split over the GPUs; blocks are gathered and run in bf16,
  the last of them stays whole from forward to backward;
- norms and rotation are in fp32, the rotation by complex numbers from a table of 65,536 positions;
- `full` runs each block again in backward; `selective` keeps attention and every second product of it;
- the model's fp32 logits are a variable of the loop until the next step's forward is over, beside the
  log-probabilities and their two gradients;
- attention is flash: cuDNN's was not yet torch's choice, and their policy does not name it.

Unlike there: the clipping of gradients, which makes one number a tensor, is left out.

Letters: `B` batch, `S` sequence, `H` hidden, `D` head size, `V` vocabulary, `W` world size.
"""

import dataclasses
from collections.abc import Callable

from torchtitan_shapes import LLAMA_2, POSITIONS, VOCAB

from memplan.estimate import ops
from memplan.estimate.attention import fused
from memplan.estimate.checkpoint import region
from memplan.estimate.modules import Embedding, Linear, Module
from memplan.estimate.ops import add, mul
from memplan.estimate.optimizers import ForeachAdamW
from memplan.estimate.products import cross_entropy
from memplan.estimate.sharding_fsdp import Fsdp
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import flatten, narrow, to, transpose, view
from memplan.spec.step import StepSpec

KEPT = {"full": None, "selective": ()}
"""What a checkpointed block keeps; () is the policy that keeps attention and every second product."""


class Norm(Module):
    """RMSNorm in fp32, scaled in the input's dtype."""

    def __init__(self, tape: Tape, width: int) -> None:
        super().__init__(tape, "norm")
        self.weight = tape.setup.parameter(tape, "weight", (width,))

    def forward(self, x: Tensor) -> Tensor:
        output = to(self.normed(to(x, "float32")), x.dtype)
        return mul(output, self.weight)

    def normed(self, x: Tensor) -> Tensor:
        """Rows of `x` over their root mean square."""
        return mul(x, ops.rsqrt(ops.shift(ops.mean_last(ops.square(x)))))


def rotated(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [B, S, A, D] by complex numbers in fp32, each as two of them; `table` [S, D]."""
    first, second = to(q, "float32"), to(k, "float32")
    table = view(table, first.shape[1], 1, first.shape[3])
    q_out = mul(first, table)
    k_out = mul(second, table)
    return to(q_out, q.dtype), to(k_out, k.dtype)


class Layer(Module):
    """Norm, attention, residual; norm, gated feed-forward, residual; over rows [B*S, H]."""

    def __init__(self, tape: Tape, hidden: int, heads: int, ffn: int) -> None:
        super().__init__(tape, "layer")
        self.heads = heads
        self.q, self.k, self.v, self.out = (Linear(tape, name, hidden, hidden) for name in ("q", "k", "v", "out"))
        self.gate = Linear(tape, "gate", hidden, ffn)
        self.down = Linear(tape, "down", ffn, hidden)
        self.up = Linear(tape, "up", hidden, ffn)
        self.attn_norm, self.mlp_norm = Norm(tape, hidden), Norm(tape, hidden)

    def attend(self, x: Tensor, table: Tensor) -> Tensor:
        """Attention of rows."""
        seq, size = table.shape[0], x.shape[1] // self.heads
        q, k, v = self.q(x), self.k(x), self.v(x)
        shape = (x.shape[0] // seq, seq, self.heads, size)
        q, k, v = view(q, *shape), view(k, *shape), view(v, *shape)
        q, k = rotated(q, k, table)
        q, k, v = transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)
        output = fused("flash", q, k, v, None)
        output = view(transpose(output, 1, 2), x.shape[0], -1)
        return self.out(output)

    def feed(self, x: Tensor) -> Tensor:
        """Gated feed-forward of rows."""
        return self.down(mul(ops.of_input("silu", self.gate(x)), self.up(x)))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = add(x, self.attend(self.attn_norm(x), table))
        return add(h, self.feed(self.mlp_norm(h)))


class Transformer(Module):
    """Embedding, layers, final norm, a head of its own."""

    def __init__(self, tape: Tape, *, layers: int, hidden: int, heads: int, ffn: int, ckpt: str) -> None:
        super().__init__(tape)
        self.tokens = Embedding(tape, "tokens", VOCAB, hidden)
        self.table = tape.new("buffer", (POSITIONS, hidden // heads), "float32")
        self.layers = [Layer(tape, hidden, heads, ffn) for _ in range(layers)]
        for layer in self.layers:
            layer.around = region(tape, layer.forward, KEPT[ckpt])
        tape.blocks += self.layers
        self.norm = Norm(tape, hidden)
        self.output = Linear(tape, "output", hidden, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] in fp32."""
        sharding = self.tape.sharding
        sharding.enter()
        h = self.tokens(tokens)
        table = narrow(self.table, 0, tokens.shape[1])
        h = flatten(h, 0, 1)
        for layer in self.layers:
            h = sharding.around(layer, lambda module, x: module(x, table), h)
        h = self.norm(h)
        h = view(h, *tokens.shape, h.shape[-1])
        return sharding.leave(to(self.output(h), "float32"))


def train(tape: Tape, *, model: str, batch: int, seq: int, world: int, ckpt: str) -> Callable[[], object]:
    """The step: fp32 parameters in W parts, foreach AdamW, one backward."""
    tape.setup = dataclasses.replace(tape.setup, dtype="float32")
    parallel = "fsdp2:keep-last+param-bf16+reduce-fp32"
    sharding = Fsdp(tape, StepSpec(batch=batch, seq=seq, parallel=parallel, world=world))
    tape.sharding = sharding
    transformer = Transformer(tape, **LLAMA_2[model], ckpt=ckpt)
    parts = sharding.prepare(tape.parameters)
    optimizer = ForeachAdamW(tape, parts)
    tokens, labels = (tape.new("batch", (batch, seq), "int64") for _ in range(2))
    at: dict[str, Tensor] = {}

    def step() -> None:
        for part in parts:
            part.grad = None
        at["pred"] = transformer(tokens)
        at["loss"] = cross_entropy(flatten(at["pred"], 0, 1), flatten(labels, 0))
        tape.backward(at["loss"])
        sharding.finish_backward()
        optimizer.step()

    return step
