"""The vision tower and the connector, by the decoder's own formulas where the shapes are the same.

Letters: `N` rows (samples x crops x patches), `h` width of the tower, `T` image tokens of a backward pass, `p` patches
pooled into one, `F` width of the projector's gated layer.
"""

from dataclasses import dataclass

from memplan.estimate.activations import decoder_block, feed_forward, output
from memplan.estimate.parts import Part, Stage, Widths
from memplan.spec.model import ConnectorSpec, DecoderSpec, VisionSpec
from memplan.spec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCost:
    """What the images of one backward pass cost, bytes."""

    entry: Part
    """Patches, their linear and their positions."""
    blocks: tuple[Stage, ...]
    """The tower's blocks; none when the tower keeps nothing because nothing in it trains."""
    frozen_forward: int
    """Most alive in the forward of a tower that keeps nothing."""
    features: int
    """The concatenated outputs that the connector reads, and their gradient."""
    connector: Stage
    """Pooling attention and projector."""


def vision_cost(run: RunSpec, samples: int) -> VisionCost | None:
    """Tower and connector over `samples` of one chunk; None without images."""
    vision, connector = run.model.vision, run.model.connector
    if vision is None or connector is None or run.step.images == 0:
        return None
    widths = Widths.of_tower(run)
    crops = samples * run.step.images
    rows = crops * vision.num_patches
    block = decoder_block(crops, vision.num_patches, block_spec(vision), widths, kind=run.step.attention, norms="fused")
    trains = "vision" not in run.model.frozen
    features = widths.compute * rows * vision.hidden * len(vision.layers_read)
    tokens = samples * run.model.image_tokens(run.step.images)
    return VisionCost(
        entry=patches(rows, vision, widths, trains=trains),
        blocks=(block,) * vision.num_layers if trains else (),
        frozen_forward=0 if trains else block.unkept_forward + features,
        features=features if trains else 0,
        connector=connector_stage(tokens, vision, connector, run),
    )


def block_spec(spec: VisionSpec) -> DecoderSpec:
    """A decoder whose blocks have the tower's shapes: LayerNorms, biases everywhere, no rotation, GELU by tanh."""
    return DecoderSpec(
        num_layers=spec.num_layers,
        hidden=spec.hidden,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        vocab=1,
        max_positions=spec.num_patches,
        norm="layer",
        norm_bias=True,
        positions="learned",
        mlp="gelu-tanh",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def patches(rows: int, spec: VisionSpec, widths: Widths, *, trains: bool) -> Part:
    """The patch linear: keeps its input, patch_dim elements a row, where that is a low-precision copy of the pixels."""
    numel = spec.hidden * spec.patch_dim
    positions = spec.num_patches * spec.hidden
    copy = widths.compute * rows * spec.patch_dim if widths.compute == 2 else 0
    stream = widths.compute * rows * spec.hidden
    return Part(
        name="patches",
        saved=copy if trains else 0,
        casts=2 * numel if widths.mixed and trains else 0,
        forward=copy + 2 * stream,
        backward=stream + widths.param * numel,
        grads=widths.param * (numel + spec.hidden + positions) if trains else 0,
    )


def connector_stage(tokens: int, vision: VisionSpec, spec: ConnectorSpec, run: RunSpec) -> Stage:
    """Pooling and projector over T = `tokens` image tokens.

    Formula, bytes a token: the gathered patches w*p*2h, their mean w*2h, keys and values 2*w*p*inner, query and output
    2*w*inner, the pooled row w*hidden, the projector's 4*w*F, and 17*p of indices and validity.
    Leaves out: the attention mask's expansion.
    """
    tower, decoder = Widths.of_tower(run), Widths.of(run)
    # Rows are in the compute dtype from the tower on, so no product copies them.
    widths = Widths(
        compute=tower.compute, residual=tower.compute, param=tower.param, normed=tower.compute, rules=tower.rules
    )
    w = widths.compute
    source = vision.hidden * len(vision.layers_read)
    inner = spec.num_heads * spec.head_dim
    matrices = 3 * inner * source
    biases = 3 * inner
    gathered = w * tokens * spec.pool * source
    keys = w * tokens * spec.pool * inner
    queries = w * tokens * inner
    indices = 17 * tokens * spec.pool
    pooling = Part(
        name="pooling",
        saved=gathered + w * tokens * source + 2 * keys + 2 * queries + 4 * tokens * spec.num_heads + indices,
        casts=2 * matrices if widths.mixed else 0,
        forward=2 * gathered + 2 * keys + 2 * queries,
        backward=2 * gathered + keys + widths.param * (matrices + biases),
        grads=widths.param * (matrices + biases),
    )
    hidden = run.model.decoder.hidden
    wide = 2 * spec.ffn * spec.hidden
    stream = decoder.residual * tokens * hidden
    parts = (
        pooling,
        output("out", tokens, inner, spec.hidden, spec.hidden * inner, spec.hidden, widths),
        feed_forward(tokens, spec.hidden, spec.ffn, "swiglu", wide, 0, widths, False),
        output("down", tokens, spec.ffn, hidden, hidden * spec.ffn, 0, widths),
    )
    return Stage(
        name="connector",
        parts=parts,
        carried=stream,
        held=0,
        output=stream,
        entry=0,
        entry_saved=False,
    )
