"""What a model is, as far as memory and arithmetic are concerned.

Letters: `H` hidden, `L` layers, `A` query heads, `K` key/value heads, `D` head size, `F` feed-forward, `V` vocabulary.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Literal, get_args

from memplan.errors import MemplanError, near_names

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned"]
Mlp = Literal["swiglu", "gelu", "gelu-tanh", "geglu"]
Projections = Literal["separate", "fused"]
Mask = Literal["causal", "dense"]
Component = Literal["embedding", "blocks", "vision", "connector", "head"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
CLASSIFIERS = ("vit", "siglip", "siglip_vision_model")
"""Families whose samples are one image each."""
EAGER = ("gemma2", "gpt_oss")
"""Families that transformers has no attention kernel of torch's for. Source: transformers 5.24, `_supports_sdpa`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3's frequency rescaling; it changes numbers, never sizes."""

    factor: float
    """Wavelengths beyond the low-frequency bound are stretched by this."""
    low_freq_factor: float
    """Divides the original length to give the longest wavelength that is only blended."""
    high_freq_factor: float
    """Divides the original length to give the shortest wavelength that is touched."""
    original_max_positions: int
    """Tokens of the length that the model was first trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A stack of pre-norm decoder blocks between an embedding and a head.

    Every field from `experts` on came later: a model that does not say it keeps its runs' identities.
    """

    num_layers: int
    """L, blocks."""
    hidden: int
    """H, width of the residual stream."""
    num_heads: int
    """A, query heads."""
    num_kv_heads: int
    """K, key/value heads; A must be a multiple."""
    head_dim: int
    """D, width of one head; A*D need not equal H."""
    ffn: int
    """F, width of the feed-forward layer."""
    vocab: int
    """V, rows of the output head and of the base embedding."""
    extra_vocab: int = 0
    """Rows of a second embedding table appended to the base one at each forward (Molmo2's trainer form)."""
    max_positions: int
    """Longest sequence; the rows of a learned position table."""
    norm: Norm = "rms"
    """RMSNorm or LayerNorm."""
    norm_bias: bool = False
    """Whether LayerNorm has a bias."""
    norm_eps: float = 1e-6
    """Added to the variance."""
    positions: Positions = "rope"
    """Rotary embedding in every block, or a learned table added once."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama-3's rescaling, where the model has one."""
    rope_fp32: bool = False
    """Rotate q and k in fp32 and cast back, whatever their dtype (Molmo2's trainer form)."""
    mlp: Mlp = "swiglu"
    """Gated SiLU with three matrices, one GELU between two, or gated GELU by tanh with three."""
    qkv_bias: bool = False
    """Bias on the q, k and v projections."""
    out_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Bias on the feed-forward matrices."""
    qk_norm: bool = False
    """RMSNorm of every query and key head before rotation, weight of D elements each."""
    tied: bool = True
    """The head reuses the base embedding's matrix."""
    projections: Projections = "separate"
    """q, k, v and gate, up as matrices of their own, or each group fused into one."""
    mask: Mask = "causal"
    """Causal flag inside the kernel, or a dense additive fp32 mask [B, 1, S, S] that every block casts and for which
    keys and values are repeated to A heads."""
    experts: int = 0
    """E, feed-forward layers of each block that a router chooses from; 0 for a dense layer."""
    experts_per_token: int = 0
    """Experts that each token goes through."""
    expert_ffn: int = 0
    """Width of one expert, instead of `ffn`."""
    norm_offset: bool = False
    """RMSNorm multiplies by 1 + weight, in fp32, as Gemma's does."""
    sandwich: bool = False
    """A norm behind attention and one behind the feed-forward layer too, before each is added."""
    scale_embedding: bool = False
    """Embedded tokens are multiplied by sqrt(H)."""
    head_softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap)."""
    window: int = 0
    """Tokens that a sliding block sees, itself included; 0 for no sliding blocks."""
    full_every: int = 1
    """With a window: every so manieth block sees all earlier tokens, the others slide."""
    kv_shared: int = 0
    """Blocks at the end that make no keys and values of their own: each reads those of the last earlier block of its
    kind, sliding or not."""

    def __post_init__(self) -> None:
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_ffn > 0):
            raise MemplanError(
                f"{self.experts} experts go with experts_per_token from 1 to {self.experts} and an expert_ffn above 0."
            )
        for index in range(self.num_layers - self.kv_shared, self.num_layers if self.kv_shared else 0):
            self.kv_source(index)

    def slides(self, index: int) -> bool:
        """Whether block `index` sees the last `window` tokens only."""
        return self.window > 0 and (index + 1) % self.full_every != 0

    def kv_source(self, index: int) -> int | None:
        """The block whose keys and values block `index` reads, or None where it makes its own."""
        first = self.num_layers - self.kv_shared
        if index < first:
            return None
        for earlier in range(first - 1, -1, -1):
            if self.slides(earlier) == self.slides(index):
                return earlier
        raise MemplanError(
            f"Block {index} shares keys and values, but no block of its kind before block {first} makes any.",
            "Let fewer blocks share: a smaller kv_shared.",
        )

    def leaves_kv(self, index: int) -> bool:
        """Whether later blocks read the keys and values of block `index`."""
        return any(self.kv_source(later) == index for later in range(self.num_layers - self.kv_shared, self.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A SigLIP-style tower: patch linear, learned positions, pre-norm blocks with biases, no head."""

    num_layers: int
    """Blocks that are built; layers past the last one read are left out."""
    hidden: int
    """Width of a patch."""
    num_heads: int
    """Attention heads, all with keys and values of their own."""
    head_dim: int
    """Width of one head."""
    ffn: int
    """Width of the GELU layer."""
    num_patches: int
    """Patches of one crop: 27 x 27 = 729 for 378 pixels at patch size 14."""
    patch_dim: int
    """Elements of one flattened patch: 14 x 14 x 3 = 588."""
    norm_eps: float = 1e-6
    """Added to the variance."""
    layers_read: tuple[int, ...]
    """Block outputs given to the connector, by position counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSpec:
    """Molmo2's connector: cross-attention pooling of patches, then a SwiGLU projector into the decoder's width."""

    hidden: int
    """Width of the pooling attention's output."""
    num_heads: int
    """Heads of the pooling attention."""
    head_dim: int
    """Width of one head."""
    ffn: int
    """Width of the projector's gated layer."""
    pool: int
    """Patches pooled into one image token: 2 x 2 = 4 for images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model with the set-up that its users usually train it in."""

    name: str
    """Name on the command line."""
    family: str
    """llama, qwen2, qwen3, mistral, gpt2, nanogpt or molmo2."""
    decoder: DecoderSpec
    """The language model."""
    vision: VisionSpec | None = None
    """The vision tower, if there is one."""
    connector: ConnectorSpec | None = None
    """What joins the tower to the decoder; present exactly when `vision` is."""
    frozen: tuple[Component, ...] = ()
    """Components whose parameters do not train. With a tied head, `embedding` freezes the head's matrix too; the extra
    rows of the embedding always train."""
    seq: int
    """Usual sequence length, tokens."""
    precision: str
    """Usual precision, a name of `StepSpec.precision`."""
    images: int = 0
    """Usual crops a sample, for models with a vision tower."""
    impl: str = "memplan"
    """Whose module trains: `memplan` (the lean reference), `hf` (transformers') or `user`."""
    config: str = ""
    """What `hf` builds from, transformers' configuration as canonical JSON; `pkg.mod:make` for `user`."""
    source: str
    """Where the facts come from."""
    notes: tuple[str, ...] = ()
    """What was assumed about the model because its configuration does not say it."""

    @property
    def usual_attention(self) -> str:
        """What computes attention where nobody asks, a name of `StepSpec.attention`."""
        return "eager" if self.impl == "hf" and self.family in EAGER else "sdpa"

    def usual_workload(self, images: int) -> str:
        """What is trained on samples of `images` crops where nobody asks, a name of `StepSpec.workload`."""
        return "vlm" if images else "classify" if self.family in CLASSIFIERS else "lm"

    @property
    def has_tower(self) -> bool:
        """Whether an image encoder stands beside its decoder, even one that no step here runs."""
        if self.vision is not None or self.impl != "hf" or self.family in CLASSIFIERS:
            return self.vision is not None
        return bool(json.loads(self.config).get("vision_config"))

    @property
    def components(self) -> tuple[Component, ...]:
        """What it is made of; nothing where only its owner knows."""
        if self.impl == "user":
            return ()
        absent = set() if self.has_tower else {"vision", "connector"}
        if self.connector is None and self.family != "other":
            absent.add("connector")
        return tuple(name for name in COMPONENTS if name not in absent)

    def frozen_to(self, names: str) -> "ModelSpec":
        """This model with just the components of `names`, `embedding+vision` or `none`, frozen; MemplanError when one
        is unknown, or no part of it."""
        asked = () if names == "none" else tuple(names.split("+"))
        for name in asked:
            if name not in COMPONENTS:
                raise MemplanError(f"Unknown component {name!r}.", near_names(name, COMPONENTS))
            if self.impl == "user":
                raise MemplanError(
                    f"Nobody knows which parameters of {self.name} are its {name}.",
                    "Leave --freeze out and let it freeze them: parameter.requires_grad_(False).",
                )
            if name not in self.components:
                raise MemplanError(f"{self.name} has no {name} to freeze.", f"It has {', '.join(self.components)}.")
        frozen = tuple(name for name in COMPONENTS if name in asked)
        return dataclasses.replace(self, frozen=frozen)

    def image_tokens(self, images: int) -> int:
        """Image tokens T that `images` crops make: each square of p patches is one, cut squares at the edges included.

        Formula: images * ceil(sqrt(patches) / sqrt(p))^2; 4 crops of 27 x 27 patches, pooled 2 x 2, make
        4 * 14^2 = 784.
        """
        if images == 0:
            return 0
        if self.vision is None or self.connector is None:
            if self.has_tower:
                raise MemplanError(
                    f"The image encoder of {self.name} is counted, but no step here runs it: steps are over text.",
                    "Leave --images out.",
                )
            raise MemplanError(f"{self.name} has no vision tower.", "Leave --images out.")
        side, pool = math.isqrt(self.vision.num_patches), math.isqrt(self.connector.pool)
        return images * math.ceil(side / pool) ** 2
