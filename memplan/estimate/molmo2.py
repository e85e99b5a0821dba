"""memplan's Molmo2 over the ledger: a vision tower, a connector, and a decoder to whose embeddings the image tokens are
added; module for module as `memplan.models` has them.

Letters: `B` batch, `N` crops, `P` patches of one crop, `T` image tokens of a sample, `p` patches pooled into one of
them, `h` width of the tower, `A` heads, `D` head size.
"""

from memplan.estimate import ops, views
from memplan.estimate.attention import causal_mask, eager, sdpa
from memplan.estimate.batch import Batch
from memplan.estimate.cache import KVCache
from memplan.estimate.checkpoint import put_on
from memplan.estimate.losses import Head
from memplan.estimate.model import Decoder, first_treated
from memplan.estimate.modules import LayerNorm, Linear, Module
from memplan.estimate.ops import add, mul
from memplan.estimate.products import index, scatter_add
from memplan.estimate.reference import GatedMlp, Mlp
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import cat, clone, flatten, to, transpose, unflatten_last, unsqueeze
from memplan.spec.model import ConnectorSpec, VisionSpec
from memplan.spec.run import RunSpec


class CrossAttention(Module):
    """Attention with biases from queries [N, Q, in] over a context [N, P, in] -> [N, Q, out]."""

    def __init__(
        self, tape: Tape, name: str, width: int, out: int, *, spec: VisionSpec | ConnectorSpec, kind: str
    ) -> None:
        super().__init__(tape, name)
        self.kind = kind
        self.head_dim = spec.head_dim
        inner = spec.num_heads * spec.head_dim
        self.q = Linear(tape, "q", width, inner, bias=True)
        self.k = Linear(tape, "k", width, inner, bias=True)
        self.v = Linear(tape, "v", width, inner, bias=True)
        self.out = Linear(tape, "out", inner, out, bias=True)

    def forward(self, queries: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        q = transpose(unflatten_last(self.q(queries), self.head_dim), 1, 2)
        k = transpose(unflatten_last(self.k(context), self.head_dim), 1, 2)
        v = transpose(unflatten_last(self.v(context), self.head_dim), 1, 2)
        single = views.is_one(q.shape[2])  # whose heads lie side by side in any order
        strided = "" if views.is_one(q.shape[0]) else "kv" if single else "qkv"
        if self.kind == "sdpa":
            out = sdpa(q, k, v, mask, causal=False, strided=strided)
        else:
            out = eager(q, k, v, None if mask is None else additive(mask, q.dtype), strided=strided)
        del q, k, v
        heads = transpose(out, 1, 2)
        copied = not single and (self.kind == "eager" or (out.node is not None and out.node.name in ("bmm", "to")))
        joined: Tensor = self.out(flatten(clone(heads) if copied else heads, 2))
        return joined


def additive(mask: Tensor, dtype: str) -> Tensor:
    """Zeros where `mask` is True and the lowest value elsewhere."""
    tape = mask.tape
    out: Tensor = tape.make("zeros", (mask.shape, dtype))
    tape.hidden("bitwise_not", mask.numel)
    return out


class VisionBlock(Module):
    """Norm, attention, residual; norm, GELU layer, residual: [N, P, h] -> [N, P, h]."""

    def __init__(self, tape: Tape, spec: VisionSpec, *, attention: str) -> None:
        super().__init__(tape, "vision.block")
        self.attn_norm = LayerNorm(tape, "attn_norm", spec.hidden)
        self.attn = CrossAttention(tape, "attn", spec.hidden, spec.hidden, spec=spec, kind=attention)
        self.mlp_norm = LayerNorm(tape, "mlp_norm", spec.hidden)
        self.mlp = Mlp(tape, "mlp", spec.hidden, spec.ffn, act="gelu", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = add(x, self.attend(self.attn_norm(x)))
        return add(x, self.mlp(self.mlp_norm(x)))

    def attend(self, normed: Tensor) -> Tensor:
        """Self-attention of the normed patches."""
        out: Tensor = self.attn(normed, normed, None)
        return out


class VisionTower(Module):
    """Patches [N, P, patch] -> outputs of the layers read [N, P, layers * h]."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        super().__init__(tape, "vision")
        spec, step = run.model.vision, run.step
        assert spec is not None
        self.spec = spec
        self.patch = Linear(tape, "patch", spec.patch_dim, spec.hidden, bias=True)
        self.positions = tape.setup.parameter(tape, "vision.positions", (spec.num_patches, spec.hidden))
        mode, first = step.checkpointing, first_treated(run, "vision.blocks")

        def kind(index: int) -> tuple[bool, bool]:
            return index in spec.layers_read, first is not None and mode.treats(first + index)

        def make(index: int) -> Module:
            return VisionBlock(tape, spec, attention=step.attention)

        self.stack = Stack(tape, [kind(index) for index in range(spec.num_layers)], make, counted=first is not None)
        if first is not None:
            put_on(tape, [(first + index, block) for index, block in self.stack.blocks], mode)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.patch(to(pixels, self.patch.weight.dtype))
        hidden = add(hidden, to(self.positions, hidden.dtype))
        read: dict[int, Tensor] = {}
        numbers = {id(block): index for index, block in self.stack.blocks}

        def call(block: Module, x: Tensor) -> Tensor:
            out: Tensor = block(x)
            if numbers[id(block)] in self.spec.layers_read:
                read[numbers[id(block)]] = out
            return out

        held = [hidden]
        del hidden
        self.stack.run(held, call)
        return cat([read[number] for number in self.spec.layers_read])


class Connector(Module):
    """Features [B, P, layers * h] and indices [B, T, p] -> image tokens [B, T, H]."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        super().__init__(tape, "connector")
        vision, spec = run.model.vision, run.model.connector
        assert vision is not None
        assert spec is not None
        width, kind = vision.hidden * len(vision.layers_read), run.step.attention
        self.pooling = CrossAttention(tape, "pooling", width, spec.hidden, spec=spec, kind=kind)
        self.projector = GatedMlp(
            tape, "projector", spec.hidden, spec.ffn, run.model.decoder.hidden, act="silu", bias=False, fused=False
        )

    def forward(self, features: Tensor, pooled_idx: Tensor) -> Tensor:
        tape, (samples, tokens, pool) = self.tape, pooled_idx.shape
        valid = tape.make("ge", (pooled_idx.shape, "bool"))
        patches = flatten(gather_patches(features, pooled_idx, valid), 0, 1)
        del features
        valid = flatten(valid, 0, 1)
        count = to(tape.make("sum", ((samples * tokens,), "float32")), patches.dtype)
        queries = ops.div(ops.total(patches, 1, keepdim=True), unsqueeze(unsqueeze(count, 1), 2))
        pooled = self.pooling(queries, patches, views.view(valid, samples * tokens, 1, 1, pool))
        del queries, patches, count, valid
        out: Tensor = self.projector(views.view(pooled, samples, tokens, pooled.shape[-1]))
        return out


def gather_patches(features: Tensor, pooled_idx: Tensor, valid: Tensor) -> Tensor:
    """The patches [B, T, p, layers * h] that each token pools, zero where there is none."""
    tape = features.tape
    sample = tape.make("arange", ((features.shape[0],), "int64"))
    patches = [index(features, sample, tape.make("clamp", (pooled_idx.shape, "int64")))]
    return mul(patches[0], to(unsqueeze(valid, -1), features.dtype))


class Molmo2:
    """memplan's model of images and text of a run."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape = tape
        self.decoder = Decoder(tape, run)
        tape.component = "vision"
        self.vision = VisionTower(tape, run)
        tape.component = "connector"
        self.connector = Connector(tape, run)
        for parameter in tape.parameters if not run.step.images else ():
            parameter.idle = parameter.component in ("vision", "connector")

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return self.decoder.head

    def forward(self, batch: Batch) -> Tensor:
        """Final normed hidden states [B, S, H] of the tokens that may carry a loss."""
        if "suffix" not in batch:
            return self.decoder.trunk([self.embed(batch)], self.mask(batch))
        cache = KVCache()
        self.decoder.encode([self.embed(batch)], self.mask(batch), cache)
        return self.decoder.read_cache(cache, batch["suffix"])

    def embed(self, batch: Batch) -> Tensor:
        """Embedded tokens [B, S, H] with the image tokens added at their places."""
        if "pixels" not in batch:
            return self.decoder.embed(batch["tokens"])
        images = self.connector(self.features(batch["pixels"]), batch["pooled_idx"])
        hidden = self.decoder.embed(batch["tokens"])
        return scatter_add(hidden, batch["image_index"], to(images, hidden.dtype))

    def features(self, pixels: Tensor) -> Tensor:
        """Features of every patch [B, crops * patches, layers * h]; without a graph when the tower is frozen."""
        tape, before = self.tape, self.tape.grad_enabled
        trains = any(one.requires_grad for one in tape.parameters if one.component == "vision")
        tape.grad_enabled = before and trains
        features = self.vision(flatten(pixels, 0, 1))
        tape.grad_enabled = before
        samples, crops = pixels.shape[:2]
        return views.view(features, samples, crops * features.shape[1], features.shape[2])

    def mask(self, batch: Batch) -> Tensor | None:
        """The dense mask under which image tokens see one another; None where the decoder makes its own."""
        if self.decoder.spec.mask != "dense" or "image_mask" not in batch:
            return None
        tape, (rows, size) = self.tape, batch["tokens"].shape
        seen = tape.make("and", ((rows, 1, size, size), "bool"))
        lower = tape.make("ones", ((size, size), "bool"))
        tape.hidden("tril", size * size)
        del lower
        mask = causal_mask(tape, rows, size, size)
        del seen
        return mask
