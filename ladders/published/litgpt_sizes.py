"""The iteration of litgpt.py over the estimate's ledger, module for module. Letters as there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from litgpt_nf4_sizes import Nf4Linear
from litgpt_shapes import DROPOUT, FIRST_PROMPTED, HEAD_ROWS, PROMPT_ROWS, RANK, SHAPES, TRAINED, Shape

from memplan.estimate import ops, views
from memplan.estimate.attention import sdpa
from memplan.estimate.modules import Embedding, LayerNorm, Linear, Module
from memplan.estimate.ops import add, mul
from memplan.estimate.optimizers import ForeachAdamW
from memplan.estimate.products import linear, log_softmax, nll_losses
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import cat, clone, narrow, split, squeeze, to, transpose, view


def conv1d(x: Tensor, weight: Tensor) -> Tensor:
    """Rows x [B, I, S] by a matrix [O, I / groups, 1] -> [B, O, S]: saves both."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        dtype, pairs = grads[0].dtype, zip(node.edges, node.info, strict=True)
        return [None if edge is None else tape.new("convolution_backward", shape, dtype) for edge, shape in pairs]

    node = tape.record("convolution", (x, weight), backward, (x, weight), info=(x.shape, weight.shape))
    return tape.link(node, tape.make("convolution", ((x.shape[0], weight.shape[0], x.shape[2]), x.dtype)))


def index_copy(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """A copy of rows x [N, O] with the columns [N, n] of `source` at the places [n]: saves source and places."""
    tape = x.tape

    def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
        grad, wanted = grads[0], [edge is not None for edge in node.edges]
        return [
            tape.new("index_fill", grad.shape, grad.dtype) if wanted[0] else None,
            tape.new("index_select", node.info, grad.dtype) if wanted[1] else None,
        ]

    node = tape.record("index_copy", (x, source), backward, (index, source), info=source.shape)
    return tape.link(node, tape.make("index_copy", (x.shape, x.dtype)))


class Norm(Module):
    """RMSNorm in fp32."""

    def __init__(self, tape: Tape, name: str, width: int) -> None:
        super().__init__(tape, name)
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width,))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = to(x, "float32")
        x = mul(x, ops.rsqrt(ops.shift(ops.mean_last(mul(x, x)))))
        return to(mul(self.weight, x), dtype)


class AdaptedQkv(Module):
    """A frozen fused projection [H, 3H] with adapters for q and v."""

    def __init__(self, tape: Tape, width: int, recipe: "Recipe", *, bias: bool) -> None:
        super().__init__(tape, "qkv")
        self.linear = recipe.frozen(tape, "linear", width, 3 * width, bias=bias)
        self.lora_down = tape.setup.parameter(tape, "lora_down", (2 * RANK, width))
        self.lora_up = tape.setup.parameter(tape, "lora_up", (2 * width, RANK))

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.linear(x)
        inner = linear(ops.dropout(x, DROPOUT), self.lora_down)
        outer = transpose(conv1d(transpose(inner, 1, 2), views.unsqueeze(self.lora_up, 2)), 1, 2)
        return add(frozen, ops.scale(self.padded(outer)))

    def padded(self, x: Tensor) -> Tensor:
        """[B, S, 2H] -> [B, S, 3H], zeros for k."""
        x = transpose(x, 0, 1)
        seq, batch, width = x.shape
        rows, wide = seq * batch, 3 * width // 2
        whole = self.tape.new("new_zeros", (rows, wide), x.dtype)
        index = self.tape.new("columns", (width,), "int64")
        whole = index_copy(whole, index, view(x if batch == 1 else clone(x), rows, width))
        return transpose(view(whole, seq, batch, wide), 0, 1)


class ScaledLinear(Module):
    """Adapter v2: a frozen linear, its output shifted and scaled."""

    def __init__(self, tape: Tape, name: str, width: int, out: int, recipe: "Recipe", *, bias: bool) -> None:
        super().__init__(tape, name)
        self.linear = recipe.frozen(tape, "linear", width, out, bias=bias)
        self.adapter_bias = tape.setup.parameter(tape, "adapter_bias", (out,))
        self.adapter_scale = tape.setup.parameter(tape, "adapter_scale", (out,))

    def forward(self, x: Tensor) -> Tensor:
        return mul(self.adapter_scale, add(self.linear(x), self.adapter_bias))


