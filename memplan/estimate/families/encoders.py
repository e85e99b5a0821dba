"""ViT and SigLIP as transformers 5.24 has them, under their classifiers, and SigLIP as the tower of other models.

Locals live as long as those of models/vit/modeling_vit.py and models/siglip/modeling_siglip.py. Letters: `B` images,
`P` patches, `H` hidden, `A` heads, `D` head size.
"""

from typing import Any

from memplan.errors import MemplanError
from memplan.estimate import ops, views
from memplan.estimate.checkpoint import put_on
from memplan.estimate.families import config_of
from memplan.estimate.families.hf_attention import attend
from memplan.estimate.families.hf_decoder import activated
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, LayerNorm, Linear, Module
from memplan.estimate.ops import add, dropout
from memplan.estimate.products import bmm, conv2d, lowered, mm
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import cast_weight, clone, expand, flatten, narrow, to, transpose, unflatten_last, view
from memplan.spec.run import RunSpec

Facts = dict[str, Any]
"""Keys of a configuration."""


class Patches(Module):
    """Whole images [B, C, h, w] -> [B, P, H] by a convolution whose steps are as wide as its window."""

    def __init__(self, tape: Tape, name: str, config: Facts) -> None:
        super().__init__(tape, name)
        width, size = config["hidden_size"], config["patch_size"]
        self.weight = tape.setup.parameter(tape, f"{name}.weight", (width, config["num_channels"], size, size))
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
        x = self.fc2(x)
        return x


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
        width, size = config["hidden_size"], config["patch_size"]
        self.cls_token = tape.setup.parameter(tape, "cls_token", (1, 1, width))
        self.patch_embeddings = Patches(tape, "patch_embeddings", config)
        rows = (config["image_size"] // size) ** 2 + 1
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


class SiglipEmbeddings(Module):
    """Patches with their places."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        super().__init__(tape, "embeddings")
        self.patch_embedding = Patches(tape, "patch_embedding", config)
        num = (config["image_size"] // config["patch_size"]) ** 2
        self.position_embedding = Embedding(tape, "position_embedding", num, config["hidden_size"])
        self.position_ids = tape.new("buffer", (1, num), "int64", category="buffers")

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embedding(to(pixels, self.patch_embedding.weight.dtype))
        x = add(x, self.position_embedding(self.position_ids))
        return x


class PoolingHead(Module):
    """One row an image by attention of a trained one, torch's `nn.MultiheadAttention`, and a feed-forward layer."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        super().__init__(tape, "head")
        width = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        parameter = tape.setup.parameter
        self.probe = parameter(tape, "probe", (1, 1, width))
        self.in_proj_weight = parameter(tape, "attention.in_proj_weight", (3 * width, width))
        self.in_proj_bias = parameter(tape, "attention.in_proj_bias", (3 * width,))
        self.out_weight = parameter(tape, "attention.out_proj.weight", (width, width))
        self.out_bias = parameter(tape, "attention.out_proj.bias", (width,))
        self.layernorm = LayerNorm(tape, "layernorm", width)
        self.mlp = Mlp(tape, config)

    def forward(self, x: Tensor) -> Tensor:
        probe = clone(expand(self.probe, x.shape[0], 1, x.shape[2]))
        x = self.attended(probe, x)
        residual = x
        x = self.layernorm(x)
        x = add(residual, self.mlp(x))
        del probe
        return x

    def attended(self, probe: Tensor, x: Tensor) -> Tensor:
        """Rows [B, 1, H] by the weights of the probe [B, 1, H] towards x [B, P, H], made of products; weights
        are averaged over the heads though nobody reads them."""
        B, P, H = x.shape
        size = H // self.heads
        query_weight, pair_weight = views.split(self.in_proj_weight, [H, 2 * H], 0)
        query_bias, pair_bias = views.split(self.in_proj_bias, [H, 2 * H], 0)
        q = mm(lowered(flatten(probe, 0, 1)), transpose(cast_weight(query_weight), 0, 1), cast_weight(query_bias))
        pair_bias, pair_weight = cast_weight(pair_bias), cast_weight(pair_weight)
        rows = flatten(clone(transpose(lowered(x), 0, 1)), 0, 1)
        pairs = add(mm(rows, transpose(pair_weight, 0, 1)), pair_bias)
        del rows
        pairs = view(clone(pairs), 2, P, B * self.heads, size)
        k, v = views.unbind(pairs)
        k, v = transpose(k, 0, 1), transpose(v, 0, 1)
        q = view(q, B * self.heads, 1, size)
        weights = ops.softmax(bmm(ops.scale(q), transpose(k, 1, 2)))
        out = view(bmm(weights, v), B, H)
        out = mm(out, transpose(cast_weight(self.out_weight), 0, 1), cast_weight(self.out_bias))
        mean = ops.mean(view(weights, B, self.heads, 1, P), 1)
        del mean
        return view(out, B, 1, H)


class SiglipTower:
    """SigLIP's image encoder: pixels [n, C, h, w] -> final normed rows [n, P, H]. Its pooling head runs where the
    config has one, but leads nowhere: `idle` says that nobody reads it. The caller names the component."""

    def __init__(self, tape: Tape, config: Facts, run: RunSpec, *, first: int = 0) -> None:
        self.tape = tape
        whole = tape.component
        if whole == "blocks":
            tape.component = "embedding"
        self.embeddings = SiglipEmbeddings(tape, config)
        tape.component = whole
        self.encoder = Encoder(tape, config, run, first)
        self.post_layernorm = LayerNorm(tape, "post_layernorm", config["hidden_size"])
        self.post_layernorm.strided = True
        self.pooling = None
        if config["vision_use_head"]:
            if whole == "blocks":
                tape.component = "head"
            self.pooling = PoolingHead(tape, config)
            for parameter in self.pooling.parameters():
                parameter.idle = True
            tape.component = whole

    def forward(self, pixels: Tensor) -> Tensor:
        """Final normed rows; the embedded ones stay until then."""
        embedded = self.embeddings(pixels)
        x = self.encoder(embedded)
        x = self.post_layernorm(x)
        pooled = None if self.pooling is None else self.pooling(x)
        del pooled
        return x


class Siglip:
    """Encoder whose rows are averaged and classified; without a classifier it is only counted, with the text model
    beside it where the class has both."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape = tape
        config = self.config = config_of(run)
        self.architecture = (config.get("architectures") or ["SiglipForImageClassification"])[0]
        vision = config.get("vision_config", config)
        tape.component = "blocks"
        self.tower = SiglipTower(tape, vision, run)
        tape.component = "head"
        if self.architecture == "SiglipForImageClassification":
            self.classifier = Linear(tape, "classifier", vision["hidden_size"], config["num_labels"], bias=True)
        elif self.architecture == "SiglipModel":
            self.text = SiglipText(tape, config["text_config"], run)
            for name in ("logit_scale", "logit_bias"):
                tape.setup.parameter(tape, name, (1,))

    @property
    def head(self) -> Head:
        """What makes logits of a row."""
        return Head(weight=self.classifier.weight, bias=self.classifier.bias)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean row of each image [B, 1, H]."""
        if self.architecture != "SiglipForImageClassification":
            raise MemplanError(f"A {self.architecture} has no classifier to train.", "Name SiglipForImageClassification.")
        rows = self.tower.forward(batch["pixels"])
        return views.unsqueeze(ops.mean(rows, 1), 1)


class SiglipText:
    """The parameters of SigLIP's text model, which no step here runs."""

    def __init__(self, tape: Tape, config: Facts, run: RunSpec) -> None:
        width = config["hidden_size"]
        tape.component = "embedding"
        self.tokens = Embedding(tape, "token_embedding", config["vocab_size"], width)
        self.positions = Embedding(tape, "position_embedding", config["max_position_embeddings"], width)
        tape.component = "blocks"
        self.encoder = Encoder(tape, config, run)
        self.final_layer_norm = LayerNorm(tape, "final_layer_norm", width)
        tape.component = "head"
        self.projection = Linear(tape, "head", width, config["projection_size"], bias=True)
