"""The step of torchtune.py over the estimate's ledger, module for module. Letters as there."""

from collections.abc import Callable

from torchtune_shapes import LLAMA_3_2, MAX_POSITIONS, VOCAB

from memplan.estimate import ops, views
from memplan.estimate.attention import sdpa
from memplan.estimate.checkpoint import region
from memplan.estimate.modules import Embedding, Linear, Module
from memplan.estimate.ops import add, mul
from memplan.estimate.optimizers import FusedAdamW
from memplan.estimate.products import cross_entropy, linear
from memplan.estimate.tape import Parameter, Tape, Tensor
from memplan.estimate.views import clone, flatten, narrow, squeeze, to, transpose, unflatten_last, view


class Norm(Module):
    """RMSNorm in fp32, scaled in the input's dtype."""

    def __init__(self, tape: Tape, width: int) -> None:
        super().__init__(tape, "norm")
        self.scale = tape.setup.parameter(tape, "scale", (width,))

    def forward(self, x: Tensor) -> Tensor:
        raised = to(x, "float32")
        normed = to(mul(raised, ops.rsqrt(ops.shift(ops.mean_last(ops.square(raised))))), x.dtype)
        return mul(normed, self.scale)


class Rotation(Module):
    """Rotary embedding of neighbouring pairs in fp32, by a table [positions, D / 2, 2] for the longest sequence."""

    def __init__(self, tape: Tape, size: int) -> None:
        super().__init__(tape, "rotation")
        self.table = tape.new("buffer", (MAX_POSITIONS, size // 2, 2), "float32")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        B, S, _, D = x.shape
        table = self.tape.make("index", ((B, S, D // 2, 2), "float32"))
        pairs = unflatten_last(to(x, "float32"), 2)
        table = view(table, B, S, 1, D // 2, 2)
        out = views.stack(
            (
                ops.sub(mul(one_of(pairs), one_of(table)), mul(one_of(pairs), one_of(table))),
                add(mul(one_of(pairs), one_of(table)), mul(one_of(pairs), one_of(table))),
            ),
            -1,
        )
        return to(flatten(out, 3), x.dtype)


def one_of(pairs: Tensor) -> Tensor:
    """The first or the second of each pair."""
    return squeeze(narrow(pairs, -1, 1), -1)


class Layer(Module):
    """Norm, attention, residual; norm, gated feed-forward, residual."""

    def __init__(self, tape: Tape, hidden: int, heads: int, kv_heads: int, ffn: int, rotation: Rotation) -> None:
        super().__init__(tape, "layer")
        self.size, self.groups = hidden // heads, heads // kv_heads
        self.attn_norm, self.mlp_norm = Norm(tape, hidden), Norm(tape, hidden)
        self.q, self.out = (Linear(tape, name, hidden, hidden) for name in ("q", "out"))
        self.k, self.v = (Linear(tape, name, hidden, kv_heads * self.size) for name in ("k", "v"))
        self.gate, self.up = (Linear(tape, name, hidden, ffn) for name in ("gate", "up"))
        self.down = Linear(tape, "down", ffn, hidden)
        self.rotation = rotation

    def attend(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attention [B, S, H] -> [B, S, H]."""
        q, k, v = (unflatten_last(matrix(x), self.size) for matrix in (self.q, self.k, self.v))
        q = transpose(self.rotation(q, positions), 1, 2)
        k = transpose(self.rotation(k, positions), 1, 2)
        v = transpose(v, 1, 2)
        k, v = (views.repeat_interleave(t, self.groups, 1) for t in (k, v))
        out = sdpa(q, k, v, strided="q")
        return self.out(flatten(transpose(out, 1, 2), 2))

    def feed(self, x: Tensor) -> Tensor:
        """Gated feed-forward [B, S, H] -> [B, S, H]."""
        h = ops.of_input("silu", self.gate(x))
        h = mul(h, self.up(x))
        return self.down(h)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = add(self.attend(self.attn_norm(x), positions), x)
        return add(h, self.feed(self.mlp_norm(h)))


class Decoder(Module):
    """Tied embedding, layers, final norm."""

    def __init__(
        self, tape: Tape, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, recompute: bool
    ) -> None:
        super().__init__(tape)
        self.tokens = Embedding(tape, "tokens", VOCAB, hidden)
        rotation = Rotation(tape, hidden // heads)
        self.layers = [Layer(tape, hidden, heads, kv_heads, ffn, rotation) for _ in range(layers)]
        self.norm = Norm(tape, hidden)
        self.recompute = recompute

    def forward(self, tokens: Tensor, positions: Tensor, chunks: int) -> list[Tensor]:
        """Logits, whole and fp32, or in chunks of the sequence, whose rows are copied, as they are."""
        h = self.tokens(tokens)
        for layer in self.layers:
            h = region(self.tape, layer, None)(h, positions) if self.recompute else layer(h, positions)
        h = self.norm(h)
        if chunks == 0:
            return [to(linear(h, self.tokens.weight), "float32")]
        return [linear(clone(part), self.tokens.weight) for part in views.chunk(h, chunks, 1)]


def full_finetune(
    tape: Tape,
    *,
    model: str,
    batch: int,
    seq: int,
    chunks: int = 0,
    recompute: bool = False,
    in_backward: bool = False,
) -> Callable[[], object]:
    """The step: bf16 parameters, fused AdamW, one backward; `chunks` of the logits, 0 for the whole; `in_backward`
    updates each parameter as soon as its gradient is there, which is then gone."""
    decoder = Decoder(tape, **LLAMA_3_2[model], recompute=recompute)
    optimizer = FusedAdamW(tape, tape.parameters)
    tokens, positions, labels = (tape.new("batch", (batch, seq), "int64") for _ in range(3))
    tape.on_grad = drop if in_backward else None

    def loss() -> Tensor:
        logits = decoder(tokens, positions, chunks)
        if chunks == 0:
            return cross_entropy(flatten(logits[0], 0, 1), flatten(labels, 0))
        total: Tensor = tape.new("zeros", (), "float32")
        for part, targets in zip(logits, views.chunk(labels, chunks, 1), strict=True):
            total = add(total, cross_entropy(to(flatten(part, 0, 1), "float32"), flatten(clone(targets), 0)))
        return ops.scale(total, "div")

    def step() -> None:
        tape.backward(loss())
        optimizer.step()
        for parameter in tape.parameters:
            drop(parameter)

    return step


def drop(parameter: Parameter) -> None:
    """Lets a gradient go."""
    parameter.grad = None