@dataclass(frozen=True)
class Recipe:
    """What a run trains, and how it keeps the rest: as in litgpt.py."""

    kind: str
    quantised: str

    def frozen(self, tape: Tape, name: str, width: int, out: int, *, bias: bool) -> Module:
        """A linear of the model itself."""
        if self.quantised:
            return Nf4Linear(tape, name, width, out, bias=bias, nested=self.quantised == "nf4-dq")
        return Linear(tape, name, width, out, bias=bias)

    def linear(self, tape: Tape, name: str, width: int, out: int, *, bias: bool) -> Module:
        """A linear with what is trained of it, outside of LoRA's qkv."""
        if self.kind == "adapter-v2":
            return ScaledLinear(tape, name, width, out, self, bias=bias)
        return self.frozen(tape, name, width, out, bias=bias)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [B, A, S, D] rotated by two halves; the tables are fp16, so the products are fp32."""
    half = x.shape[-1] // 2
    turned = cat((ops.neg(narrow(x, -1, half)), narrow(x, -1, half)))
    return to(add(mul(x, cos), mul(turned, sin)), x.dtype)


class Attention(Module):
    """[B, S, H] -> [B, S, H]."""

    def __init__(self, tape: Tape, shape: Shape, recipe: Recipe, *, prompted: bool) -> None:
        super().__init__(tape, "attn")
        self.shape = shape
        bias, width = not shape.llama, shape.hidden
        if recipe.kind == "lora":
            self.qkv: Module = AdaptedQkv(tape, width, recipe, bias=bias)
        else:
            self.qkv = recipe.linear(tape, "qkv", width, 3 * width, bias=bias)
        self.out = recipe.linear(tape, "out", width, width, bias=bias)
        self.prompted = prompted
        if prompted:
            self.adapter_prompt = tape.setup.parameter(tape, "adapter_prompt", (PROMPT_ROWS, width))
            self.adapter_gate = tape.setup.parameter(tape, "adapter_gate", (1, 1, shape.heads, 1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.heads(x)
        q, k, v = (squeeze(t, 2) for t in split(qkv, (1, 1, 1), 2))
        q, k = (cat((rotated(self.first(t), cos, sin), self.rest(t))) for t in (q, k))
        out = transpose(sdpa(q, k, v, strided="v"), 1, 2)
        if self.prompted:
            out = add(out, mul(self.adapter_gate, self.attend_prompt(q)))
        return self.out(view(clone(out), *x.shape))

    def heads(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, A, 3, S, D]."""
        qkv = view(self.qkv(x), *x.shape[:2], self.shape.heads, 3, -1)
        return views.permute(qkv, 0, 2, 3, 1, 4)

    def first(self, x: Tensor) -> Tensor:
        """The elements that are rotated; a slice of all is a view that backward does nothing for."""
        part = self.shape.rotary
        return view(x, *x.shape) if part == x.shape[-1] else narrow(x, -1, part)

    def rest(self, x: Tensor) -> Tensor:
        """The others, of which there may be none."""
        return narrow(x, -1, x.shape[-1] - self.shape.rotary)

    def attend_prompt(self, q: Tensor) -> Tensor:
        """Attention of the queries to the trained rows, [B, S, A, D]."""
        rows = self.heads(view(self.adapter_prompt, 1, *self.adapter_prompt.shape))
        _, k, v = (squeeze(t, 2) for t in split(rows, (1, 1, 1), 2))
        mask = self.tape.new("ones", (q.shape[2], PROMPT_ROWS), "bool")
        return transpose(sdpa(q, k, v, mask, causal=False, strided="kv"), 1, 2)


