"""ViT under its classifier as transformers 5.24 has it, and the layers that it shares with SigLIP.

Locals live as long as those of models/vit/modeling_vit.py. Letters: `B` images, `P` patches, `H` hidden, `A` heads, `D`
head size.
"""

from typing import Any

from memplan.errors import MemplanError
from memplan.estimate import views
from memplan.estimate.checkpoint import put_on
from memplan.estimate.families import config_of
from memplan.estimate.families.hf_attention import attend
from memplan.estimate.families.hf_decoder import activated
from memplan.estimate.losses import Head
from memplan.estimate.modules import LayerNorm, Linear, Module
from memplan.estimate.ops import add, dropout
from memplan.estimate.products import conv2d
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import expand, flatten, narrow, to, transpose, unflatten_last
from memplan.spec.run import RunSpec

Facts = dict[str, Any]
"""Keys of a configuration."""


def pair(size: Any) -> tuple[Any, Any]:
    """Height and width, which a configuration gives as one number where they are equal."""
    return (size[0], size[1]) if isinstance(size, list) else (size, size)


def num_patches(config: Facts) -> Any:
    """Patches of an image."""
    (height, width), (down, right) = pair(config["image_size"]), pair(config["patch_size"])
    return (height // down) * (width // right)


class Patches(Module):
    """Whole images [B, C, h, w] -> [B, P, H] by a convolution whose steps are as wide as its window."""

    def __init__(self, tape: Tape, name: str, config: Facts) -> None:
        super().__init__(tape, name)
        width, sides = config["hidden_size"], pair(config["patch_size"])
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width, config["num_channels"], *sides))
        self.bias = tape.setup.parameter(tape, f"{name}.bias", (width,))

    def forward(self, pixels: Tensor) -> Tensor:
        return transpose(flatten(conv2d(pixels, self.weight, self.bias), 2), 1, 2)


class Attention(Module):
    """Attention to all patches [B, P, H] -> [B, P, H]."""

    def __init__(self, tape: Tape, config: Facts, kind: str, name: str, out: str, *, bias: bool) -> None:
        super().__init__(tape, name)
        self.kind = kind
        width = config["hidden_size"]
        self.size = width // config["num_attention_heads"]
        self.q_proj = Linear(tape, "q_proj", width, width, bias=bias)
        self.k_proj = Linear(tape, "k_proj", width, width, bias=bias)
        self.v_proj = Linear(tape, "v_proj", width, width, bias=bias)
        self.out = Linear(tape, out, width, width, bias=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        q = transpose(unflatten_last(self.q_proj(x), self.size), 1, 2)
        k = transpose(unflatten_last(self.k_proj(x), self.size), 1, 2)
        v = transpose(unflatten_last(self.v_proj(x), self.size), 1, 2)
        out, weights = attend(self.kind, q, k, v, None, drop=self.tape.setup.dropout, causal=False)
        out = flatten(out, 2)
        out = self.out(out)
        return out, weights


class Mlp(Module):
    """Two matrices with an activation between them."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        super().__init__(tape, "mlp")
        self.act = config["hidden_act"]
        self.fc1 = Linear(tape, "fc1", config["hidden_size"], config["intermediate_size"], bias=True)
        self.fc2 = Linear(tape, "fc2", config["intermediate_size"], config["hidden_size"], bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = activated(self.act, x)
        out: Tensor = self.fc2(x)
        return out


class Layer(Module):
    """Norm, attention, residual; norm, feed-forward, residual; ViT drops before each residual, SigLIP does not."""

    def __init__(self, tape: Tape, config: Facts, kind: str) -> None:
        super().__init__(tape, "layers")
        vit, width = config["model_type"] == "vit", config["hidden_size"]
        names = ("attention", "o_proj") if vit else ("self_attn", "out_proj")
        self.drop = tape.setup.dropout if vit else 0.0
        self.attention = Attention(tape, config, kind, *names, bias=config.get("qkv_bias", True))
        self.norm_before = LayerNorm(tape, "layernorm_before" if vit else "layer_norm1", width)
        self.norm_after = LayerNorm(tape, "layernorm_after" if vit else "layer_norm2", width)
        self.norm_before.strided = self.norm_after.strided = not vit  # as the patches' convolution laid them out
        self.mlp = Mlp(tape, config)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.norm_before(x)
        x, weights = self.attention(x)
        x = dropout(x, self.drop)
        x = add(x, residual)
        residual = x
        x = self.norm_after(x)
        x = self.mlp(x)
        x = dropout(x, self.drop)
        x = add(x, residual)
        del weights
        return x


class Encoder:
    """The layers of an image encoder, checkpointed as the step says; `first` numbers them behind others."""

    def __init__(self, tape: Tape, config: Facts, run: RunSpec, first: int = 0) -> None:
        kind, mode = run.step.attention, run.step.checkpointing
        kinds = [mode.treats(first + index) for index in range(config["num_hidden_layers"])]
        self.stack = Stack(tape, kinds, lambda index: Layer(tape, config, kind))
        put_on(tape, [(first + index, block) for index, block in self.stack.blocks], mode)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` through all layers; the caller holds on to it."""
        return self.stack.run([x], lambda layer, x: layer(x))


class VitEmbeddings(Module):
    """Patches behind a row of the whole image, with their places."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        super().__init__(tape, "embeddings")
        width = config["hidden_size"]
        self.cls_token = tape.setup.parameter(tape, "cls_token", (1, 1, width))
        self.patch_embeddings = Patches(tape, "patch_embeddings", config)
        rows = num_patches(config) + 1
        self.position_embeddings = tape.setup.parameter(tape, "position_embeddings", (1, rows, width))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embeddings(pixels)
        first = expand(self.cls_token, x.shape[0], 1, x.shape[2])
        x = views.cat((first, to(x, first.dtype)), 1)
        x = add(x, self.position_embeddings)
        return dropout(x, self.tape.setup.dropout)


class Vit:
    """Encoder whose first row is classified; the class without a classifier has a pooler, with which it cannot train
    here."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape = tape
        config = self.config = config_of(run)
        self.classifies = (config.get("architectures") or ["ViTForImageClassification"])[0] != "ViTModel"
        width = config["hidden_size"]
        tape.component = "embedding"
        self.embeddings = VitEmbeddings(tape, config)
        tape.component = "blocks"
        self.encoder = Encoder(tape, config, run)
        self.layernorm = LayerNorm(tape, "layernorm", width)
        tape.component = "head"
        if self.classifies:
            self.classifier = Linear(tape, "classifier", width, config["num_labels"], bias=True)
        else:
            self.pooler = Linear(tape, "pooler", width, config["pooler_output_size"], bias=True)

    @property
    def head(self) -> Head:
        """What makes logits of a row."""
        return Head(weight=self.classifier.weight, bias=self.classifier.bias)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The first row of each image [B, 1, H]."""
        if not self.classifies:
            raise MemplanError("A ViTModel has no classifier to train.", "Name ViTForImageClassification.")
        return narrow(self.encode(batch["pixels"]), 1, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        """Final normed rows [B, 1 + P, H]; converted pixels and embedded rows stay until then."""
        pixels = to(pixels, self.embeddings.patch_embeddings.weight.dtype)
        embedded = self.embeddings(pixels)
        x = self.encoder(embedded)
        out: Tensor = self.layernorm(x)
        return out
