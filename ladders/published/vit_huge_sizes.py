"""One step of torchao's benchmark over the estimate's ledger: ViT-H with a classifier of 45 classes, bf16 autocast.

Written from pytorch/ao benchmarks/benchmark_low_bit_adam.py at 65f660d29 and timm 1.0 models/vision_transformer.py
(vit_huge_patch14_224, which attends by scaled_dot_product_attention and makes q, k and v by one matrix). Here nothing
is compiled, as the benchmark's model is.

Letters: `B` images, `N` rows of one, `H` hidden.
"""

from collections.abc import Callable

from vit_huge_shapes import CLASSES, HEADS, HIDDEN, LAYERS, PATCH, SIDE

from memplan.estimate import ops, views
from memplan.estimate.attention import sdpa
from memplan.estimate.modules import LayerNorm, Linear, Module
from memplan.estimate.ops import add
from memplan.estimate.optimizers import OPTIMIZERS
from memplan.estimate.products import conv2d, cross_entropy
from memplan.estimate.setup import Setup
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import flatten, squeeze, to, transpose


class Attention(Module):
    """q, k and v [B, A, N, D] are views of one product."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, "attn")
        self.qkv = Linear(tape, "qkv", HIDDEN, 3 * HIDDEN, bias=True)
        self.proj = Linear(tape, "proj", HIDDEN, HIDDEN, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        qkv = views.permute(views.view(self.qkv(x), B, N, 3, HEADS, HIDDEN // HEADS), 2, 0, 3, 1, 4)
        q, k, v = views.unbind(qkv)
        x = sdpa(q, k, v, causal=False)
        x = flatten(transpose(x, 1, 2), 2)
        return self.proj(x)


class Mlp(Module):
    """Two matrices with a GELU between them."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, "mlp")
        self.fc1 = Linear(tape, "fc1", HIDDEN, 4 * HIDDEN, bias=True)
        self.fc2 = Linear(tape, "fc2", 4 * HIDDEN, HIDDEN, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = ops.of_input("gelu", x)
        return self.fc2(x)


class Block(Module):
    """x + attention(norm(x)), then the same with the feed-forward."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, "block")
        self.norm1, self.attn = LayerNorm(tape, "norm1", HIDDEN), Attention(tape)
        self.norm2, self.mlp = LayerNorm(tape, "norm2", HIDDEN), Mlp(tape)

    def forward(self, x: Tensor) -> Tensor:
        x = add(x, self.attn(self.norm1(x)))
        return add(x, self.mlp(self.norm2(x)))


class Classifier(Module):
    """Patches behind a row of the whole image, blocks, norm, and a linear over that row."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        make = tape.setup.parameter
        self.cls_token = make(tape, "cls_token", (1, 1, HIDDEN))
        self.pos_embed = make(tape, "pos_embed", (1, (SIDE // PATCH) ** 2 + 1, HIDDEN))
        self.weight = make(tape, "patch_embed.weight", (HIDDEN, 3, PATCH, PATCH))
        self.bias = make(tape, "patch_embed.bias", (HIDDEN,))
        self.blocks = [Block(tape) for _ in range(LAYERS)]
        self.norm, self.head = LayerNorm(tape, "norm", HIDDEN), Linear(tape, "head", HIDDEN, CLASSES, bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        x = transpose(flatten(conv2d(pixels, self.weight, self.bias), 2), 1, 2)
        first = views.expand(self.cls_token, x.shape[0], 1, HIDDEN)
        x = add(views.cat([first, to(x, first.dtype)], 1), self.pos_embed)
        del first
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(squeeze(views.narrow(x, 1, 1), 1))


def finetune(tape: Tape, *, optimizer: str, batch: int = 8) -> Callable[[], object]:
    """The step: fp32 parameters, products in bf16, one backward, `optimizer`."""
    tape.setup = Setup(dtype="float32", frozen=(), rank=0, adapted=(), lora_base="", computed="bfloat16", dropout=0.0)
    model = Classifier(tape)
    update = OPTIMIZERS[optimizer](tape, tape.parameters)

    def loss() -> Tensor:
        tape.autocast = "bfloat16"
        pixels = tape.new("cuda", (batch, 3, SIDE, SIDE), "float32")
        logits = model(pixels)
        out = cross_entropy(to(logits, "float32"), tape.new("cuda", (batch,), "int64"))
        tape.leave_autocast()
        return out

    def step() -> None:
        tape.backward(loss())
        update.step()
        for parameter in tape.parameters:
            parameter.grad = None

    return step