class Mlp(Module):
    """Gated SiLU, or one GELU between two matrices."""

    def __init__(self, tape: Tape, shape: Shape, recipe: Recipe) -> None:
        super().__init__(tape, "mlp")
        bias = not shape.llama
        self.up = recipe.linear(tape, "up", shape.hidden, shape.ffn, bias=bias)
        self.gate = recipe.linear(tape, "gate", shape.hidden, shape.ffn, bias=False) if shape.llama else None
        self.down = recipe.linear(tape, "down", shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(ops.of_input("gelu", self.up(x)))
        return self.down(mul(ops.of_input("silu", self.gate(x)), self.up(x)))


class Block(Module):
    """[B, S, H] -> [B, S, H]."""

    def __init__(self, tape: Tape, shape: Shape, recipe: Recipe, *, prompted: bool) -> None:
        super().__init__(tape, "block")
        norm = Norm if shape.llama else LayerNorm
        self.llama = shape.llama
        self.attn_norm = norm(tape, "attn_norm", shape.hidden)
        self.attn = Attention(tape, shape, recipe, prompted=prompted)
        self.mlp_norm = None if shape.one_norm else norm(tape, "mlp_norm", shape.hidden)
        self.mlp = Mlp(tape, shape, recipe)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attn_norm(x)
        h = self.attn(normed, cos, sin)
        if self.llama:
            assert self.mlp_norm is not None
            x = add(x, h)
            return add(x, self.mlp(self.mlp_norm(x)))
        return add(add(x, h), self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x)))


class Gpt(Module):
    """Tokens [B, S] -> logits of 128 tokens each."""

    def __init__(self, tape: Tape, shape: Shape, seq: int, recipe: Recipe) -> None:
        super().__init__(tape)
        self.head = recipe.linear(tape, "head", shape.hidden, shape.vocab, bias=shape.head_bias)
        self.tokens = Embedding(tape, "tokens", shape.vocab, shape.hidden)
        first = shape.layers if recipe.kind == "lora" else FIRST_PROMPTED
        self.blocks = [Block(tape, shape, recipe, prompted=at >= first) for at in range(shape.layers)]
        self.norm = (Norm if shape.llama else LayerNorm)(tape, "norm", shape.hidden)
        self.cos, self.sin = (tape.new("buffer", (seq, shape.rotary), "float16") for _ in range(2))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return [self.head(part) for part in split(self.norm(x), head_rows(x.shape[1]), 1)]


def head_rows(num: int) -> list[int]:
    """Tokens of each run of the head."""
    return [min(HEAD_ROWS, num - start) for start in range(0, num, HEAD_ROWS)]


def mean_loss(logits: list[Tensor], labels: Tensor) -> Tensor:
    """Of logits [B, n, V] a part against the next token; the last part has none for its last token, so that its rows
    are copied where there are several samples."""
    batch, seq = labels.shape
    last = logits[-1]
    logits[-1] = narrow(last, 1, last.shape[1] - 1)
    del last
    targets = split(narrow(labels, 1, seq - 1), head_rows(seq - 1), 1)
    losses = []
    for number, (part, target) in enumerate(zip(logits, targets, strict=True)):
        whole = batch == 1 or number + 1 < len(logits)
        rows = views.flatten(part if whole else clone(part), 0, 1)
        losses.append(nll_losses(log_softmax(rows), views.flatten(target if batch == 1 else clone(target), 0, 1)))
        del part, target, rows
    return ops.scale(ops.total(cat(losses)), "div")


def finetune(tape: Tape, *, kind: str, model: str, batch: int, seq: int, quantised: str = "") -> Callable[[], object]:
    """The iteration: weights in bf16, or linears in `nf4` or `nf4-dq`; what `kind` (`lora`, `adapter`, `adapter-v2`)
    adds is trained by AdamW."""
    gpt = Gpt(tape, SHAPES[model], seq, Recipe(kind, quantised))
    for parameter in tape.parameters:
        parameter.requires_grad = any(part in parameter.name for part in TRAINED[kind])
    trained = [parameter for parameter in tape.parameters if parameter.requires_grad]
    tokens, labels = (tape.new("batch", (batch, seq), "int64") for _ in range(2))
    optimizers: list[ForeachAdamW] = []

    def step() -> None:
        logits = [to(part, "float32") for part in gpt(tokens)]
        loss = mean_loss(logits, labels)
        tape.backward(loss)
        if not optimizers:
            optimizers.append(ForeachAdamW(tape, trained))
        optimizers[0].step()
        for parameter in trained:
            parameter.grad = None

    return step
