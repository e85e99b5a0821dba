"""SigLIP as transformers 5.24 has it: its image encoder under a classifier, and as the tower of other models.

Locals live as long as those of models/siglip/modeling_siglip.py. Letters: `B` images, `P` patches, `H` hidden.
"""

from memplan.errors import MemplanError
from memplan.estimate import ops, views
from memplan.estimate.autocast import operands
from memplan.estimate.families import config_of
from memplan.estimate.families.encoders import Encoder, Facts, Mlp, Patches, num_patches
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, LayerNorm, Linear, Module
from memplan.estimate.ops import add
from memplan.estimate.products import bmm, mm
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import clone, expand, flatten, to, transpose, view
from memplan.spec.run import RunSpec


class SiglipEmbeddings(Module):
    """Patches with their places."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        super().__init__(tape, "embeddings")
        self.patch_embedding = Patches(tape, "patch_embedding", config)
        num = num_patches(config)
        self.position_embedding = Embedding(tape, "position_embedding", num, config["hidden_size"], words=False)
        self.position_ids = tape.new("buffer", (1, num), "int64", category="buffers")

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embedding(to(pixels, self.patch_embedding.weight.dtype))
        return add(x, self.position_embedding(self.position_ids))


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
        probe, query_weight, query_bias = operands(flatten(probe, 0, 1), query_weight, query_bias)
        q = mm(probe, transpose(query_weight, 0, 1), query_bias)
        del probe, query_weight, query_bias
        cast, pair_weight, pair_bias = operands(x, pair_weight, pair_bias)
        rows = flatten(clone(transpose(cast, 0, 1)), 0, 1)
        pairs = add(mm(rows, transpose(pair_weight, 0, 1)), pair_bias)
        del rows, cast
        pairs = view(clone(pairs), 2, P, B * self.heads, size)
        k, v = views.unbind(pairs)
        k, v = transpose(k, 0, 1), transpose(v, 0, 1)
        q = view(q, B * self.heads, 1, size)
        weights = ops.softmax(bmm(ops.scale(q), transpose(k, 1, 2)))
        out = view(bmm(weights, v), B, H)
        out, weight, bias = operands(out, self.out_weight, self.out_bias)
        out = mm(out, transpose(weight, 0, 1), bias)
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
        tape.component = whole if whole == "blocks" else f"{whole} blocks"
        self.encoder = Encoder(tape, config, run, first)
        tape.component = whole
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
            raise MemplanError(
                f"A {self.architecture} has no classifier to train.", "Name SiglipForImageClassification."
            )
        rows = self.tower.forward(batch["pixels"])
        return views.unsqueeze(ops.mean(rows, 1), 1)


class SiglipText:
    """The parameters of SigLIP's text model, which no step here runs."""

    def __init__(self, tape: Tape, config: Facts, run: RunSpec) -> None:
        width = config["hidden_size"]
        tape.component = "embedding"
        self.tokens = Embedding(tape, "token_embedding", config["vocab_size"], width)
        self.positions = Embedding(tape, "position_embedding", config["max_position_embeddings"], width, words=False)
        tape.component = "blocks"
        self.encoder = Encoder(tape, config, run)
        self.final_layer_norm = LayerNorm(tape, "final_layer_norm", width)
        tape.component = "head"
        self.projection = Linear(tape, "head", width, config["projection_size"], bias=True)
